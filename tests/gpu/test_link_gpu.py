"""The link with frames in device memory, between two GPUs; and beside a GPU with frames in host memory."""

from __future__ import annotations

import multiprocessing
import queue
from typing import Any

import pytest
import torch
from paceline.actors.device import Device
from paceline.actors.link import LinkDown, LinkSettings, LinkUp, Received, TorchLink, host_store, join_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = (0, 1, 900, 2000, 16 * 1024, 2**20)


def echo(port: int, device: Device, settings: LinkSettings) -> None:
    """Echo on `device` until killed."""
    device.claim()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = TorchLink("gpu", "drafter", join_store("127.0.0.1", port, 30), device, events.put, settings)
    while True:
        if isinstance(event := events.get(), Received):
            assert link.send(event.data)


@pytest.mark.parametrize(("frames", "gpus"), [("host", 1), ("device", 2)])
def test_messages_survive_the_trip_and_a_killed_peer_is_replaced(frames, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    settings = LinkSettings(frames=frames)
    store, port = host_store("127.0.0.1")
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = TorchLink("gpu", "verifier", store, Device("cuda", 0), events.put, settings)
    spawn = multiprocessing.get_context("spawn")
    try:
        for _ in range(2):
            peer = spawn.Process(target=echo, args=(port, Device("cuda", gpus - 1), settings), daemon=True)
            peer.start()
            assert isinstance(events.get(timeout=90), LinkUp)
            for data in (torch.randint(256, (size,)).to(torch.uint8).numpy().tobytes() for size in SIZES):
                assert link.send(data)
                assert events.get(timeout=10).data == data
            peer.kill()
            peer.join(10)
            assert isinstance(events.get(timeout=settings.deadline + 1), LinkDown)
    finally:
        link.close()
