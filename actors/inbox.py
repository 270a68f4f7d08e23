"""The inboxes of the loops: everything that happens to a loop arrives in one queue, from any thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.actors.link import LinkDown, LinkUp, Received

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
        except queue.Empty:
            return True
        # One consumer, so what is counted here is there to be taken.
        rest = self._events.qsize()
        while not isinstance(event, Shutdown):
            handle(event)
            if rest == 0:
                return True
            rest -= 1
            event = self._events.get_nowait()
        return False


class Peers:
    """Which links are up, each in which generation; what an older generation brings is void."""

    def __init__(self) -> None:
        self._up: dict[str, int] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._up.copy()))

    def __contains__(self, name: str) -> bool:
        return name in self._up

    def up(self, event: LinkUp) -> None:
        """A link is up."""
        self._up[event.name] = event.generation

    def down(self, event: LinkDown) -> None:
        """A link is down."""
        self._up.pop(event.name, None)

    def sent(self, event: Received) -> bool:
        """Whether this comes from the peer that is there now."""
        return self._up.get(event.name) == event.generation
