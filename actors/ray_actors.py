"""What runs as Ray actors: shells round the loops.  Constructors return at once; a thread loads, then runs the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from paceline.actors.device import Device, torch_dtype
from paceline.actors.drafter import DrafterLoop
from paceline.actors.drafters import Drafter, ModelDrafter, NgramDrafter
from paceline.actors.engine import Engine
from paceline.actors.inbox import Shutdown
from paceline.actors.link import LinkSettings, TorchLink, host_store, join_store
from paceline.actors.session import Limits
from paceline.actors.text import TextCodec
from paceline.actors.values import Delta, Request
from paceline.actors.verifier import Cancel, Submit, Verifier, VerifierSettings

log = logging.getLogger(__name__)

_STOP_TIMEOUT = 5.0
_STORE_TIMEOUT = 10.0
_RETRY_PAUSE = 5.0
_CANCELS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checkpoint directory and how to load it.  kv_tokens: cached positions over all sessions."""

    directory: str
    dtype: str
    kv_tokens: int

    def load(self, device: Device) -> Engine:
        """The engine of it, on this process's device."""
        # Imported here, since it takes seconds, and neither the driver nor a drafter without a model needs it.
        from paceline.actors.torch_engine import load_engine

        return load_engine(self.directory, device.torch, torch_dtype(self.dtype), self.kv_tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor computes.  index: its core on CPU; a GPU actor sees only its own GPU, so there it is 0."""

    device: str
    index: int

    def claim(self) -> Device:
        """Settle this process there."""
        device = Device.resolve(self.device, self.index)
        device.claim()
        return device


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """What a VerifierActor is made of.  links: the names of the drafters that may come."""

    model: ModelSpec
    place: Place
    links: tuple[str, ...]
    link: LinkSettings
    settings: VerifierSettings


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """What a DrafterActor is made of.  model: None for prompt lookup.  store: the verifier's (host, port)."""

    name: str
    model: ModelSpec | None
    place: Place
    link: LinkSettings
    store: tuple[str, int]


class _Worker:
    """A thread that loads, reports that it has, and then runs until its loop ends.

    An actor that Ray has restarted has nobody who waits for that report: if it cannot load, it ends, to be tried again.
    """

    def __init__(self, name: str, load: Callable[[], Callable[[], None]]) -> None:
        self.loaded: Future[None] = Future()
        self._load = load
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        try:
            run = self._load()
        except BaseException as error:
            log.exception("loading failed")
            self.loaded.set_exception(error)
            if ray.get_runtime_context().was_current_actor_reconstructed:
                time.sleep(_RETRY_PAUSE)
                os._exit(1)
            return
        self.loaded.set_result(None)
        try:
            run()
        except BaseException:
            # Without its loop the process is of no use, and a dead actor is what everybody knows how to handle.
            log.exception("the loop failed; the actor ends")
            os._exit(1)

    async def join(self) -> None:
        await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT)


