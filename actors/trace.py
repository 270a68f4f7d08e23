"""Timelines: what every lane (an actor, so a device) did when; always recorded, cheaply, into a bounded ring.

Written as Chrome trace JSON they open in Perfetto (ui.perfetto.dev) or chrome://tracing.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

VERIFY, DRAFT, VERDICT = "verify", "draft", "verdict"
"""The names that the readers here know: a verify pass, a draft step, and a verdict where it is sent and received."""

CAPACITY = 2**15
"""Spans kept per lane; at ten passes a second, some ten minutes."""


class Span(NamedTuple):
    """Something that a lane did.  start, end: seconds of time.monotonic(), equal for a mark, which takes no time.

    Processes of one machine share that clock; of several machines, only spans of the same one can be compared.
    """

    lane: str
    name: str
    start: float
    end: float
    args: Mapping[str, int | float | str] = {}


class Tracer:
    """The ring of one lane: the newest `capacity` spans.  Safe from any thread, and never waits."""

    def __init__(self, lane: str, capacity: int = CAPACITY) -> None:
        self._lane = lane
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._draining = threading.Lock()

    def record(self, name: str, start: float, end: float, **args: int | float | str) -> None:
        """Note a span."""
        self._spans.append(Span(self._lane, name, start, end, args))

    def mark(self, name: str, at: float, **args: int | float | str) -> None:
        """Note an instant."""
        self._spans.append(Span(self._lane, name, at, at, args))

    def drain(self) -> list[Span]:
        """Take out what was noted since the last time, in the order in which it was noted."""
        # Recording beside it only ever makes the ring longer.
        with self._draining:
            return [self._spans.popleft() for _ in range(len(self._spans))]


def overlap(spans: Iterable[Span]) -> float | None:
    """The share of verify time in which at least one drafter worked too, 0 to 1; None if nothing was verified."""
    known = list(spans)
    drafting = _union((span.start, span.end) for span in known if span.name == DRAFT)
    verifying = [span for span in known if span.name == VERIFY]
    total = sum(span.end - span.start for span in verifying)
    if total <= 0:
        return None
    by_lane: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in verifying:
        by_lane[span.lane].append((span.start, span.end))
    return sum(_common(_union(passes), drafting) for passes in by_lane.values()) / total


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same points of time as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _common(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """The length of what two unions share."""
    shared, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        shared += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def write_chrome(path: Path, spans: Iterable[Span]) -> None:
    """Write spans as Chrome trace JSON: one thread per lane, times from the first span on.  OSError if it cannot be."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    first = ordered[0].start if ordered else 0.0
    threads = {lane: number for number, lane in enumerate(_lanes(ordered), start=1)}
    events = [event for lane, thread in threads.items() for event in _name(lane, thread)]
    events += [_event(span, threads[span.lane], first) for span in ordered]
    events += _flows(ordered, threads, first)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _lanes(spans: Sequence[Span]) -> list[str]:
    """Those that verify first, then the others, each by name."""
    verifiers = {span.lane for span in spans if span.name == VERIFY}
    return sorted({span.lane for span in spans}, key=lambda lane: (lane not in verifiers, lane))


def _name(lane: str, thread: int) -> list[dict[str, Any]]:
    where = {"ph": "M", "pid": 1, "tid": thread}
    return [
        {**where, "name": "thread_name", "args": {"name": lane}},
        {**where, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]


def _event(span: Span, thread: int, first: float) -> dict[str, Any]:
    event = {"name": span.name, "pid": 1, "tid": thread, "ts": _micros(span.start, first), "args": dict(span.args)}
    if span.end > span.start:
        return event | {"ph": "X", "dur": _micros(span.end, span.start)}
    return event | {"ph": "i", "s": "t"}


def _micros(at: float, since: float) -> float:
    return round(1e6 * (at - since), 1)


def _flows(ordered: Sequence[Span], threads: Mapping[str, int], first: float) -> list[dict[str, Any]]:
    """Arrows from a verdict, where it was sent, to the first draft step that began after it was received.

    A sent verdict names its drafter in the argument `to`, a received one its verifier in `of`; both have session,
    epoch and base_len.
    """
    sent = {(span.lane, span.args["to"], _which(span)): span for span in ordered if "to" in span.args}
    arrived: dict[str, list[Span]] = defaultdict(list)
    events: list[dict[str, Any]] = []
    for span in ordered:
        if span.name == VERDICT and (span.args.get("of"), span.lane, _which(span)) in sent:
            arrived[span.lane].append(sent[str(span.args["of"]), span.lane, _which(span)])
        elif span.name == DRAFT:
            for verdict in arrived.pop(span.lane, ()):
                events += _arrow(len(events) + 1, verdict, span, threads, first)
    return events


def _which(verdict: Span) -> tuple[object, ...]:
    return tuple(verdict.args.get(name) for name in ("session", "epoch", "base_len"))


def _arrow(
    number: int, verdict: Span, step: Span, threads: Mapping[str, int], first: float
) -> Iterable[dict[str, Any]]:
    flow = {"name": VERDICT, "cat": VERDICT, "id": number, "pid": 1}
    return (
        {**flow, "ph": "s", "tid": threads[verdict.lane], "ts": _micros(verdict.start, first)},
        {**flow, "ph": "f", "bp": "e", "tid": threads[step.lane], "ts": _micros(step.start, first)},
    )
