"""A cell: one verifier and its drafters on a Ray cluster, started and taken down as one thing."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline.cluster.ray_env  # noqa: F401
import ray
from paceline.actors.device import Device
from paceline.actors.drafters import RUN_AHEAD
from paceline.actors.link import LinkSettings, StoreAddress
from paceline.actors.oracle import OracleSpec, parse_oracle
from paceline.actors.ray_actors import (
    DrafterActor,
    DrafterSpec,
    LinkSpec,
    ModelSpec,
    Place,
    VerifierActor,
    VerifierSpec,
)
from paceline.actors.schedules import MAX_K
from paceline.actors.text import TextCodec
from paceline.actors.trace import Span
from paceline.actors.values import Delta, Request
from paceline.actors.verifier import VerifierSettings
from paceline.cluster import processes
from paceline.cluster.backend import BackendError, CellError, ModelInfo
from paceline.cluster.config import FOREIGN, INT8, NGRAM, ORACLE, CellConfig
from paceline.cluster.models import ModelError, ModelFiles, Progress, check_foreign, check_pair, resolve
from paceline.cluster.vocab import head_ids
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

log = logging.getLogger(__name__)

_VERIFIER = "verifier"
_CONTROL = "control"
_DIRECTORY = "paceline-"
_TICK = 1.0
_STATUS_TIMEOUT = 2.0
_TEACH_TIMEOUT = 10.0
_LINK_TIMEOUT, _LINK_PAUSE = 10.0, 0.05
_STOP_TIMEOUT = 8.0
_OBJECT_STORE_BYTES = 100 * 2**20


class Cell:
    """A running cell.  backend: what the gateway talks to.  codec: the target's tokenizer."""

    def __init__(self, backend: CellBackend, codec: TextCodec, parts: _Parts) -> None:
        self.backend, self.codec = backend, codec
        self._parts = parts

    @classmethod
    def start(cls, config: CellConfig, progress: Progress = log.info) -> Cell:
        """Resolve the models, start Ray unless this process is connected already, and wait until all actors are up.

        Raises ModelError and CellError, with nothing left running.
        """
        parts = _Parts()
        try:
            return _start(config, progress, parts)
        except BaseException as error:
            with processes.undisturbed():
                parts.stop()
            if isinstance(error, RayTaskError):
                raise CellError(str(error.cause)) from error
            if isinstance(error, (RayError, GetTimeoutError)):
                raise CellError(f"the cell did not start: {error}") from error
            raise

    def status(self) -> dict[str, Any]:
        """What the actors say of themselves; None where one does not answer.

        {"verifier": {...}, "drafters": {"drafter-0": {...}, ...}}
        """
        verifier, *drafters = _answers([actor.status for actor in self._parts.actors()])
        return {"verifier": verifier, "drafters": dict(zip(self._parts.drafters, drafters, strict=True))}

    async def watch_drafters(self) -> AsyncGenerator[frozenset[str], None]:
        """The drafters that are there, now and whenever that has changed, by name and title: "drafter-0 (ngram)".

        Raises BackendError when the verifier is gone.
        """
        titles = dict(zip(self._parts.drafters, self.backend.model.drafters, strict=True))
        known: tuple[str, ...] | None = None
        while True:
            try:
                known = await _control(self._parts.verifier.drafters).remote(known)
            except RayActorError as error:
                raise BackendError("the verifier is gone") from error
            yield frozenset(f"{name} ({titles[name]})" for name in known)

    def trace(self) -> list[Span]:
        """What all the actors have done since the last time, in the order of its beginning."""
        spans = [span for lane in _answers([actor.trace for actor in self._parts.actors()]) for span in lane or ()]
        return sorted(spans, key=lambda span: span.start)

    def teach(self, prompt: Sequence[int], continuation: Sequence[int], step_seconds: float) -> None:
        """Tell the oracles how the target continues `prompt`, and how long a plain step of it takes.

        Returns when they know.  Raises CellError if one does not answer.
        """
        oracles = [
            self._parts.drafters[name]
            for name, title in zip(self._parts.drafters, self.backend.model.drafters, strict=True)
            if title.startswith(ORACLE)
        ]
        try:
            asked = [_control(oracle.teach).remote(prompt, continuation, step_seconds) for oracle in oracles]
            ray.get(asked, timeout=_TEACH_TIMEOUT)
        except (RayError, GetTimeoutError) as error:
            raise CellError(f"an oracle cannot be taught: {error}") from error

    def stop(self) -> None:
        """Take everything down, and let no Ctrl-C disturb that.  Again is fine."""
        with processes.undisturbed():
            self._parts.stop()

    def __enter__(self) -> Cell:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class _Parts:
    """What a cell has started so far, so that it can be taken down at any point."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.group: PlacementGroup | None = None
        self.verifier: Any = None
        self.drafters: dict[str, Any] = {}

    def actors(self) -> list[Any]:
        """The verifier, then the drafters."""
        return [actor for actor in (self.verifier, *self.drafters.values()) if actor is not None]

    def stop(self) -> None:
        actors, group = self.actors()[::-1], self.group
        self.verifier, self.drafters, self.group = None, {}, None
        try:
            if ray.is_initialized():
                _stop_actors(actors, group)
        except RayError as error:
            log.warning("the cell's actors could not be stopped: %s", error)
        finally:
            self.cluster.stop()


def _stop_actors(actors: Sequence[Any], group: PlacementGroup | None) -> None:
    if actors:
        stopping = [_control(actor.stop).remote() for actor in actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_TIMEOUT)
    for actor in actors:
        ray.kill(actor)
    if group is not None:
        remove_placement_group(group)


def _control(method: Any) -> Any:
    """A call that does not queue behind the requests."""
    return method.options(concurrency_group=_CONTROL)


def _log_what_ray_prints() -> None:
    """Ray's driver prints the troubles of its cluster to stdout, where answers go; let them be logged instead."""
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = _log_ray_message


