"""The inboxes of the loops: everything that happens to a loop arrives in one queue, from any thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The loop shall end."""


class Inbox(Generic[T]):
    """Events for one loop.  `put` is safe from any thread, `take` belongs to the loop's."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[T | Shutdown] = queue.SimpleQueue()

    def put(self, event: T | Shutdown) -> None:
        """Hand over an event; never waits."""
        self._events.put(event)

    def take(self, timeout: float | None, handle: Callable[[T], None]) -> bool:
        """Handle what has come in; if nothing has, wait up to `timeout` seconds (None: for ever) for something.

        What comes in meanwhile is left for the next time: a peer that never stops sending must not stop the loop.
        False once the loop has been told to end.
        """
        try:
            event = self._events.get(timeout=timeout) if timeout != 0 else self._events.get_nowait()
            for _ in range(self._events.qsize()):
                if isinstance(event, Shutdown):
                    return False
                handle(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return True
        if isinstance(event, Shutdown):
            return False
        handle(event)
        return True
