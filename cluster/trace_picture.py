"""A stretch of a trace as an SVG picture, for documents; viewers of the whole file show more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from paceline.actors.trace import DRAFT, VERDICT, VERIFY

_WIDTH, _LABEL, _LANE, _BOX, _TOP, _AXIS = 960, 90, 58, 30, 34, 30
_COLOURS = {VERIFY: "#3b6fb6", DRAFT: "#e0a339", "hit": "#2e8b57", "miss": "#c0392b", VERDICT: "#777777"}
_LEGEND = {
    VERIFY: "verify pass: tokens it gave",
    DRAFT: "draft step",
    "hit": "hit",
    "miss": "miss",
    VERDICT: "verdict",
}
_TICKS = 10


class TraceUnreadable(ValueError):
    """It is no trace that we wrote, or there is nothing in the stretch asked for."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Milliseconds from `start` on, and where they lie in the picture."""

    start: float
    length: float

    def x(self, at: float) -> float:
        return _LABEL + (at - self.start) / self.length * (_WIDTH - _LABEL - 10)

    def covers(self, event: dict[str, Any]) -> bool:
        start: float = event["ts"] / 1e3
        end: float = start + event.get("dur", 0) / 1e3
        return end > self.start and start < self.start + self.length


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace file.  Raises OSError and TraceUnreadable."""
    try:
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return [event for event in events if event["ph"] in "MXisf" and (event["ph"] == "M" or event["ts"] >= 0)]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceUnreadable(f"{path} is no Chrome trace of JSON events: {type(error).__name__}") from error


def draw(events: Sequence[dict[str, Any]], start: float | None, length: float) -> str:
    """An SVG picture of `length` milliseconds from `start` on; None: from the middle of the trace.

    Raises TraceUnreadable when nothing happened then.
    """
    lanes = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    timed = [event for event in events if event["ph"] != "M" and event.get("tid") in lanes]
    last = max((event["ts"] for event in timed), default=0) / 1e3
    if start is None:
        start = max(0.0, last / 2 - length / 2)
    stretch = _Stretch(start, length)
    seen = [event for event in timed if stretch.covers(event)]
    if not seen:
        raise TraceUnreadable(
            f"nothing happens from {start:g} to {start + length:g} ms; the trace ends at {last:.0f} ms"
        )
    rows = {lane: float(_TOP + row * _LANE) for row, lane in enumerate(sorted({event["tid"] for event in seen}))}
    bottom = _TOP + len(rows) * _LANE
    parts = [_background(bottom + _AXIS), *_legend(), *_axis(stretch, bottom)]
    parts += [_text(8, y + _LANE / 2 + 4, lanes[lane]) for lane, y in rows.items()]
    parts += _arrows(timed, seen, rows, stretch)
    parts += [_event(event, rows[event["tid"]], stretch) for event in seen if event["ph"] in "Xi"]
    size = f'viewBox="0 0 {_WIDTH} {bottom + _AXIS}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'


def _background(height: float) -> str:
    return f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'


def _text(x: float, y: float, text: str, fill: str = "#333333", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend() -> list[str]:
    parts, x = [], float(_LABEL)
    for name, meaning in _LEGEND.items():
        parts.append(f'<rect x="{x:.1f}" y="9" width="10" height="10" fill="{_COLOURS[name]}"/>')
        parts.append(_text(x + 15, 18, meaning))
        x += 35 + 6.6 * len(meaning)
    return parts


def _axis(stretch: _Stretch, bottom: float) -> list[str]:
    parts = []
    for tick in range(_TICKS + 1):
        ms = stretch.length * tick / _TICKS
        x = stretch.x(stretch.start + ms)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#e6e6e6"/>')
        parts.append(_text(x, bottom + 18, f"{ms:g} ms" if tick == _TICKS else f"{ms:g}", "#777777", "middle"))
    return parts


def _event(event: dict[str, Any], y: float, stretch: _Stretch) -> str:
    """A box for what took time, a mark for what did not."""
    colour = _COLOURS.get(event["name"], "#999999")
    at = stretch.x(event["ts"] / 1e3)
    if event["ph"] == "i":
        if event["name"] not in ("hit", "miss"):
            return ""
        top = y + (_LANE - _BOX) / 2
        return f'<path d="M{at:.1f} {top} l-4 -9 h8 z" fill="{colour}"/>'
    x = max(at, _LABEL)
    end = min(stretch.x((event["ts"] + event["dur"]) / 1e3), _WIDTH - 10)
    box = f'x="{x:.1f}" y="{y + (_LANE - _BOX) / 2}" width="{max(end - x, 0.5):.1f}" height="{_BOX}"'
    tokens = event["args"].get("tokens") if event["name"] == VERIFY else None
    label = (
        ""
        if tokens is None or end - x < 14
        else _text((x + end) / 2, y + _LANE / 2 + 4, f"{tokens}", "#ffffff", "middle")
    )
    return f'<rect {box} fill="{colour}" stroke="#ffffff" stroke-width="0.6"/>{label}'


def _arrows(
    timed: Sequence[dict[str, Any]], seen: Sequence[dict[str, Any]], rows: dict[int, float], stretch: _Stretch
) -> list[str]:
    """Verdicts, from where they were sent to the draft step that knew of them."""
    ends = {event["id"]: event for event in timed if event["ph"] == "f"}
    parts = []
    for start in (event for event in seen if event["ph"] == "s"):
        end = ends.get(start["id"])
        if end is None or end["tid"] not in rows or not stretch.covers(end):
            continue
        x1, x2 = (stretch.x(event["ts"] / 1e3) for event in (start, end))
        y1, y2 = rows[start["tid"]] + (_LANE + _BOX) / 2, rows[end["tid"]] + (_LANE - _BOX) / 2
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" stroke="{_COLOURS[VERDICT]}" stroke-width="1.2"/>'
        )
    return parts
