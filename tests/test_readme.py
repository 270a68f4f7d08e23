"""Every command block of the README does what it says.

The test command itself is run by `.ci/run`, which takes it from the README.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
BASH = [block for language, block in BLOCKS if language == "bash"]
PYTHON = [block for language, block in BLOCKS if language == "python"]
ADDRESS = "127.0.0.1:50051"


def test_the_readme_holds_the_blocks_that_are_run_here() -> None:
    main, test, up, *clients, exact, bench = BASH
    assert main.startswith("python3 -m venv .venv && ")
    assert "paceline generate" in main
    assert f"<!-- test command -->\n```bash\n{test}```" in README
    assert test.rstrip().endswith("-m pytest")
    assert up.startswith("paceline up ")
    assert len(clients) == 3
    assert all(f"paceline generate --address {ADDRESS}" in client for client in clients)
    assert exact.startswith("paceline verify-exact ")
    assert bench.startswith("paceline bench run ")
    assert len(PYTHON) == 1
    assert [language for language, _ in BLOCKS if language not in ("bash", "python")] == ["text"]


def test_ci_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    found = subprocess.run(
        ["bash", "-c", next(line for line in script.splitlines() if line.startswith("command=")) + '; echo "$command"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == BASH[1]


def _environment(**extra: str) -> dict[str, str]:
    """Ours, with this Python's own scripts on the path, and no virtual environment that a new one would take over."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | {"PATH": path} | extra


@pytest.mark.slow
def test_the_first_command_works_in_an_empty_folder_with_an_empty_cache(tmp_path: Path) -> None:
    checkout = tmp_path / "paceline"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", ".venv", "*cache*", "*.egg-info", "build"))
    environment = _environment(PACELINE_CACHE=str(tmp_path / "cache"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", BASH[0]],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = done.stdout.rpartition("Successfully installed")[2]
    assert "light" in answer
    assert re.search(r"tokens/s .*acceptance length \d+\.\d+ · \d+% drafted", done.stderr), done.stderr[-2000:]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        BASH[2].split(), cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        with grpc.insecure_channel(ADDRESS) as channel:
            grpc.channel_ready_future(channel).result(timeout=120)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_second_terminal_work(server: subprocess.Popen[str]) -> None:
    assert len(_run(["bash", "-c", BASH[3]]).split()) > 5
    answer = json.loads(_run(["bash", "-c", BASH[4]]))
    assert (answer["seed"], answer["usage"]["completion_tokens"]) == (7, 16)
    river = json.loads(_run(["bash", "-c", BASH[5]]))
    assert sorted(river) == ["km", "river"]
    assert isinstance(river["km"], int)


@pytest.mark.slow
def test_the_python_client_works(server: subprocess.Popen[str]) -> None:
    assert "Paris" in _run([sys.executable, "-c", PYTHON[0]])


@pytest.mark.slow
def test_the_server_ends_with_ctrl_c(server: subprocess.Popen[str]) -> None:
    """The last test with this server."""
    started = time.monotonic()
    os.killpg(server.pid, signal.SIGINT)
    assert server.wait(30) == 0
    assert time.monotonic() - started < 20


@pytest.mark.slow
def test_answers_are_found_to_be_exact() -> None:
    assert "2 of 2 answers" in _run(BASH[6].split())


@pytest.mark.slow
def test_the_benchmark_writes_what_it_says(tmp_path: Path) -> None:
    done = subprocess.run(
        BASH[7].split(), cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["schedule"] for row in rows] == ["plain", "sync", "auto"]
    assert "<svg" in (tmp_path / "page.html").read_text()
