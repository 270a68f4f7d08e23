"""The benchmark's report as one self-contained HTML page: charts, all the numbers, and what they were measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from paceline.cluster.bench_chart import Bar, Line, bars, lines
from paceline.cluster.bench_report import COLUMNS, Report, sections
from paceline.cluster.bench_stats import PACELINE, PLAIN, Row

_TEMPLATE = "bench_page.html.j2"


@dataclass(frozen=True, slots=True)
class _Section:
    title: str
    charts: list[Markup]
    rows: list[tuple[str, str, list[str]]]


def write_html(path: Path, report: Report) -> None:
    """Write the page.  OSError if it cannot be written."""
    path.write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    found = [_section(title, rows) for title, rows in sections(report.rows)]
    template = environment.get_template(_TEMPLATE)
    return template.render(about=report.about, remarks=report.remarks, sections=found, columns=COLUMNS)


def _section(title: str, rows: Sequence[Row]) -> _Section:
    plain = next((row.tokens_per_s for row in rows if row.schedule == PLAIN), None)
    charts = (
        bars("tokens/s (line: plain)", _bars(rows, lambda row: row.tokens_per_s), 2, mark=plain),
        bars("tokens/s per device (or core)", _bars(rows, lambda row: row.tokens_per_s_per_device), 2, mark=plain),
        bars("ms between tokens: median – 99th percentile", [_intervals(row) for row in rows], 1),
        bars("measured / formula", _bars(rows, lambda row: row.measured_over_formula), 2, mark=1.0),
        lines("accepted draft tokens by position", [Line(row.label, row.acceptance_by_position) for row in rows]),
    )
    cells = [(row.label, kind(row), [column.show(getattr(row, column.field)) for column in COLUMNS]) for row in rows]
    # The charts' own text is escaped where they are drawn.
    return _Section(title, [Markup(chart) for chart in charts if chart], cells)


def kind(row: Row) -> str:
    """How a row is shown: "ours", "synthetic" or "peer"."""
    if row.system != PACELINE:
        return "peer"
    return "synthetic" if row.synthetic and row.schedule != PLAIN else "ours"


def _bars(rows: Sequence[Row], value: Callable[[Row], float | None]) -> list[Bar]:
    return [Bar(row.label, value(row), kind(row)) for row in rows]


def _intervals(row: Row) -> Bar:
    return Bar(row.label, _ms(row.inter_token_p50_s), kind(row), _ms(row.inter_token_p99_s))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