def _log_ray_message(data: dict[str, Any], ignore_prefix: bool = False) -> None:
    text = " ".join(data.get("lines", ())).strip()
    log.warning("Ray says: %s", text.partition(". ")[0])
    log.debug("Ray says: %s", text)


def _sweep() -> None:
    """Remove what cells of ours have left that were killed outright."""
    for path in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY}*-*"):
        pid = path.name.removeprefix(_DIRECTORY).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def _answers(methods: Iterable[Any]) -> list[Any]:
    """What control methods of actors return, all asked at once; None of those that do not answer in time."""
    asked = [_control(method).remote() for method in methods]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=_STATUS_TIMEOUT)
    return [_answer_of(ref) for ref in asked]


def _answer_of(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=0)
    except (RayError, GetTimeoutError):
        return None


class Cluster:
    """A Ray cluster of our own on this machine; nothing, if the process was connected to one before."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    def start(self, cpus: int) -> None:
        if ray.is_initialized():
            return
        _sweep()
        # Short, because Ray makes sockets in it, and their paths may have 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY}{os.getpid()}-"))
        _log_what_ray_prints()
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(self._directory),
        )

    def stop(self) -> None:
        if self._directory is None:
            return
        started = processes.below_those_with(str(self._directory))
        ray.shutdown()
        for pid in processes.await_end(started, _STOP_TIMEOUT):
            log.info("process %d did not end; it is killed", pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None


def _start(config: CellConfig, progress: Progress, parts: _Parts) -> Cell:
    try:
        device = Device.resolve(config.device)
    except ValueError as error:
        raise CellError(str(error)) from error
    if INT8 in config.drafters and device.kind != "cpu":
        raise CellError(f'the drafter "{INT8}" runs on CPU only; leave it out, or use --device cpu')
    config = _settled(config, device)
    target = resolve(config.target, progress=progress)
    drafters = [_resolve_drafter(name, config, target, progress) for name in config.drafters]
    codec = _codec(target)
    bundles = 1 + sum(drafter.has_device for drafter in drafters)
    progress("starting Ray")
    # On CPU, drafters share cores where there are not enough of them.
    parts.cluster.start(cpus=max(bundles, os.cpu_count() or 1))
    parts.group = _place(device, bundles)
    context_length, vocab_size = _start_actors(config, device, target, drafters, parts, progress)
    model = ModelInfo(
        target.name,
        tuple(drafter.title for drafter in drafters),
        config.dtype,
        # What the cache cannot hold is refused by the gateway, which names the field.
        min(context_length, config.kv_tokens - MAX_K - 1),
        vocab_size,
        config.speculation,
        config.default_max_tokens,
    )
    return Cell(CellBackend(model, parts.verifier), codec, parts)


def _settled(config: CellConfig, device: Device) -> CellConfig:
    """The config with what is best on this device where it says "auto"."""
    frames = device.link_frames if config.link_frames == "auto" else config.link_frames
    return config.model_copy(update={"dtype": device.dtype(config.dtype), "link_frames": frames})


def _codec(target: ModelFiles) -> TextCodec:
    try:
        return TextCodec.load(target.directory)
    except Exception as error:  # What a damaged tokenizer raises is its library's own affair.
        raise ModelError(f"the tokenizer of {target.name} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A drafter to be started.  title: what it was called.  source: what it guesses with; None is prompt lookup."""

    title: str
    source: ModelSpec | OracleSpec | None

    @property
    def has_device(self) -> bool:
        """Whether it computes anything to speak of."""
        return isinstance(self.source, ModelSpec)


