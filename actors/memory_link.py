"""A link inside one process, for tests and simulation: no threads, no clock, and every fault a wire can have.

Messages wait in the link until pump() delivers them, so that the test decides when anything happens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paceline.actors.link import LinkDown, LinkEvent, LinkUp, Received

Deliver = Callable[[LinkEvent], None]
# What becomes of a message: the messages that are queued in its place, in this order.
Fault = Callable[[bytes], list[bytes]]


def faithful(data: bytes) -> list[bytes]:
    """No fault."""
    return [data]


@dataclass(frozen=True, slots=True)
class Chaos:
    """A Fault that drops, repeats and corrupts by chance, each with its probability, the same for the same `rng`."""

    rng: random.Random
    drop: float = 0.0
    repeat: float = 0.0
    corrupt: float = 0.0

    def __call__(self, data: bytes) -> list[bytes]:
        if self.rng.random() < self.drop:
            return []
        if data and self.rng.random() < self.corrupt:
            data = self._damaged(data)
        return [data] * (2 if self.rng.random() < self.repeat else 1)

    def _damaged(self, data: bytes) -> bytes:
        at = self.rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ self.rng.randrange(1, 256)]) + data[at + 1 :]


class MemoryLink:
    """One end of a link.  Both ends are up from the start, in generation 1, once pump() has said so.

    outbox: what was sent and not yet delivered, oldest first; a test may reorder, hold back or change it as it likes.
    faithful: it has no faults of its own.
    """

    def __init__(self, name: str, deliver: Deliver, fault: Fault = faithful, limit: int = 256) -> None:
        self.name = name
        self.outbox: deque[bytes] = deque()
        self.generation = 0
        self.is_up = False
        self.peer: MemoryLink
        self.faithful = fault is faithful
        self._deliver, self._fault, self._limit = deliver, fault, limit
        self._events: deque[LinkEvent] = deque()

    def send(self, data: bytes) -> bool:
        """False if the link is down, or `limit` messages wait already."""
        if not self.is_up or len(self.outbox) >= self._limit:
            return False
        self.outbox.extend(self._fault(data))
        return True

    def close(self) -> None:
        """Take both ends down."""
        self.down("closed")

    def down(self, reason: str = "lost") -> None:
        """Lose the link, on both ends, with all that is on its way.  The ends hear of it at the next pump()."""
        for end in (self, self.peer):
            if end.is_up:
                end.is_up = False
                end.outbox.clear()
                end._events.append(LinkDown(end.name, end.generation, reason))

    def up(self) -> None:
        """Make a lost link again, on both ends, in a new generation."""
        if self.is_up:
            return
        for end in (self, self.peer):
            end.is_up = True
            end.generation += 1
            end._events.append(LinkUp(end.name, end.generation))

    def shuffle(self, rng: random.Random) -> None:
        """Reorder what this end has on its way."""
        waiting = list(self.outbox)
        rng.shuffle(waiting)
        self.outbox = deque(waiting)

    def pump(self, count: int | None = None) -> int:
        """Deliver what has happened to this end, then up to `count` (None: all) of the messages that wait for it now.

        Returns how many events were delivered; what they cause waits for the next call.
        """
        events = list(self._events)
        self._events.clear()
        outbox = self.peer.outbox
        ready = len(outbox) if count is None else min(count, len(outbox))
        events += [Received(self.name, self.generation, outbox.popleft()) for _ in range(ready)]
        for event in events:
            self._deliver(event)
        return len(events)


def memory_link(
    name: str, deliver_a: Deliver, deliver_b: Deliver, fault: Fault = faithful, limit: int = 256
) -> tuple[MemoryLink, MemoryLink]:
    """The two ends of a link that is up.  `fault` is applied in both directions."""
    a, b = MemoryLink(name, deliver_a, fault, limit), MemoryLink(name, deliver_b, fault, limit)
    a.peer, b.peer = b, a
    a.up()
    return a, b
