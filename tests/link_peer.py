"""The other end of a link, to be run in a process of its own."""

from __future__ import annotations

import threading

from paceline.actors.device import Device
from paceline.actors.link import LinkEvent, LinkSettings, Received, Side, TorchLink, host_store, join_store


def serve(side: Side, port: int, settings: LinkSettings) -> None:
    """Echo every message, but answer b"history" with all events so far, one per line.  A verifier hosts the store."""
    store = host_store("127.0.0.1", port)[0] if side == "verifier" else join_store("127.0.0.1", port, 10)
    history: list[str] = []
    ready = threading.Event()

    def deliver(event: LinkEvent) -> None:
        ready.wait()
        history.append(f"{type(event).__name__} {event.generation}")
        if isinstance(event, Received):
            link.send("\n".join(history).encode() if event.data == b"history" else event.data)

    link = TorchLink("one", side, store, Device("cpu"), deliver, settings)
    ready.set()
    threading.Event().wait()  # until killed
