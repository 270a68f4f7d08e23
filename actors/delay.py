"""A delay on a link, for measurements: what a slower network would do to the same run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Delayed(Generic[T]):
    """Hands everything on to `deliver`, in order, `seconds` after it came, from a thread of its own.

    Not before it is due, and after that as soon as `deliver` has returned from the one before.
    """

    def __init__(self, deliver: Callable[[T], None], seconds: float, name: str) -> None:
        self._deliver, self._seconds = deliver, seconds
        self._on_way: queue.SimpleQueue[tuple[float, T] | None] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, item: T) -> None:
        """Accept it, from any thread, and return at once."""
        self._on_way.put((time.monotonic() + self._seconds, item))

    def close(self, timeout: float) -> None:
        """Deliver what is on its way at once, and end; waits up to `timeout` seconds for that."""
        self._hurry.set()
        self._on_way.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (entry := self._on_way.get()) is not None:
            due, item = entry
            self._hurry.wait(max(0.0, due - time.monotonic()))
            self._deliver(item)
