"""`paceline bench engine`: a model's passes, against reading its weights once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paceline.actors.device import Device
from paceline.cluster import engine_bench
from paceline.cluster.cli import app
from table_models import random_table, write_table_model
from typer.testing import CliRunner

VOCAB = 31


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # It would keep the test process on one core from then on.
    monkeypatch.setattr(Device, "claim", lambda self: None)
    return write_table_model(tmp_path / "model", random_table(VOCAB, seed=0), context=64)


@pytest.mark.parametrize(("dtype", "int8"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_every_number_of_nodes_gets_a_row_beside_transformers(checkpoint: Path, dtype: str, int8: bool):
    said: list[str] = []
    model = engine_bench.Model("tiny", checkpoint, dtype, int8)
    result = engine_bench.measure(model, Device("cpu"), (0, 3), 20, 2, True, said.append)
    assert [row.nodes for row in result.rows] == [0, 3]
    assert result.weights == ("int8" if int8 else dtype)
    assert result.stream_ms > 0
    for row in result.rows:
        assert row.peer_ms is not None
        assert row.pass_ms > 0
        assert row.over_stream == pytest.approx(row.pass_ms / result.stream_ms)
    assert result.rows[0].over_root == 1
    assert "loading tiny" in said[0]
    assert len(engine_bench.render([result]).splitlines()) == 4


def test_what_does_not_fit_the_context_is_refused(checkpoint: Path):
    model = engine_bench.Model("tiny", checkpoint, "float32")
    with pytest.raises(ValueError, match="66 positions are needed, but the context of tiny is 64"):
        engine_bench.measure(model, Device("cpu"), (0, 4), 60, 1, False, lambda _: None)


@pytest.mark.usefixtures("checkpoint")
def test_the_command_prints_a_table_and_saves_it(tmp_path: Path):
    file = tmp_path / "engine.json"
    options = ["--nodes", "0,2", "--cached", "8", "--rounds", "1", "--no-peers", "--dtype", "float32", "--int8"]
    result = CliRunner().invoke(
        app, ["bench", "engine", "--target", str(tmp_path / "model"), *options, "--json", str(file)]
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("weights streamed once") == 2
    saved = json.loads(file.read_text())
    assert [[row["nodes"] for row in one["rows"]] for one in saved] == [[0, 2], [0, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0,x"], "--nodes: '0,x' is no list of numbers"),
        (["--json", "/nowhere/x.json"], "--json: /nowhere/x.json cannot be written"),
        (["--target", "/nowhere"], "/nowhere"),
        (["--cached", "60"], "the context of"),
    ],
)
def test_wrong_options_exit_with_2(checkpoint: Path, options: list[str], message: str):
    result = CliRunner().invoke(app, ["bench", "engine", "--target", str(checkpoint), "--no-peers", *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
