"""Ctrl-C, at any time, ends `paceline generate` with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from paceline.cluster import processes

pytestmark = pytest.mark.slow

COMMAND = [str(Path(sys.executable).parent / "paceline"), "generate", "--max-tokens", "3000", "Tell me a long story."]


def _leavings() -> set[str]:
    """What a cell may leave: Ray's folder and shared memory."""
    places = (Path(tempfile.gettempdir()).glob("paceline-*"), Path("/dev/shm").glob("*"))
    return {str(path) for place in places for path in place}


@pytest.mark.parametrize(
    ("moment", "times"),
    [("starting Ray", 1), ("loading the target", 1), ("loading the target", 3), ("the first words", 1)],
)
def test_ctrl_c_leaves_nothing(moment: str, times: int, smollm2_dir: Path) -> None:
    before = _leavings()
    process = subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, bufsize=1
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if moment == "the first words":
            assert process.stdout.read(1)
        else:
            for line in process.stderr:
                if moment in line:
                    break
        below = processes.below(process.pid)
        # A terminal sends it to the whole foreground group.
        for pause in (0.0, 0.3, 1.0)[:times]:
            time.sleep(pause)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 130
    assert below or moment == "starting Ray"
    assert processes.alive(below) == []
    assert _leavings() <= before
    assert not list(Path("/tmp/ray").glob(f"*_{process.pid}"))


def test_a_killed_command_takes_its_cluster_along(smollm2_dir: Path) -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.read(1)
    below = processes.below(process.pid)
    assert len(below) > 3
    process.kill()
    process.wait()
    # The actors, and what they hold, go at once; Ray's own agents try for a minute to say that Ray is gone.
    assert processes.await_end(below, seconds=100) == []
    swept = list(Path(tempfile.gettempdir()).glob(f"paceline-{process.pid}-*"))
    assert len(swept) == 1
    subprocess.run([*COMMAND[:2], "--max-tokens", "1", "Hi"], check=True, capture_output=True, timeout=120)
    assert not swept[0].exists()
