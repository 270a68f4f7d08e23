"""Which processes a process has started, whether they are gone, and how to see to that undisturbed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_PAUSE = 0.05


@contextmanager
def undisturbed() -> Iterator[None]:
    """No signal that asks this process to end gets through, because ending is what goes on inside."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)


def below_those_with(argument: str) -> dict[int, str]:
    """Our children that have `argument` somewhere in their command line, and all below them; see `below`."""
    found: dict[int, str] = {}
    for pid, started in below(os.getpid()).items():
        if argument in _command_line(pid):
            found |= {pid: started} | below(pid)
    return found


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


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the command's name: state, parent, ...; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
