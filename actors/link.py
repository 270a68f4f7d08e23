"""A link joins a verifier and a drafter: messages both ways over a two-rank process group of its own.

A silent or broken link is torn down and made again, under a new generation; what was on its way is lost, and no message
of one generation arrives in another.  Losing one link touches no other: torch's default group is never used.

Two threads serve a link.  One meets the peer in the store, makes the group, and receives.  The other keeps time: it
sends a heartbeat at each beat and breaks a group that has been silent for too long.  A message is sent by the thread
that calls send(), so that it need not wait for another thread to wake up.
"""

from __future__ import annotations

import atexit
import logging
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

from paceline.actors.delay import Delayed
from paceline.actors.device import Device
from paceline.actors.wires import GlooWire, Interface, NcclWire, Wire, interface_towards
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not mark what it exports
from torch.distributed.distributed_c10d import PrefixStore, Store

log = logging.getLogger(__name__)

Side = Literal["verifier", "drafter"]
_MAGIC = b"PLF1"
# magic, kind, generation, number of this frame, frames received so far, bytes of the message
_HEADER = struct.Struct("<4sB3xIQQQ")
_BEAT, _DATA = 0, 1
# Pauses between two looks into the store while the peer is away, and between two tries that failed, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_FIRST_RETRY, _LONGEST_RETRY = 0.05, 2.0
_CLOSE_MARGIN = 0.5


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The peer is there.  Generations of one link count up, the same on both sides."""

    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The peer is gone or silent, or this side closed; follows each LinkUp once."""

    name: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """One message, whole and in order, between the LinkUp and the LinkDown of its generation.

    at: when it was delivered, in seconds of time.monotonic(); None from a link that has no clock.
    """

    name: str
    generation: int
    data: bytes
    at: float | None = None


LinkEvent = LinkUp | LinkDown | Received
Deliver = Callable[[LinkEvent], None]


class Link(Protocol):
    """One end of a link.  Its events go to a `deliver` function, from the link's own thread, which it must not hold."""

    name: str

    def send(self, data: bytes) -> bool:
        """Queue a message and return at once; False if the link is down or the queue is full."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Both sides of a link need the same.

    frames: in host memory over gloo, or in device memory over the device's own backend.  frame_bytes: a message that
    fits goes in one frame, at once; a longer one in a frame and a body, which the peer must ask for first.
    heartbeat: seconds between beats.  deadline: seconds of silence after which the peer counts as lost.
    connect_timeout: seconds for the process group to form, once both sides are there.
    max_message: bytes.
    queue_messages, queue_bytes: how much may be on its way, not yet known to have arrived.
    interface: the network interface to bind to; "" is the one that leads to the store's host.
    delay: seconds by which this side holds up all that it receives, for measurements; beats are not held up.
    """

    frames: Literal["host", "device"] = "host"
    frame_bytes: int = 64 * 2**10
    max_message: int = 16 * 2**20
    heartbeat: float = 0.5
    deadline: float = 3.0
    connect_timeout: float = 1.0
    queue_messages: int = 256
    queue_bytes: int = 64 * 2**20
    interface: str = ""
    delay: float = 0.0

    def __post_init__(self) -> None:
        if self.frame_bytes <= _HEADER.size:
            raise ValueError(f"frame_bytes must be more than the header's {_HEADER.size}, got {self.frame_bytes}")
        if not 0 < self.heartbeat < self.deadline:
            raise ValueError(f"heartbeat ({self.heartbeat} s) must be above 0 and below deadline ({self.deadline} s)")
        if self.queue_bytes < self.max_message:
            raise ValueError(f"queue_bytes ({self.queue_bytes}) must hold one max_message ({self.max_message})")
        if self.delay < 0:
            raise ValueError(f"delay must not be negative, got {self.delay} s")


class StoreAddress(NamedTuple):
    """Where a store listens."""

    host: str
    port: int


