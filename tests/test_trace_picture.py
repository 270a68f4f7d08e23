"""The picture of a trace shows what happened in its stretch, and nothing else."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from paceline.actors.trace import Span, write_chrome
from paceline.cluster.cli import app
from paceline.cluster.trace_picture import TraceUnreadable, draw, read
from typer.testing import CliRunner

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten passes of 20 ms, each beside two draft steps, with verdicts, hits and one miss."""
    spans = []
    for turn in range(10):
        at = 5.0 + turn * 0.02
        spans.append(Span("verifier", "verify", at, at + 0.018, {"tokens": turn, "sessions": 1}))
        spans.append(Span("verifier", "miss" if turn == 3 else "hit", at + 0.018, at + 0.018, {"session": 0}))
        which = {"session": 0, "epoch": 0, "base_len": turn}
        spans.append(Span("verifier", "verdict", at + 0.018, at + 0.018, {"to": "drafter-0", **which}))
        spans.append(Span("drafter-0", "verdict", at + 0.0185, at + 0.0185, {"of": "verifier", **which}))
        spans += [Span("drafter-0", "draft", at + 0.019 + i * 4e-3, at + 0.022 + i * 4e-3) for i in range(2)]
    path = tmp_path / "trace.json"
    write_chrome(path, spans)
    return path


def shapes(picture: str, kind: str, colour: str) -> list[ElementTree.Element]:
    found = ElementTree.fromstring(picture).iter(SVG + kind)
    # The legend's own squares lie above everything.
    return [one for one in found if one.get("fill", one.get("stroke")) == colour and one.get("y") != "9"]


def test_everything_of_a_stretch_is_drawn_in_its_lane(trace: Path):
    picture = draw(read(trace), 0, 100)
    passes, steps = shapes(picture, "rect", "#3b6fb6"), shapes(picture, "rect", "#e0a339")
    assert (len(passes), len(steps)) == (5, 9)
    assert len({one.get("y") for one in passes}) == len({one.get("y") for one in steps}) == 1
    assert passes[0].get("y") != steps[0].get("y")
    assert len(shapes(picture, "path", "#2e8b57")) == 4
    assert len(shapes(picture, "path", "#c0392b")) == 1
    # Each verdict that reached a step within the stretch.
    assert len(shapes(picture, "line", "#777777")) == 5
    texts = [one.text for one in ElementTree.fromstring(picture).iter(SVG + "text")]
    assert {"verifier", "drafter-0", "0", "1", "2", "3", "4", "100 ms"} <= set(texts)


def test_what_begins_before_or_ends_after_is_cut_off_at_the_edge(trace: Path):
    boxes = shapes(draw(read(trace), 5, 30), "rect", "#3b6fb6")
    edges = [(float(one.attrib["x"]), float(one.attrib["x"]) + float(one.attrib["width"])) for one in boxes]
    assert edges[0][0] == 90
    assert edges[-1][1] == 950


def test_by_default_it_is_the_middle(trace: Path):
    last = max(event["ts"] for event in read(trace) if "ts" in event) / 1e3
    assert draw(read(trace), None, 40) == draw(read(trace), last / 2 - 20, 40)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{}]}', '{"traceEvents": 3}'])
def test_another_file_is_refused_by_name(text: str, tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text(text)
    result = CliRunner().invoke(app, ["picture", str(path), "--out", str(tmp_path / "out.svg")])
    assert result.exit_code == 2
    assert "other.json is no Chrome trace" in result.stderr
    assert not (tmp_path / "out.svg").exists()


def test_a_stretch_without_anything_says_where_the_trace_ends(trace: Path):
    with pytest.raises(TraceUnreadable, match=r"nothing happens from 900 to 1000 ms; the trace ends at 20\d ms"):
        draw(read(trace), 900, 100)


def test_the_command_writes_the_file(trace: Path, tmp_path: Path):
    out = tmp_path / "out.svg"
    result = CliRunner().invoke(app, ["picture", str(trace), "--out", str(out), "--from", "0", "--length", "100"])
    assert result.exit_code == 0, result.output
    assert out.read_text() == draw(read(trace), 0, 100)
    result = CliRunner().invoke(app, ["picture", str(tmp_path / "none.json"), "--out", str(out)])
    assert result.exit_code == 2
    assert "none.json: No such file" in result.stderr