def _resolve_drafter(name: str, config: CellConfig, target: ModelFiles, progress: Progress) -> _Wanted:
    if name == NGRAM:
        return _Wanted(name, None)
    if name.startswith(ORACLE):
        return _Wanted(name, parse_oracle(name))
    foreign = name.startswith(FOREIGN)
    files = target
    if name != INT8:
        files = resolve(name.removeprefix(FOREIGN), progress=progress)
        (check_foreign if foreign else check_pair)(target.directory, files.directory)
    head = None if config.drafter_vocab is None else head_ids(config.drafter_vocab, files)
    # Room for what it runs ahead, so that whatever the verifier admits can be drafted.
    kv_tokens = config.kv_tokens + config.max_sessions * RUN_AHEAD
    return _Wanted(
        INT8 if name == INT8 else FOREIGN * foreign + files.name,
        ModelSpec(
            str(files.directory),
            config.dtype,
            kv_tokens,
            head,
            int8=name == INT8,
            graphs=config.cuda_graphs,
            tokenizer=str(target.directory),
            foreign=foreign,
        ),
    )


def _place(device: Device, bundles: int) -> PlacementGroup:
    wanted = {"CPU": 1.0} if device.kind == "cpu" else {"CPU": 1.0, "GPU": 1.0}
    group = placement_group([wanted] * bundles, strategy="PACK")
    if not group.wait(timeout_seconds=10):
        free = {name: amount for name, amount in ray.available_resources().items() if name in wanted}
        remove_placement_group(group)
        raise CellError(f"{bundles} actors with {wanted} each do not fit: the cluster has {free} free")
    return group


def _start_actors(
    config: CellConfig,
    device: Device,
    target: ModelFiles,
    drafters: Sequence[_Wanted],
    parts: _Parts,
    progress: Progress,
) -> tuple[int, int]:
    """Start all actors, wait for them, and return the target's context length and vocabulary size."""
    links = [_link(f"drafter-{i}", drafter, config, device) for i, drafter in enumerate(drafters)]
    parts.verifier = _start_verifier(config, device, target, links, parts)
    waits = {parts.verifier.ready.remote(): f"the target {target.name}"}
    first = next(iter(waits))
    store: StoreAddress = ray.get(parts.verifier.store.remote(), timeout=config.start_timeout)
    seats = itertools.count(1)
    for link, drafter in zip(links, drafters, strict=True):
        seat = next(seats) if drafter.has_device else None
        actor = _start_drafter(link, drafter, store, device, seat, parts)
        parts.drafters[link.name] = actor
        waits[actor.ready.remote()] = f"the drafter {drafter.title}"
    _await_ready(waits, config.start_timeout, progress)
    _await_links(parts)
    limits: tuple[int, int] = ray.get(first)
    return limits


def _link(name: str, drafter: _Wanted, config: CellConfig, device: Device) -> LinkSpec:
    assert config.link_frames != "auto"
    # Without a device, a drafter has no device memory for them either.
    frames = config.link_frames if drafter.has_device or device.kind == "cpu" else "host"
    deadline = config.link_deadline
    settings = LinkSettings(frames=frames, heartbeat=deadline / 3, deadline=deadline, delay=config.link_delay)
    return LinkSpec(name, settings, retrieval=drafter.source is None)


