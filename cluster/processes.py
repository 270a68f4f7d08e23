"""Which processes a process has started, and whether they are gone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

_PAUSE = 0.05


def below(pid: int) -> dict[int, str]:
    """All descendants: pid -> start time, which tells a process from a later one of the same pid.  Linux only."""
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(path.name))
        if fields:
            parents[int(path.name)], started[int(path.name)] = int(fields[1]), fields[19]
    found: dict[int, str] = {}
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= {child: started[child] for child in frontier}
    return found


def alive(processes: Mapping[int, str]) -> list[int]:
    """Those of `processes` (from `below`) that still run."""
    return [pid for pid, started in processes.items() if _is_alive(pid, started)]


def await_end(processes: Mapping[int, str], seconds: float) -> list[int]:
    """Wait until all have ended, at most so long; those that have not."""
    deadline = time.monotonic() + seconds
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return left


def _is_alive(pid: int, started: str) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[19] == started and fields[0] != "Z"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the command's name: state, parent, ...; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
