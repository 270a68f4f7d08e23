"""What runs as Ray actors: shells round the loops.  Constructors return at once; a thread loads, then runs the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import ray
from paceline.actors.cross_vocabulary import Translation
from paceline.actors.device import Device, torch_dtype
from paceline.actors.drafter import DrafterLoop
from paceline.actors.drafters import Drafter, ModelDrafter, NgramDrafter
from paceline.actors.engine import Engine
from paceline.actors.inbox import Shutdown
from paceline.actors.link import LinkSettings, StoreAddress, TorchLink, host_store
from paceline.actors.oracle import OracleDrafter, OracleSpec
from paceline.actors.session import Limits
from paceline.actors.text import TextCodec, stream_of
from paceline.actors.trace import Span, Tracer
from paceline.actors.values import Delta, Request
from paceline.actors.verifier import Cancel, Submit, Verifier, VerifierSettings

log = logging.getLogger(__name__)

_STOP_TIMEOUT = 5.0
_RETRY_PAUSE = 5.0
_LOOK_EVERY = 0.5
_CANCELS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checkpoint directory and how to load it.

    kv_tokens: cached positions over all sessions.  head: the token ids that logits are wanted of, None for all.
    int8: hold the weights of linear layers in int8; CPU only.  graphs: record passes of a fixed shape; GPU only.
    tokenizer: of a drafter, the directory of the target, whose tokens grammars speak of.
    foreign: it is a drafter with a tokenizer of its own; the head follows from that.
    """

    directory: str
    dtype: str
    kv_tokens: int
    head: tuple[int, ...] | None = None
    int8: bool = False
    graphs: bool = True
    tokenizer: str = ""
    foreign: bool = False

    def load(self, device: Device) -> Engine:
        """The engine of it, on this process's device."""
        # Imported here, since it takes seconds, and neither the driver nor a drafter without a model needs it.
        from paceline.actors.torch_engine import load_engine

        dtype = torch_dtype(self.dtype)
        return load_engine(
            self.directory, device.torch, dtype, self.kv_tokens, head=self.head, int8=self.int8, graphs=self.graphs
        )


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
class LinkSpec:
    """A drafter that may come.  retrieval: it looks its guesses up, which costs nothing, and runs beside the others."""

    name: str
    settings: LinkSettings
    retrieval: bool = False


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """What a VerifierActor is made of.  name: what drafters call it, and its lane in timelines."""

    name: str
    model: ModelSpec
    place: Place
    links: tuple[LinkSpec, ...]
    settings: VerifierSettings


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """What a DrafterActor is made of.

    name: what its verifiers call it, and its lane in timelines.  source: what guesses; None is prompt lookup.
    stores: of each verifier that it serves, the name and where its store listens.
    """

    name: str
    source: ModelSpec | OracleSpec | None
    place: Place
    link: LinkSettings
    stores: tuple[tuple[str, StoreAddress], ...]

    def load(self, device: Device) -> Drafter:
        """What guesses, on this process's device."""
        match self.source:
            case None:
                return NgramDrafter()
            case OracleSpec():
                return OracleDrafter(self.source)
            case ModelSpec():
                return _model_drafter(self.source, device)


def _model_drafter(spec: ModelSpec, device: Device) -> ModelDrafter:
    translation = Translation.load(spec.tokenizer, spec.directory) if spec.foreign else None
    head = spec.head if translation is None else translation.drafter_ids
    engine = replace(spec, head=head).load(device)
    vocab_size = engine.vocab_size if translation is None else translation.vocab_size
    compile = TextCodec.load(spec.tokenizer).compiler(vocab_size)
    return ModelDrafter(engine, head=spec.head, compile=compile, translation=translation)


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
        host = ray.util.get_node_ip_address()
        self._store, port = host_store(host)
        self._address = StoreAddress(host, port)
        self._tracer = Tracer(spec.name)
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
        limits = Limits(codec.eos_ids, engine.context_length, engine.vocab_size)
        verifier = Verifier(
            engine,
            limits,
            partial(stream_of, codec),
            spec.settings,
            tracer=self._tracer,
            compile=codec.compiler(engine.vocab_size),
        )
        for one in spec.links:
            link = TorchLink(one.name, "verifier", self._store, device, verifier.inbox.put, one.settings)
            verifier.add_link(link, one.retrieval)
            self._links.append(link)
        self._limits, self._vocab_size, self._verifier = limits, engine.vocab_size, verifier
        return verifier.run

    async def store(self) -> StoreAddress:
        """Where the drafters meet this verifier."""
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
            "costs": {drafter: asdict(costs) for drafter, costs in verifier.controller.costs().items()},
            "pid": os.getpid(),
        }

    async def drafters(self, known: Collection[str] | None = None, patience: float = 30.0) -> tuple[str, ...]:
        """The drafters that are there: at once if they are others than `known`, else when they are, or after a while.

        patience: seconds.
        """
        verifier = await self._loop()
        end = time.monotonic() + patience
        while known is not None and set(verifier.drafters()) == set(known) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_EVERY)
        return verifier.drafters()

    async def trace(self) -> list[Span]:
        """What it has done since the last time."""
        return self._tracer.drain()

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
    """A drafter's process.  It keeps nothing that matters: a new one finds the stores again and is opened anew."""

    def __init__(self, spec: DrafterSpec) -> None:
        self._spec = spec
        self._links: list[TorchLink] = []
        self._drafter: Drafter | None = None
        self._loop: DrafterLoop | None = None
        self._tracer = Tracer(spec.name)
        self._worker = _Worker("drafter", self._load)

    def _load(self) -> Callable[[], None]:
        spec = self._spec
        device = spec.place.claim()
        self._drafter = spec.load(device)
        loop = DrafterLoop(self._drafter, tracer=self._tracer)
        for verifier, store in spec.stores:
            link = TorchLink(verifier, "drafter", store, device, loop.inbox.put, spec.link, meeting=spec.name)
            loop.add_link(link)
            self._links.append(link)
        self._loop = loop
        return loop.run

    async def ready(self) -> None:
        """Wait until the model is loaded.  Raises what loading raised."""
        await asyncio.wrap_future(self._worker.loaded)

    async def teach(self, prompt: Sequence[int], continuation: Sequence[int], step_seconds: float) -> None:
        """Tell an oracle how the target goes on; see OracleDrafter.teach.  TypeError if it is none."""
        await self.ready()
        if not isinstance(self._drafter, OracleDrafter):
            raise TypeError(f"drafter {self._spec.name} is no oracle, so it cannot be taught")
        self._drafter.teach(prompt, continuation, step_seconds)

    async def status(self) -> dict[str, Any]:
        """What the loop counts: counters, sessions, pid."""
        await self.ready()
        assert self._loop is not None
        return {
            "counters": dict(self._loop.counters),
            "sessions": len(self._loop.drafts),
            "pid": os.getpid(),
        }

    async def trace(self) -> list[Span]:
        """What it has done since the last time."""
        return self._tracer.drain()

    async def stop(self) -> None:
        """End the loop and the links."""
        if self._loop is not None:
            self._loop.inbox.put(Shutdown())
            await self._worker.join()
        for link in self._links:
            await asyncio.to_thread(link.close)
