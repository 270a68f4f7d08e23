"""How long a message takes there and back: over a link, and by Ray actor calls, between the same two processes."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paceline.cluster.ray_env  # noqa: F401
import ray
from paceline.actors.device import Device
from paceline.actors.link import LinkEvent, LinkSettings, LinkUp, Received, TorchLink, host_store, join_store
from paceline.cluster.cell import Cluster

SIZES = (256, 16 * 1024, 2**20)
_WARM_UP = 20
_TIMEOUT = 30.0
_NAME = "bench"


@dataclass(frozen=True, slots=True)
class Row:
    """Round trips of messages of `size` bytes: median and 99th percentile, in milliseconds."""

    size: int
    link_p50: float
    link_p99: float
    call_p50: float
    call_p99: float


def measure(sizes: Sequence[int] = SIZES, rounds: int = 300) -> list[Row]:
    """A row per size, on a Ray cluster of its own (or the one that this process is connected to).

    The two actors are pinned like a cell's.  RayError or GetTimeoutError if the cluster fails.
    """
    cluster = Cluster()
    try:
        cluster.start(cpus=2)
        end = ray.remote(num_cpus=1)(_End)
        asker, echoer = end.remote(0), end.remote(1)
        port = ray.get(asker.host.remote(), timeout=_TIMEOUT)
        ray.get([echoer.join.remote(port), asker.await_link.remote()], timeout=2 * _TIMEOUT)
        rows = [_row(asker, echoer, size, rounds) for size in sizes]
        ray.get([one.close.remote() for one in (asker, echoer)], timeout=_TIMEOUT)
        return rows
    finally:
        cluster.stop()


def _row(asker: Any, echoer: Any, size: int, rounds: int) -> Row:
    link = ray.get(asker.over_link.remote(size, rounds), timeout=_TIMEOUT + rounds)
    calls = ray.get(asker.by_calls.remote(echoer, size, rounds), timeout=_TIMEOUT + rounds)
    return Row(size, *_percentiles(link), *_percentiles(calls))


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return 1e3 * ordered[len(ordered) // 2], 1e3 * ordered[int(0.99 * len(ordered))]


def render(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    header = "round trip, ms   link p50   link p99   Ray call p50   Ray call p99"
    return "\n".join([header, *(_line(row) for row in rows)])


def _line(row: Row) -> str:
    link = f"{row.link_p50:8.3f}   {row.link_p99:8.3f}"
    return f"{_size(row.size):>14}   {link}   {row.call_p50:12.3f}   {row.call_p99:12.3f}"


def _size(size: int) -> str:
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


class _End:
    """One of the two processes.  The asker sends and waits, the echoer sends back what it gets."""

    def __init__(self, core: int) -> None:
        self._device = Device("cpu", core)
        self._device.claim()
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()

    def host(self) -> int:
        """Begin as the asker; the port of its store."""
        self._store, port = host_store("127.0.0.1")
        self._link = TorchLink(_NAME, "verifier", self._store, self._device, self._events.put, LinkSettings())
        return port

    def await_link(self) -> None:
        """Wait until the echoer is there."""
        if not isinstance(event := self._events.get(timeout=_TIMEOUT), LinkUp):
            raise RuntimeError(f"the link did not come up: {event}")

    def join(self, port: int) -> None:
        """Begin as the echoer."""
        self._store = join_store("127.0.0.1", port, _TIMEOUT)
        self._link = TorchLink(_NAME, "drafter", self._store, self._device, self._echo_event, LinkSettings())

    def _echo_event(self, event: LinkEvent) -> None:
        if isinstance(event, Received):
            self._link.send(event.data)

    def echo(self, data: bytes) -> bytes:
        return data

    def over_link(self, size: int, rounds: int) -> list[float]:
        """Seconds of each round trip."""

        def ask(data: bytes) -> None:
            if not self._link.send(data):
                raise RuntimeError("the link is down")
            if not isinstance(event := self._events.get(timeout=_TIMEOUT), Received):
                raise RuntimeError(f"the link was lost: {event}")

        return _times(ask, size, rounds)

    def by_calls(self, echoer: Any, size: int, rounds: int) -> list[float]:
        """Seconds of each round trip."""
        return _times(lambda data: ray.get(echoer.echo.remote(data), timeout=_TIMEOUT), size, rounds)

    def close(self) -> None:
        self._link.close()


def _times(ask: Callable[[bytes], object], size: int, rounds: int) -> list[float]:
    data, seconds = bytes(size), []
    for _ in range(_WARM_UP + rounds):
        start = time.perf_counter()
        ask(data)
        seconds.append(time.perf_counter() - start)
    return seconds[_WARM_UP:]