class VerifierActor:
    """The verifier's process: it owns the committed prefixes, and hosts the store at which links meet."""

    def __init__(self, spec: VerifierSpec) -> None:
        self._spec = spec
        self._store, port = host_store(ray.util.get_node_ip_address())
        self._address = (ray.util.get_node_ip_address(), port)
        self._links: list[TorchLink] = []
        self._verifier: Verifier | None = None
        self._running: dict[str, Submit] = {}
        self._cancelled: deque[str] = deque(maxlen=_CANCELS_REMEMBERED)
        self._worker = _Worker("verifier", self._load)

    def _load(self) -> Callable[[], None]:
        spec = self._spec
        device = spec.place.claim()
        engine = spec.model.load(device)
        codec = TextCodec.load(spec.model.directory)
        limits = Limits(codec.eos_ids, engine.context_length)
        verifier = Verifier(engine, limits, lambda request: codec.stream(request.stop), spec.settings)
        for name in spec.links:
            link = TorchLink(name, "verifier", self._store, device, verifier.inbox.put, spec.link)
            verifier.add_link(link)
            self._links.append(link)
        self._limits, self._vocab_size, self._verifier = limits, engine.vocab_size, verifier
        return verifier.run

    async def store(self) -> tuple[str, int]:
        """Where the drafters meet this verifier: (host, port)."""
        return self._address

    async def ready(self) -> tuple[int, int]:
        """Wait until the model is loaded; (context length, vocabulary size).  Raises what loading raised."""
        await asyncio.wrap_future(self._worker.loaded)
        return self._limits.context_length, self._vocab_size

    async def generate(self, request: Request, call: str) -> AsyncIterator[Delta]:
        """The deltas of a request, the last one with its finish.  call: a name for `cancel`, never used again."""
        verifier = await self._loop()
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        submit = Submit(request, partial(_hand_over, asyncio.get_running_loop(), deltas))
        verifier.inbox.put(submit)
        self._running[call] = submit
        if call in self._cancelled:
            verifier.inbox.put(Cancel(submit))
        try:
            while True:
                delta = await deltas.get()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            del self._running[call]
            verifier.inbox.put(Cancel(submit))

    async def cancel(self, call: str) -> None:
        """End a call of `generate`, even if it has not begun yet; one that is over is fine."""
        submit = self._running.get(call)
        if submit is None:
            self._cancelled.append(call)
        else:
            (await self._loop()).inbox.put(Cancel(submit))

    async def status(self) -> dict[str, Any]:
        """What the loop counts, and who is there: counters, sessions, waiting, drafters, pid."""
        verifier = await self._loop()
        return {
            "counters": dict(verifier.counters),
            "sessions": len(verifier.sessions),
            "waiting": len(verifier.waiting),
            "drafters": verifier.drafters(),
            "pid": os.getpid(),
        }

    async def stop(self) -> None:
        """End all requests, the loop and the links."""
        if self._verifier is not None:
            self._verifier.inbox.put(Shutdown())
            await self._worker.join()
        for link in self._links:
            await asyncio.to_thread(link.close)

    async def _loop(self) -> Verifier:
        await asyncio.wrap_future(self._worker.loaded)
        assert self._verifier is not None
        return self._verifier


def _hand_over(loop: asyncio.AbstractEventLoop, deltas: asyncio.Queue[Delta], delta: Delta) -> None:
    try:
        loop.call_soon_threadsafe(deltas.put_nowait, delta)
    except RuntimeError:
        log.info("a stream's event loop is closed; its last delta is dropped")


class DrafterActor:
    """A drafter's process.  It keeps nothing that matters: a new one finds the store again and is opened anew."""

    def __init__(self, spec: DrafterSpec) -> None:
        self._spec = spec
        self._link: TorchLink | None = None
        self._drafter: DrafterLoop | None = None
        self._worker = _Worker("drafter", self._load)

    def _load(self) -> Callable[[], None]:
        spec = self._spec
        device = spec.place.claim()
        drafter: Drafter = ModelDrafter(spec.model.load(device)) if spec.model else NgramDrafter()
        loop = DrafterLoop(drafter)
        store = join_store(*spec.store, timeout=_STORE_TIMEOUT)
        self._link = TorchLink(spec.name, "drafter", store, device, loop.inbox.put, spec.link)
        loop.add_link(self._link)
        self._drafter = loop
        return loop.run

    async def ready(self) -> None:
        """Wait until the model is loaded.  Raises what loading raised."""
        await asyncio.wrap_future(self._worker.loaded)

    async def status(self) -> dict[str, Any]:
        """What the loop counts: counters, sessions, pid."""
        await self.ready()
        assert self._drafter is not None
        return {
            "counters": dict(self._drafter.counters),
            "sessions": len(self._drafter.drafts),
            "pid": os.getpid(),
        }

    async def stop(self) -> None:
        """End the loop and the link."""
        if self._drafter is not None:
            self._drafter.inbox.put(Shutdown())
            await self._worker.join()
        if self._link is not None:
            await asyncio.to_thread(self._link.close)
