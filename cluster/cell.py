"""A cell: one verifier and one drafter on a Ray cluster, started and taken down as one thing."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import paceline.cluster.ray_env  # noqa: F401
import ray
from paceline.actors.device import Device
from paceline.actors.drafters import RUN_AHEAD
from paceline.actors.link import LinkSettings
from paceline.actors.ray_actors import DrafterActor, DrafterSpec, ModelSpec, Place, VerifierActor, VerifierSpec
from paceline.actors.schedules import MAX_K
from paceline.actors.text import TextCodec
from paceline.actors.values import Delta, Request, Speculation
from paceline.actors.verifier import VerifierSettings
from paceline.cluster import processes
from paceline.cluster.backend import BackendError, CellError, ModelInfo
from paceline.cluster.config import NGRAM, NONE, CellConfig
from paceline.cluster.models import ModelError, ModelFiles, check_pair, resolve
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

log = logging.getLogger(__name__)

Progress = Callable[[str], None]

_DRAFTER = "drafter-0"
_CONTROL = "control"
_DIRECTORY = "paceline-"
_TICK = 1.0
_STATUS_TIMEOUT = 2.0
_STOP_TIMEOUT = 8.0
_OBJECT_STORE_BYTES = 100 * 2**20


class Cell:
    """A running cell.  backend: what the gateway talks to.  codec: the target's tokenizer."""

    def __init__(self, backend: CellBackend, codec: TextCodec, parts: _Parts) -> None:
        self.backend, self.codec = backend, codec
        self._parts = parts

    @classmethod
    def start(cls, config: CellConfig, progress: Progress = log.info) -> Cell:
        """Resolve the models, start Ray unless this process is connected already, and wait until both actors are up.

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
        """What the actors say of themselves: {"verifier": {...}, "drafter": {...}}; None where one does not answer."""
        return self._parts.status()

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
        self.drafter: Any = None

    def status(self) -> dict[str, Any]:
        named = {"verifier": self.verifier, "drafter": self.drafter}
        asked = {name: _control(actor.status).remote() for name, actor in named.items() if actor is not None}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STATUS_TIMEOUT)
        return {name: _answer_of(ref) for name, ref in asked.items()}

    def stop(self) -> None:
        actors = [actor for actor in (self.drafter, self.verifier) if actor is not None]
        group, self.drafter, self.verifier, self.group = self.group, None, None, None
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
    config = _settled(config, device)
    target = resolve(config.target, progress=progress)
    drafter = _resolve_drafter(config, target, progress)
    codec = _codec(target)
    progress("starting Ray")
    parts.cluster.start(cpus=max(2, os.cpu_count() or 1))
    parts.group = _place(device, 1 if config.drafter == NONE else 2)
    context_length, vocab_size = _start_actors(config, device, target, drafter, parts, progress)
    model = ModelInfo(
        target.name,
        drafter.name if drafter else config.drafter,
        config.dtype,
        # What the cache cannot hold is refused by the gateway, which names the field.
        min(context_length, config.kv_tokens - MAX_K - 1),
        vocab_size,
        Speculation("plain" if config.drafter == NONE else config.schedule, config.k),
    )
    return Cell(CellBackend(model, parts.verifier), codec, parts)


def _settled(config: CellConfig, device: Device) -> CellConfig:
    """The config with what is best on this device where it says "auto"."""
    dtype = device.best_dtype if config.dtype == "auto" else config.dtype
    frames = device.link_frames if config.link_frames == "auto" else config.link_frames
    return config.model_copy(update={"dtype": dtype, "link_frames": frames})


def _codec(target: ModelFiles) -> TextCodec:
    try:
        return TextCodec.load(target.directory)
    except Exception as error:  # What a damaged tokenizer raises is its library's own affair.
        raise ModelError(f"the tokenizer of {target.name} cannot be read: {error}") from error


def _resolve_drafter(config: CellConfig, target: ModelFiles, progress: Progress) -> ModelFiles | None:
    if config.drafter in (NGRAM, NONE):
        return None
    drafter = resolve(config.drafter, progress=progress)
    check_pair(target.directory, drafter.directory)
    return drafter


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
    drafter: ModelFiles | None,
    parts: _Parts,
    progress: Progress,
) -> tuple[int, int]:
    """Start both actors, wait for them, and return the target's context length and vocabulary size."""
    assert config.link_frames != "auto"
    link = LinkSettings(frames=config.link_frames, deadline=config.link_deadline)
    has_drafter = config.drafter != NONE
    verifier = VerifierSpec(
        _model(target, config),
        _seat(device, 0),
        (_DRAFTER,) if has_drafter else (),
        link,
        VerifierSettings(max_sessions=config.max_sessions, max_queue=config.max_queue),
    )
    calls = config.max_sessions + config.max_queue + 64
    verifier_class = ray.remote(concurrency_groups={_CONTROL: 64})(VerifierActor)
    parts.verifier = verifier_class.options(max_concurrency=calls, **_in(parts, device, 0)).remote(verifier)
    waits = {parts.verifier.ready.remote(): f"the target {target.name}"}
    if has_drafter:
        store = ray.get(parts.verifier.store.remote(), timeout=config.start_timeout)
        # Room for what it runs ahead, so that whatever the verifier admits can be drafted.
        ahead = config.max_sessions * RUN_AHEAD
        model = _model(drafter, config, ahead) if drafter else None
        spec = DrafterSpec(_DRAFTER, model, _seat(device, 1), link, store)
        # It holds nothing that matters, so Ray may bring it back as often as it dies.
        drafter_class = ray.remote(concurrency_groups={_CONTROL: 8})(DrafterActor)
        parts.drafter = drafter_class.options(max_restarts=-1, **_in(parts, device, 1)).remote(spec)
        waits[parts.drafter.ready.remote()] = f"the drafter {config.drafter}"
    first = next(iter(waits))
    _await_ready(waits, config.start_timeout, progress)
    limits: tuple[int, int] = ray.get(first)
    return limits


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


def _model(files: ModelFiles, config: CellConfig, ahead: int = 0) -> ModelSpec:
    return ModelSpec(str(files.directory), config.dtype, config.kv_tokens + ahead)


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
