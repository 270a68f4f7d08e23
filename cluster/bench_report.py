"""What `paceline bench run` has found: its rows, what was measured where, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.actors.trace import Span
from paceline.cluster.bench_stats import PLAIN, Case, Row
from paceline.cluster.config import NONE

SYNTHETIC = (
    "synthetic: an oracle drafter was told the target's answers and errs on purpose; its rows check the machinery "
    "against theory and say nothing about any real drafter"
)
_LIBRARIES = ("torch", "transformers", "ray")


@dataclass(slots=True)
class Report:
    """The rows so far.  about: what was measured, on what.  complete: nothing is missing.

    save: is called with the report whenever rows have come.  spans: what the actors did, for a timeline.
    """

    about: Mapping[str, Any]
    save: Callable[[Report], None] | None = None
    complete: bool = False
    notes: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    shown: bool = False
    _rows: dict[tuple[Any, ...], Row] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def put(self, rows: Sequence[Row]) -> None:
        """Add rows; one that is about the same as an earlier one takes its place."""
        self._rows |= {_key(row): row for row in rows}
        if self.save is not None:
            self.save(self)

    def drop(self, case: Case) -> None:
        """Forget the row of a case that turned out not to be measurable."""
        self._rows.pop(_key(case), None)

    def note(self, text: str) -> None:
        """Remember something that a reader has to know, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def remarks(self) -> list[str]:
        """What a reader has to know: the notes, and what the rows call for."""
        unfinished = [] if self.complete else ["the run was cut short: rows may be missing, or rest on fewer prompts"]
        synthetic = [SYNTHETIC] if any(row.synthetic for row in self.rows) else []
        return [*unfinished, *synthetic, *self.notes]

    def as_object(self) -> dict[str, Any]:
        """The report as plain values."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {**self.about, "complete": self.complete, "remarks": self.remarks, "rows": rows}


def _key(about: Row | Case) -> tuple[Any, ...]:
    return (about.cell, about.batch, about.temperature, about.system, about.label)


def sections(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows that can be compared with each other, under what they have in common."""
    found: dict[tuple[str, int, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row.cell, row.batch, row.temperature), []).append(row)
    return [(_title(group), group) for group in found.values()]


def _title(rows: Sequence[Row]) -> str:
    first = rows[0]
    synthetic = " (synthetic)" if any(row.synthetic for row in rows) else ""
    return f"drafter {first.cell}{synthetic}, batch {first.batch}, temperature {first.temperature:g}, {first.dtype}"


def _number(digits: int, scale: float = 1) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else f"{scale * value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table.  field: the name in Row.  meaning: for those who ask."""

    head: str
    field: str
    show: Callable[[Any], str]
    meaning: str


COLUMNS = (
    Column("tokens/s", "tokens_per_s", _number(2), "over the whole time, prefill included"),
    Column("/device", "tokens_per_s_per_device", _number(2), "tokens/s divided by the devices (or cores) in use"),
    Column("x plain", "over_plain", _number(2), "tokens/s over those of plain in the same turns"),
    Column("first ms", "ttft_p50_s", _number(0, 1e3), "time to the first token, median"),
    Column("token p50", "inter_token_p50_s", _number(1, 1e3), "ms between tokens, median; n at once count n times"),
    Column("p99", "inter_token_p99_s", _number(1, 1e3), "the same, 99th percentile"),
    Column("length", "acceptance_length", _number(2), "acceptance length: mean tokens per verify pass"),
    Column("rate", "acceptance_rate", _percent, "accepted draft tokens of those verified"),
    Column("hit", "hit_rate", _percent, "verdicts whose branch had been grown already"),
    Column("overlap", "overlap", _percent, "share of verify time in which a drafter worked too"),
    Column("wait", "exposed_wait", _percent, "share of the requests' time spent waiting for a draft"),
    Column("decode/s", "decode_tokens_per_s", _number(2), "tokens/s from the first token on"),
    Column("formula", "formula_tokens_per_s", _number(2), "what theory gives for the costs and acceptance of this run"),
    Column("of it", "measured_over_formula", _number(2), "decode/s over formula"),
    Column("differ", "differing", _number(0), "answers that are not plain's, with the same seed"),
)


def as_text(report: Report) -> str:
    """The report as tables for a terminal."""
    blocks = [f"{title}\n{_table(rows)}" for title, rows in sections(report.rows)]
    return "\n\n".join([*blocks, *report.remarks])


def _table(rows: Sequence[Row]) -> str:
    lines = [["", *(column.head for column in COLUMNS)]]
    lines += [[_name(row), *(column.show(getattr(row, column.field)) for column in COLUMNS)] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(_aligned(line, widths)).rstrip() for line in lines)


def _name(row: Row) -> str:
    return f"{row.label} (synthetic)" if row.synthetic and row.schedule != PLAIN else row.label


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]


def write_json(path: Path, report: Report) -> None:
    """Write the report, so that at any moment a whole one lies there.  OSError if it cannot be written."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(report.as_object(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def drafter_label(drafters: Sequence[str]) -> str:
    """What a cell's drafters are called together."""
    return "+".join(drafters) or NONE


def about(command: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a report begins with: when, how and on what it was made."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "settings": dict(settings),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            **{name: version(name) for name in _LIBRARIES},
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
