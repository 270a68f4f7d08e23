"""`paceline bench run` as its users meet it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paceline.cluster.cli import app
from typer.testing import CliRunner

HERE = Path(__file__).parent
MODEL_FREE = ["--no-peers", "--schedules", "sync", "--prompts", "2"]


def spawn(*options: str, behaviour: str = "hello") -> subprocess.Popen[str]:
    """Run it on a scripted cell."""
    command = [sys.executable, str(HERE / "scripted_cell.py"), behaviour, "bench", "run", *MODEL_FREE, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)


def test_it_prints_a_table_and_saves_rows_a_page_and_a_timeline(tmp_path: Path):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html", "trace")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    process = spawn("--drafter", "ngram", "--drafter", "int8", "--batch", "1,2", "--temperature", "0,0.8", *options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    saved = json.loads(files["json"].read_text())
    assert saved["complete"] is True
    assert saved["command"].startswith("paceline bench run --no-peers")
    assert [(row["drafter"], row["batch"], row["temperature"], row["label"]) for row in saved["rows"]] == [
        (drafter, batch, temperature, label)
        for drafter in ("ngram", "int8")
        for batch in (1, 2)
        for temperature in (0.0, 0.8)
        for label in ("plain", "sync k=4")
    ]
    assert out.count("sync k=4") == 8
    assert files["html"].read_text().count("<section>") == 8
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert "warming up sync" in err
    assert f"written: {files['json']}, {files['html']}, {files['trace']}" in err


def test_ctrl_c_leaves_the_results_so_far_and_stops_the_cell(tmp_path: Path):
    process = spawn("--json", str(tmp_path / "rows.json"), behaviour="endless")
    assert process.stderr is not None
    assert any("answering" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "cut short; 0 rows are there" in err
    assert err.splitlines()[-1].startswith("cell stopped")
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert (saved["complete"], saved["rows"]) == (False, [])


def test_a_second_cell_that_does_not_start_costs_nothing_of_the_first(tmp_path: Path):
    process = spawn("--drafter", "none", "--drafter", "bad", "--json", str(tmp_path / "rows.json"), behaviour="no_bad")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.splitlines()[-1] == "paceline: bad is no model"
    assert out.count("sync k=4") == 1
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert (saved["complete"], len(saved["rows"])) == (False, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedules", "sync,magic"], "--schedules: 'magic' is none of plain, sync"),
        (["--k", "0"], "--k: must be from 1 to 32, got 0"),
        (["--batch", "one"], "--batch: 'one' is no list of numbers such as 1,8"),
        (["--temperature", "-1"], "--temperature: must be from 0 to 100"),
        (["--prompts", "85"], "--prompts: there are 84 prompts"),
        (["--prompts", "2", "--batch", "1,8"], "a batch of 8 needs as many prompts, and there are 2"),
        (["--drafter", "oracle:alpha=2,cost=0.1"], "--drafter: the oracle's alpha must be between 0 and 1"),
        (["--fanout", "9"], "--fanout: Input should be less than or equal to 8"),
        (["--json", "/nowhere/rows.json"], "--json: /nowhere/rows.json cannot be written"),
    ],
)
def test_wrong_options_exit_with_2_before_anything_is_started(options: list[str], message: str):
    result = CliRunner().invoke(app, ["bench", "run", *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.slow
def test_the_whole_command_on_a_real_model(smollm2_dir: Path, tmp_path: Path):
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    command = [str(Path(sys.executable).parent / "paceline"), "bench", "run", "--prompts", "2", "--tokens", "8"]
    command += [
        "--drafter",
        "ngram",
        "--drafter",
        "oracle:alpha=0.8,cost=0.1",
        "--json",
        str(rows),
        "--html",
        str(page),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads(rows.read_text())
    assert saved["complete"]
    ours: list[dict[str, Any]] = [row for row in saved["rows"] if row["system"] == "paceline"]
    schedules = ["plain", "sync", "pearl", "amusd", "saguaro", "swiftspec", "auto"]
    assert [row["schedule"] for row in ours] == 2 * schedules
    # The same seed, so the same tokens, whatever drafts: and transformers agrees.
    assert {row["differing"] for row in saved["rows"] if row["differing"] is not None} == {0}
    assert all(row["tokens_per_s"] > 0 for row in saved["rows"])
    oracle = {row["schedule"]: row for row in ours if row["synthetic"]}
    assert oracle["sync"]["acceptance_length"] > 1.3
    assert oracle["amusd"]["overlap"] > 0
    peers = {row["label"] for row in saved["rows"] if row["system"] == "transformers"}
    assert {"transformers generate x1", "transformers prompt lookup x1"} <= peers
    assert "<svg" in page.read_text()
