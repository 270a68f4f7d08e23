"""Small charts as inline SVG.  Colours come from the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LABEL, _VALUE = 580, 210, 64
_BAR, _GAP = 16, 8
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 240, 44, 150, 12, 34
SERIES = 8
"""How many colours the page has for lines."""


@dataclass(frozen=True, slots=True)
class Bar:
    """kind: the style, "ours", "synthetic" or "peer".  upper: where its whisker ends."""

    label: str
    value: float | None
    kind: str
    upper: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """values: at 1, 2, ...; None where there is none."""

    label: str
    values: tuple[float | None, ...]


def bars(title: str, items: Sequence[Bar], digits: int, mark: float | None = None) -> str:
    """Horizontal bars from zero; `mark` is a line to compare them with.  Empty where there is nothing to show."""
    known = [bar for bar in items if bar.value is not None]
    if not known:
        return ""
    most = max(max(bar.value or 0, bar.upper or 0, mark or 0) for bar in known) or 1.0
    scale = (_WIDTH - _LABEL - 2 * _VALUE) / most
    height = len(known) * (_BAR + _GAP) + _GAP
    parts = [_bar(bar, _GAP + i * (_BAR + _GAP), scale, digits) for i, bar in enumerate(known)]
    return _figure(title, height, [*_mark(mark, scale, height), *parts])


def _mark(mark: float | None, scale: float, height: float) -> list[str]:
    if mark is None:
        return []
    at = _LABEL + scale * mark
    return [f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}"/>']


def _bar(bar: Bar, y: float, scale: float, digits: int) -> str:
    value = bar.value or 0.0
    end, middle = _LABEL + scale * value, y + _BAR / 2
    last = end
    whisker = ""
    shown = f"{value:.{digits}f}"
    if bar.upper is not None:
        last = _LABEL + scale * bar.upper
        whisker = f'<path class="whisker" d="M{end:.1f} {middle}H{last:.1f}m0 -4v8"/>'
        shown += f" – {bar.upper:.{digits}f}"
    return (
        f"<g><title>{escape(bar.label)}: {shown}</title>"
        f'<text class="name" x="{_LABEL - 8}" y="{middle}">{escape(bar.label)}</text>'
        f'<rect class="{bar.kind}" x="{_LABEL}" y="{y}" width="{max(scale * value, 1):.1f}" height="{_BAR}" rx="2"/>'
        f'{whisker}<text class="value" x="{last + 6:.1f}" y="{middle}">{shown}</text></g>'
    )


def lines(title: str, series: Sequence[Line]) -> str:
    """Shares from 0 to 1 over positions 1, 2, ...; empty where there is nothing to show."""
    known = [line for line in series if any(value is not None for value in line.values)]
    if not known:
        return ""
    count = max(len(line.values) for line in known)
    step = (_WIDTH - _LEFT - _RIGHT) / max(count - 1, 1)
    floor = _HEIGHT - _BOTTOM
    grid = [_grid_line(share, _y(share)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    ticks = [
        f'<text class="tick" x="{_LEFT + i * step:.1f}" y="{floor + 18}">{i + 1}</text>'
        for i in range(0, count, math.ceil(count / 12))
    ]
    drawn = [_line(line, i, step) for i, line in enumerate(known)]
    legend = [_legend(line, i) for i, line in enumerate(known)]
    return _figure(title, _HEIGHT, [*grid, *ticks, *drawn, *legend])


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)


def _grid_line(share: float, y: float) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="name" x="{_LEFT - 8}" y="{y:.1f}">{share:.0%}</text>'
    )


def _line(line: Line, number: int, step: float) -> str:
    points = [(_LEFT + i * step, _y(value)) for i, value in enumerate(line.values) if value is not None]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
    shown = ", ".join("-" if value is None else f"{value:.0%}" for value in line.values)
    return (
        f'<g class="series s{number % SERIES}"><title>{escape(line.label)}: {shown}</title>'
        f'<path d="M{path}"/>{dots}</g>'
    )


def _legend(line: Line, number: int) -> str:
    x, y = _WIDTH - _RIGHT + 16, _TOP + 8 + 18 * number
    return (
        f'<g class="series s{number % SERIES}"><circle cx="{x}" cy="{y}" r="4"/></g>'
        f'<text class="legend" x="{x + 10}" y="{y}">{escape(line.label)}</text>'
    )


def _figure(title: str, height: float, parts: Iterable[str]) -> str:
    label = escape(title, quote=True)
    return (
        f'<figure><figcaption>{label}</figcaption><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg></figure>'
    )
