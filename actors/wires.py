"""What a link's bytes travel over: a two-rank process group of its own, gloo between hosts or NCCL between GPUs.

A wire carries frames up to a fixed size and, behind a frame that announces it, a body of any size.  It lives for one
generation of a link; a wire that failed once is thrown away.  Everything that knows the backends' habits is here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

_FRAME_TAG, _BODY_TAG, _ABORT_TAG = 0, 1, 2
# A gloo send goes out at once only if the peer has posted the receive for it; this many are posted ahead.
_POSTED = 8
# Seconds; making a communicator takes a few by itself.
_NCCL_CONNECT_TIMEOUT = 20
_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS = 29, 100_000_000
# Torch's stubs lack most of these classes' methods, and builds for the CPU lack the second class.
_Gloo: Any = dist.ProcessGroupGloo
_Nccl: Any = getattr(dist, "ProcessGroupNCCL", None)


class Interface(TypedDict, total=False):
    """What gloo binds to: an address of this host, or the name of a network interface."""

    hostname: str
    interface: str


class Wire(Protocol):
    """Rank 0 is the verifier.  All of these raise RuntimeError once the wire is broken."""

    def send(self, data: bytearray, *, body: bool) -> object:
        """Put a frame or a body on its way without waiting.  Keep what it returns until the peer has the data."""
        ...

    def frame(self, timeout: float) -> bytes:
        """The next frame, filled up to its fixed size; the wire is broken if none comes within `timeout` seconds."""
        ...

    def body(self, size: int, timeout: float) -> bytes:
        """The body of `size` bytes that the last frame announced."""

    def abort(self) -> None:
        """Break the wire, so that whoever waits on it returns soon.  From any thread, and more than once."""


@functools.cache
def _device(**interface: str) -> Any:
    """Gloo's end of an interface.  It has a thread that wakes a hundred times a second, so all wires share one."""
    with _coarse_timers():
        return _Gloo.create_device(**interface)


@contextmanager
def _coarse_timers() -> Iterator[None]:
    """Threads that begin inside may sleep longer than they ask to, unless something happens: an idle one hardly wakes.

    Where the system has no such thing (it is not Linux), nothing changes.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        yield
        return
    prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, 0, 0, 0, 0)  # the default


class GlooWire:
    """Frames in host memory.  The constructor waits at most `timeout` seconds for the other rank."""

    def __init__(self, store: Store, rank: int, frame_bytes: int, timeout: float, interface: Interface) -> None:
        options = _Gloo._Options()
        options._devices, options._timeout, options._threads = [_device(**interface)], timedelta(seconds=timeout), 1
        self._group = _Gloo(store, rank, 2, options)
        self._peer = 1 - rank
        self._aborted = threading.Event()
        self._posted = deque(self._post(frame_bytes, _FRAME_TAG) for _ in range(_POSTED))

    def _post(self, size: int, tag: int) -> tuple[dist.Work, Tensor]:
        buffer = torch.empty(size, dtype=torch.uint8)
        return self._group.recv([buffer], self._peer, tag), buffer

    def send(self, data: bytearray, *, body: bool) -> object:
        # Gloo delivers a tensor that is shorter than the one posted for it, so no frame need be filled up.
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        return self._group.send([tensor], self._peer, _BODY_TAG if body else _FRAME_TAG), tensor

    def frame(self, timeout: float) -> bytes:
        work, buffer = self._posted[0]
        work.wait(timedelta(seconds=timeout))
        data = buffer.numpy().tobytes()
        self._posted.popleft()
        self._posted.append((self._group.recv([buffer], self._peer, _FRAME_TAG), buffer))
        return data

    def body(self, size: int, timeout: float) -> bytes:
        work, buffer = self._post(size, _BODY_TAG)
        work.wait(timedelta(seconds=timeout))
        return buffer.numpy().tobytes()

    def abort(self) -> None:
        # Gloo's own abort() does nothing.  But a receive that runs into its timeout closes the connection and wakes
        # everybody who waits on it, so let one time out that nobody will ever serve.
        if self._aborted.is_set():
            return
        self._aborted.set()
        try:
            self._post(1, _ABORT_TAG)[0].wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass


class NcclWire:
    """Frames staged on the GPU.  The GPU must not be the other rank's: NCCL refuses two ranks on one.

    Each direction has a group of its own, since NCCL runs what one pair of ranks does in order: a posted receive would
    hold up every send.  NCCL knows no tags either, so the receive of a frame is posted only after the body before it.
    While a receive waits, whatever synchronizes the whole device (torch.cuda.synchronize) waits for the next frame.
    """

    def __init__(self, store: Store, rank: int, frame_bytes: int, device: torch.device) -> None:
        # By default torch ends the whole process when a peer is lost, and waits half an hour for one to connect.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(_NCCL_CONNECT_TIMEOUT))
        self._peer, self._device, self._frame_bytes = 1 - rank, device, frame_bytes
        self._stop = threading.Event()
        torch.cuda.set_device(device)
        groups = [_nccl_group(PrefixStore(str(source), store), rank) for source in (0, 1)]
        self._out, self._in = groups[rank], groups[1 - rank]
        self._out_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out_frame, self._in_frame = self._on_device(frame_bytes), self._on_device(frame_bytes)
        self._first_frames(rank)

    def _on_device(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _first_frames(self, rank: int) -> None:
        """Make both communicators, in the same order on both ranks; each is made by its first use."""
        watchdog = threading.Timer(_NCCL_CONNECT_TIMEOUT, self.abort)
        watchdog.start()
        try:
            for source in (0, 1):
                if source == rank:
                    self.send(bytearray(self._frame_bytes), body=False)
                else:
                    self.frame(_NCCL_CONNECT_TIMEOUT)
        except RuntimeError:
            self.abort()
            raise
        finally:
            watchdog.cancel()

    def send(self, data: bytearray, *, body: bool) -> object:
        if not body:
            data = data.ljust(self._frame_bytes, b"\0")  # NCCL needs the very size that was posted
        host = torch.frombuffer(data, dtype=torch.uint8).pin_memory()
        with torch.cuda.stream(self._out_stream):
            # One frame buffer is enough: the stream fills it again only after the send before it has read it.
            staged = self._on_device(len(data)) if body else self._out_frame
            staged.copy_(host, non_blocking=True)
            self._out.send([staged], self._peer, 0).wait()
        return host, staged

    def frame(self, timeout: float) -> bytes:
        return self._receive(self._in_frame)

    def body(self, size: int, timeout: float) -> bytes:
        return self._receive(self._on_device(size))

    def _receive(self, staged: Tensor) -> bytes:
        # No timeout of its own: waiting with one polls.  The link's keeper aborts when its deadline has passed.
        with torch.cuda.stream(self._in_stream):
            self._in.recv([staged], self._peer, 0).wait()
            host = torch.empty(staged.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(staged, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record()
        arrived.synchronize()
        if self._stop.is_set():
            raise RuntimeError("the link was aborted")
        return host.numpy().tobytes()

    def abort(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        for group in (self._out, self._in):
            group.abort()


def _nccl_group(store: Store, rank: int) -> Any:
    options = _Nccl.Options()
    # Non-blocking, so that a peer that dies while connecting cannot hold this thread for ever.
    options.config.blocking = 0
    options.config.max_ctas = 1
    return _Nccl(store, rank, 2, options)


def interface_towards(host: str, port: int) -> Interface:
    """The one that leads to another host: gloo would take whatever this host's name resolves to."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket: sends nothing, only picks the route
        return {"hostname": str(probe.getsockname()[0])}
