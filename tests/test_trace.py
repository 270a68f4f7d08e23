"""Timelines: what is kept, how much of the verifying overlapped with drafting, and the file that viewers read."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from paceline.actors.trace import Span, Tracer, overlap, write_chrome


def verify(start: float, end: float, lane: str = "verifier") -> Span:
    return Span(lane, "verify", start, end)


def draft(start: float, end: float, lane: str = "drafter-0") -> Span:
    return Span(lane, "draft", start, end)


def test_a_tracer_gives_each_span_out_once_and_in_order():
    tracer = Tracer("drafter-0")
    tracer.record("draft", 1.0, 2.5, sessions=3)
    tracer.mark("verdict", 3.0, of="verifier")
    expected = [
        Span("drafter-0", "draft", 1.0, 2.5, {"sessions": 3}),
        Span("drafter-0", "verdict", 3.0, 3.0, {"of": "verifier"}),
    ]
    assert tracer.drain() == expected
    assert tracer.drain() == []


def test_a_full_tracer_forgets_the_oldest():
    tracer = Tracer("verifier", capacity=3)
    for at in range(10):
        tracer.mark("hit", float(at))
    assert [span.start for span in tracer.drain()] == [7.0, 8.0, 9.0]


def test_nothing_is_lost_or_doubled_when_drained_beside_the_recording():
    tracer, count = Tracer("verifier"), 20_000
    recording = threading.Thread(target=lambda: [tracer.mark("hit", float(at)) for at in range(count)])
    recording.start()
    drained: list[Span] = []
    while recording.is_alive():
        drained += tracer.drain()
    recording.join()
    drained += tracer.drain()
    assert [span.start for span in drained] == [float(at) for at in range(count)]


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], None),
        ([draft(0, 1)], None),
        ([verify(0, 4)], 0.0),
        ([verify(0, 4), draft(4, 9)], 0.0),
        ([verify(0, 4), draft(1, 2)], 0.25),
        # Two steps at once count once, whichever drafter they are of.
        ([verify(0, 4), draft(1, 3), draft(2, 4, "drafter-1")], 0.75),
        ([verify(0, 4), draft(0, 2), draft(0, 1, "drafter-1"), draft(1, 3)], 0.75),
        ([verify(0, 1), verify(2, 3), verify(5, 6), draft(0.5, 2.5)], 1 / 3),
        # A longer pass counts more.
        ([verify(0, 1), verify(1, 10), draft(0, 1)], 0.1),
        # Verifiers do not hide each other.
        ([verify(0, 2), verify(0, 2, "verifier-1"), draft(0, 1)], 0.5),
        # Marks take no time.
        ([verify(0, 1), verify(1, 1), draft(0.5, 0.5)], 0.0),
    ],
)
def test_overlap_is_the_share_of_verifying_beside_drafting(spans: list[Span], share: float | None):
    assert overlap(spans) == (None if share is None else pytest.approx(share))
    assert overlap(reversed(spans)) == overlap(spans)


def written(tmp_path: Path, spans: list[Span]) -> list[dict[str, Any]]:
    write_chrome(tmp_path / "trace.json", spans)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all({"ph", "pid", "tid", "name"} <= set(event) for event in events)
    return events


def test_the_file_has_a_named_thread_per_lane_and_times_from_the_first_span(tmp_path: Path):
    spans = [
        draft(100.25, 100.5),
        Span("verifier", "verify", 100.0, 100.5, {"sessions": 2, "nodes": 7}),
        Span("verifier", "hit", 100.4, 100.4, {"session": 0}),
        draft(100.1, 100.2, "another"),
    ]
    events = written(tmp_path, spans)
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(lanes) == ["verifier", "another", "drafter-0"]
    (passes,) = (event for event in events if event["name"] == "verify")
    assert (passes["ph"], passes["tid"], passes["ts"], passes["dur"]) == ("X", lanes["verifier"], 0, 500_000)
    assert passes["args"] == {"sessions": 2, "nodes": 7}
    (hit,) = (event for event in events if event["name"] == "hit")
    assert (hit["ph"], hit["s"], hit["ts"]) == ("i", "t", 400_000)
    assert [event["ts"] for event in events if event["name"] == "draft"] == [100_000, 250_000]


def test_an_arrow_leads_from_a_verdict_to_the_draft_step_that_knew_of_it(tmp_path: Path):
    which = {"session": 3, "epoch": 9, "base_len": 40}
    other = which | {"base_len": 44}
    spans = [
        verify(0, 1),
        draft(0.5, 1.5),
        Span("verifier", "verdict", 0.9, 0.9, {"to": "drafter-0", **which}),
        Span("drafter-0", "verdict", 1.5, 1.5, {"of": "verifier", **which}),
        draft(1.6, 2.0),
        draft(2.0, 2.4),
        # One that never arrived, and one whose sending the ring has forgotten.
        Span("verifier", "verdict", 2.1, 2.1, {"to": "drafter-1", **other}),
        Span("drafter-0", "verdict", 2.4, 2.4, {"of": "verifier", **other}),
        draft(2.5, 3.0),
    ]
    events = written(tmp_path, spans)
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    start, end = (event for event in events if event["ph"] in "sf")
    assert (start["ph"], start["tid"], start["ts"]) == ("s", lanes["verifier"], 900_000)
    assert (end["ph"], end["tid"], end["ts"], end["bp"]) == ("f", lanes["drafter-0"], 1_600_000, "e")
    assert start["id"] == end["id"]


def test_a_file_of_nothing_can_be_read_too(tmp_path: Path):
    assert written(tmp_path, []) == []