def _start_verifier(
    config: CellConfig, device: Device, target: ModelFiles, links: Sequence[LinkSpec], parts: _Parts
) -> Any:
    spec = VerifierSpec(
        _VERIFIER,
        ModelSpec(str(target.directory), config.dtype, config.kv_tokens, graphs=config.cuda_graphs),
        _seat(device, 0),
        tuple(links),
        VerifierSettings(
            max_sessions=config.max_sessions,
            max_queue=config.max_queue,
            drafters_per_session=config.drafters_per_session,
            pass_tokens=device.pass_tokens,
            prefill_chunk=device.prefill_chunk,
        ),
    )
    calls = config.max_sessions + config.max_queue + 64
    verifier_class = ray.remote(concurrency_groups={_CONTROL: 64})(VerifierActor)
    return verifier_class.options(max_concurrency=calls, **_in(parts, device, 0)).remote(spec)


def _start_drafter(
    link: LinkSpec, drafter: _Wanted, store: StoreAddress, device: Device, seat: int | None, parts: _Parts
) -> Any:
    """seat: the number of its bundle; None for one that shares a core with the first that has one."""
    place = _seat(device, seat) if seat is not None else Place("cpu", 1)
    spec = DrafterSpec(link.name, drafter.source, place, link.settings, ((_VERIFIER, store),))
    options = _in(parts, device, seat) if seat is not None else {"num_cpus": 0}
    # It holds nothing that matters, so Ray may bring it back as often as it dies.
    drafter_class = ray.remote(concurrency_groups={_CONTROL: 8})(DrafterActor)
    return drafter_class.options(max_restarts=-1, **options).remote(spec)


def _await_ready(waits: dict[Any, str], timeout: float, progress: Progress) -> None:
    started = time.monotonic()
    while waits:
        waited = time.monotonic() - started
        if waited > timeout:
            raise CellError(f"{' and '.join(waits.values())} did not load within {timeout:g} s (start_timeout)")
        progress(f"loading {' and '.join(waits.values())}, {waited:.0f} s")
        for ref in ray.wait(list(waits), timeout=_TICK)[0]:
            ray.get(ref)
            del waits[ref]


def _await_links(parts: _Parts) -> None:
    """Wait a little until the verifier has met its drafters, so that the first request is drafted for too."""
    deadline = time.monotonic() + _LINK_TIMEOUT
    while True:
        status = _answers([parts.verifier.status])[0] or {"drafters": ()}
        missing = sorted(parts.drafters.keys() - set(status["drafters"]))
        if not missing:
            return
        if time.monotonic() > deadline:
            log.warning("%s did not come within %g s; requests go on without", ", ".join(missing), _LINK_TIMEOUT)
            return
        time.sleep(_LINK_PAUSE)


def _seat(device: Device, number: int) -> Place:
    # Ray shows a GPU actor its own GPU only.
    return Place(device.kind, number if device.kind == "cpu" else 0)


def _in(parts: _Parts, device: Device, bundle: int) -> dict[str, Any]:
    """Actor options that put it into a bundle of the cell's placement group."""
    strategy = PlacementGroupSchedulingStrategy(parts.group, placement_group_bundle_index=bundle)
    return {"num_cpus": 1, "num_gpus": int(device.kind == "cuda"), "scheduling_strategy": strategy}


class CellBackend:
    """Runs requests on the cell's verifier; see backend.Backend."""

    def __init__(self, model: ModelInfo, verifier: Any) -> None:
        self.model = model
        self._verifier = verifier
        self._calls: dict[str, str] = {}

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """See Backend.generate."""
        ended, call = False, uuid.uuid4().hex
        self._calls.setdefault(request.id, call)
        try:
            async for ref in self._verifier.generate.options(num_returns="streaming").remote(request, call):
                delta: Delta = await ref
                ended = delta.finish is not None
                yield delta
        except RayActorError as error:
            ended = True
            raise BackendError("the verifier is gone; the cell has to be started again") from error
        finally:
            if self._calls.get(request.id) == call:
                del self._calls[request.id]
            if not ended:
                # An explicit call: of cancelled Ray tasks about one in a hundred runs on.
                _control(self._verifier.cancel).remote(call)

    async def cancel(self, request_id: str) -> None:
        """See Backend.cancel."""
        call = self._calls.get(request_id)
        if call is None:
            return
        try:
            await _control(self._verifier.cancel).remote(call)
        except RayActorError as error:
            raise BackendError("the verifier is gone") from error
