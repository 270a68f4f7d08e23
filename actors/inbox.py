"""The inboxes of the loops: everything that happens to a loop arrives in one queue, from any thread."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The loop shall end."""


def drain(inbox: queue.SimpleQueue[T], timeout: float | None) -> Iterator[T]:
    """What is in the inbox; if it is empty, wait up to `timeout` seconds (None: for ever) for something.

    What comes in meanwhile is left for the next time: a peer that never stops sending must not stop the loop.
    """
    try:
        yield inbox.get(timeout=timeout) if timeout != 0 else inbox.get_nowait()
        for _ in range(inbox.qsize()):
            yield inbox.get_nowait()
    except queue.Empty:
        return