def host_store(host: str, port: int = 0) -> tuple[TCPStore, int]:
    """A store for links to meet in, listening on the address `host` only, and its port (0: any free one).

    OSError if the address or port cannot be had.  The store lives as long as the returned object.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, None, True, timedelta(seconds=5), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    """The store that another process hosts.  Raises TimeoutError if it does not answer within `timeout` seconds."""
    end = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    # Torch's client writes a stack trace for each try that fails; ask the port first.
    while not _listening(host, port, timeout):
        if time.monotonic() + pause > end:
            raise TimeoutError(f"no store answers at {host}:{port} after {timeout} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)


def _listening(host: str, port: int, timeout: float) -> bool:
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError:
        return False
    return True


class _Broken(RuntimeError):
    """The peer sent what no peer of ours sends."""


class _Life:
    """One generation of a link: its wire, what is on its way, and when the peer was last heard.

    Use under the link's lock; only receive(), which waits, is the receiving thread's alone.
    """

    def __init__(self, wire: Wire, generation: int, settings: LinkSettings) -> None:
        self.wire, self.generation, self._settings = wire, generation, settings
        self._in_frame = settings.frame_bytes - _HEADER.size
        self.aborted = ""
        self._heard_at = time.monotonic()
        self._sent = self._received = 0
        # Received since our last frame went out, so that the peer cannot know of it.
        self._untold_messages = self._untold_bytes = 0
        # Sizes and buffers of what the peer is not known to have.
        self._on_way: deque[tuple[int, list[object]]] = deque()
        self._on_way_bytes = 0

    def has_room(self, size: int) -> bool:
        settings = self._settings
        return len(self._on_way) < settings.queue_messages and self._on_way_bytes + size <= settings.queue_bytes

    def silence(self) -> float:
        """Seconds since the peer was heard."""
        return time.monotonic() - self._heard_at

    def abort(self, reason: str) -> None:
        """Break the wire, so that the receiving thread wakes; the first reason counts."""
        self.aborted = self.aborted or reason
        self.wire.abort()

    def post(self, kind: int, data: bytes = b"") -> None:
        """Send without waiting."""
        self._sent += 1
        frame = bytearray(_HEADER.pack(_MAGIC, kind, self.generation, self._sent, self._received, len(data)))
        if len(data) <= self._in_frame:
            kept = [self.wire.send(frame + data, body=False)]
        else:
            kept = [self.wire.send(frame, body=False), self.wire.send(bytearray(data), body=True)]
        self._on_way.append((len(data), kept))
        self._on_way_bytes += len(data)
        self._untold_messages = self._untold_bytes = 0

    def receive(self) -> tuple[int, bytes, int]:
        """Wait for a message: its kind, its bytes, and how many of our frames the peer had when it sent it."""
        # The beat of this side notices silence; the wire's own timeout is there in case that thread is held up.
        timeout = self._settings.deadline + 2 * self._settings.heartbeat
        frame = self.wire.frame(timeout)
        magic, kind, generation, number, arrived, size = _HEADER.unpack_from(frame)
        if (magic, generation, number) != (_MAGIC, self.generation, self._received + 1):
            raise _Broken(f"frame {number} of generation {generation} came where {self._received + 1} was due")
        if size > self._settings.max_message:
            raise _Broken(f"a message of {size} bytes came; max_message is {self._settings.max_message}")
        if size > self._in_frame:
            return kind, self.wire.body(size, timeout), arrived
        return kind, frame[_HEADER.size : _HEADER.size + size], arrived

    def note(self, size: int, arrived: int) -> None:
        """Take note of a message received; let go of what has arrived, and tell the peer before its queue fills."""
        if arrived > self._sent:
            raise _Broken(f"the peer claims {arrived} frames of {self._sent}")
        self._heard_at = time.monotonic()
        self._received += 1
        while len(self._on_way) > self._sent - arrived:
            self._on_way_bytes -= self._on_way.popleft()[0]
        self._untold_messages += 1
        self._untold_bytes += size
        settings = self._settings
        if 4 * self._untold_messages >= settings.queue_messages or 4 * self._untold_bytes >= settings.queue_bytes:
            self.post(_BEAT)


class _Meeting:
    """How the two ends of a link find each other in the store, and agree on a generation.

    The drafter says hello with a token that is new each time it tries.  The verifier answers each token once, with the
    next generation, and the drafter takes the answer up: then both know that the other is there now.  Neither needs to
    remember anything, so a restarted process and one that lost its connection do the same.

    Keys, below the link's name: hello (the last token), generation (a counter), offer/TOKEN, GENERATION/...
    The first two stay, the others go when they have served.
    """

    def __init__(self, name: str, closing: threading.Event) -> None:
        self._prefix, self._closing = f"paceline/link/{name}", closing
        self._answered = ""
        self._litter: tuple[str, ...] = ()

    def join(self, store: Store) -> None:
        """Use this client of the store from now on."""
        self._store = PrefixStore(self._prefix, store)

    def group_store(self, generation: int) -> Store:
        return PrefixStore(f"{generation}/group", self._store)

    def offer(self) -> int | None:
        """The verifier's part: the generation agreed on; None when the link closes."""
        for _ in self._glances():
            token = self._hello()
            if token in ("", self._answered):
                continue
            self.tidy()
            self._answered = token
            generation = self._store.add("generation", 1)
            self._litter = (f"offer/{token}", f"{generation}/")
            self._store.set(f"offer/{token}", str(generation))
            if self._taken(token, generation):
                return generation
        return None

    def _taken(self, token: str, generation: int) -> bool:
        """Wait until the drafter has taken the offer up; False if another hello came instead, or the link closes."""
        for _ in self._glances():
            if self._store.check([f"{generation}/taken"]):
                return True
            if self._hello() != token:
                return False
        return False

    def take(self) -> int | None:
        """The drafter's part: the generation agreed on; None when the link closes."""
        token = uuid.uuid4().hex
        for _ in self._glances():
            if self._store.check([f"offer/{token}"]):
                generation = int(self._store.get(f"offer/{token}"))
                self._store.set(f"{generation}/taken", "")
                return generation
            # Another drafter of this name may have said hello since, and be gone again.
            if self._hello() != token:
                self._store.set("hello", token)
        return None

    def _hello(self) -> str:
        return self._store.get("hello").decode() if self._store.check(["hello"]) else ""

    def _glances(self) -> Iterator[None]:
        """Times to look into the store, ever rarer, until the link closes."""
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            yield
            self._closing.wait(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def tidy(self) -> None:
        """Delete what this end's last offer left in the store."""
        if not self._litter:
            return
        for key in self._store.list_keys():
            if key.startswith(self._litter):
                self._store.delete_key(key)
        self._litter = ()


class TorchLink:
    """A Link over a process group.  The verifier is rank 0; its process hosts the store.

    It starts at once, and is made again whenever it was lost, until close().  While the store cannot be reached, the
    drafter's end tries again at growing intervals.
    name: what this side's events call it.  store: the store, or where it listens; only the verifier's process must hold
    it.  meeting: the name under which both ends meet in the store, if it is another one.
    Raises ValueError for a name that cannot be part of a key, and for frames that the device cannot have.
    """

    def __init__(
        self,
        name: str,
        side: Side,
        store: TCPStore | StoreAddress,
        device: Device,
        deliver: Deliver,
        settings: LinkSettings,
        meeting: str = "",
    ) -> None:
        meeting = meeting or name
        if not meeting or "/" in meeting:
            raise ValueError(f'name must not be empty and must have no "/", got "{meeting}"')
        if settings.frames == "device" and device.kind != "cuda":
            raise ValueError('frames is "device", but the device is a CPU; use "host"')
        self.name = name
        self._side, self._store, self._device = side, store, device
        self._deliver, self._settings = deliver, settings
        self._closing = threading.Event()
        self._meeting = _Meeting(meeting, self._closing)
        self._lock = threading.Lock()
        self._life: _Life | None = None
        self._retry = _FIRST_RETRY
        self._delayed = Delayed(self._hand_over, settings.delay, f"link-{name}-delay") if settings.delay else None
        self._threads = [
            threading.Thread(target=self._run, name=f"link-{name}", daemon=True),
            threading.Thread(target=self._keep_time, name=f"link-{name}-beat", daemon=True),
        ]
        # A thread that still waits in torch when the interpreter shuts down would abort the process.
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def send(self, data: bytes) -> bool:
        """Queue a message and return at once; False if the link is down or the queue is full.

        Raises ValueError if the message is longer than max_message.
        """
        if len(data) > self._settings.max_message:
            raise ValueError(f"a message of {len(data)} bytes is over max_message ({self._settings.max_message})")
        with self._lock:
            life = self._life
            return life is not None and life.has_room(len(data)) and self._post(life, _DATA, data)

    def close(self) -> None:
        """End the link, with a LinkDown if it was up.  Takes a second or so at most, whatever the peer does.

        One thread may outlive it, on the drafter's side, if the store's whole process is stopped (not dead) while that
        thread asks it something: torch cannot call that off.  It ends when the process goes on or dies.
        """
        self._closing.set()
        with self._lock:
            if self._life is not None:
                self._life.abort("closed")
        end = time.monotonic() + self._settings.connect_timeout + _CLOSE_MARGIN
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        if self._delayed is not None:
            self._delayed.close(timeout=_CLOSE_MARGIN)
        atexit.unregister(self.close)

    def _post(self, life: _Life, kind: int, data: bytes = b"") -> bool:
        try:
            life.post(kind, data)
        except RuntimeError as error:
            # The receiving thread will wake, and report it.
            life.abort(f"sending failed: {error}")
            return False
        return True

    def _keep_time(self) -> None:
        while not self._closing.wait(self._settings.heartbeat):
            with self._lock:
                if self._life is not None:
                    self._beat(self._life)

    def _beat(self, life: _Life) -> None:
        silence = life.silence()
        if silence > self._settings.deadline:
            life.abort(f"silent for {silence:.1f} s")
        else:
            self._post(life, _BEAT)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._live_once()
            except (RuntimeError, OSError) as error:
                level = logging.INFO if self._retry == _FIRST_RETRY else logging.DEBUG
                log.log(level, "link %s: no connection yet: %s", self.name, error)
            self._closing.wait(self._retry)
            self._retry = min(2 * self._retry, _LONGEST_RETRY)
        try:
            self._meeting.tidy()
        except RuntimeError:
            pass  # the store is gone, and all its keys with it
        del self._meeting  # and with it the connection to the store

    def _live_once(self) -> None:
        """Meet the peer and serve one generation.  RuntimeError or OSError if it could not be met."""
        settings, store = self._settings, self._store
        # A client of its own: one must not be used from two threads, and a client that broke stays broken.
        self._meeting.join(join_store(store.host, store.port, settings.connect_timeout))
        generation = self._meeting.offer() if self._side == "verifier" else self._meeting.take()
        if generation is None:
            return
        life = _Life(self._wire(self._meeting.group_store(generation)), generation, settings)
        with self._lock:
            self._life = life
        self._serve(life)

    def _wire(self, group_store: Store) -> Wire:
        settings, store = self._settings, self._store
        rank = 0 if self._side == "verifier" else 1
        if settings.frames == "device":
            return NcclWire(group_store, rank, settings.frame_bytes, self._device.torch)
        interface: Interface = {"interface": settings.interface}
        if not settings.interface:
            interface = interface_towards(store.host, store.port)
        return GlooWire(group_store, rank, settings.frame_bytes, settings.connect_timeout, interface)

    def _serve(self, life: _Life) -> None:
        self._tell(LinkUp(self.name, life.generation))
        try:
            with self._lock:
                life.post(_BEAT)
            while not self._closing.is_set():
                self._receive(life)
            reason = "closed"
        except RuntimeError as error:
            reason = life.aborted or str(error)
        with self._lock:
            self._life = None
            life.abort(reason)
        self._tell(LinkDown(self.name, life.generation, reason))

    def _receive(self, life: _Life) -> None:
        kind, data, arrived = life.receive()
        with self._lock:
            life.note(len(data), arrived)
        # Heard from the peer: if it is lost now, there is no reason to think that it cannot be met again at once.
        self._retry = _FIRST_RETRY
        if kind == _DATA:
            self._tell(Received(self.name, life.generation, data))

    def _tell(self, event: LinkEvent) -> None:
        (self._delayed or self._hand_over)(event)

    def _hand_over(self, event: LinkEvent) -> None:
        if isinstance(event, Received):
            event = replace(event, at=time.monotonic())
        try:
            self._deliver(event)
        except Exception:
            log.exception("link %s: an event could not be delivered", self.name)
