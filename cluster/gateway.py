"""The gRPC server: checks requests, hands them to a backend, streams what comes back, ends every call with a status.

A call that ends early, for whatever reason, cancels its request at once.  A client that reads slowly costs one merged
message at most: its request runs on at full speed and frees its place in the cell.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from paceline.actors.schedules import MAX_BUDGET, MAX_FANOUT, MAX_K, MAX_WIDTH
from paceline.actors.values import Delta, Finish, Request, Sampling, Speculation, TokenLogprobs
from paceline.cluster.backend import Backend, BackendError
from paceline.cluster.requests import SCHEDULE_NAMES, Codec, Invalid, check, choices
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

SERVICE = "paceline.v1.GenerationService"
MAX_MESSAGE_BYTES = 16 * 2**20
# Both sides of a connection need the same limits.
MESSAGE_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_SERVER_OPTIONS = (
    *MESSAGE_OPTIONS,
    # Without this a second server on a port is no error: the two share its connections.
    ("grpc.so_reuseport", 0),
    # A peer that vanished without a word is found out, and its requests end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients that ping every 10 s, streaming or not, are not sent away (GOAWAY too_many_pings).
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
# A status message travels in a header; beyond 8 KiB, percent-encoded, clients get another error instead.
_MAX_DETAIL = 600
_RELEASE_TIMEOUT = 5.0
_PIECES = 65536

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}

_CODES: Mapping[str, grpc.StatusCode] = {
    "exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
}

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """stall: seconds after which a client that takes nothing loses its call.  max_calls: calls open at once.

    probe_every: seconds without any token after which one is generated to see whether the backend still works.
    probe_timeout: seconds that this may take.
    """

    stall: float = 60.0
    max_calls: int = 4096
    probe_every: float = 10.0
    probe_timeout: float = 30.0


class AddressError(ValueError):
    """An address that cannot be served at."""


class AddressInUse(AddressError):
    """Something else listens there already."""


class _Failed(Exception):
    """Ends a call with this status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT" or "[IPV6]:PORT".  Raises AddressError."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare) != (bare != host) or not port.isdecimal() or int(port) > 65535:
        raise AddressError(f"{address!r} is no address; write HOST:PORT, as 127.0.0.1:50051, or [IPV6]:PORT")
    return bare, int(port)


def check_address(address: str) -> None:
    """Raise AddressError where `address` cannot be listened at now, AddressInUse where it is taken."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"cannot listen at {address}: {error.strerror or error}") from error
    failures = [failure for family, _, _, _, where in found if (failure := _bind_failure(family, where))]
    if any(failure.errno == errno.EADDRINUSE for failure in failures):
        raise _in_use(address)
    if len(failures) == len(found):
        raise AddressError(f"cannot listen at {address}: {failures[0].strerror}; is it an address of this machine?")


def _bind_failure(family: int, where: Any) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


def _in_use(address: str) -> AddressInUse:
    return AddressInUse(f"{address} is in use; choose another port with --address, or stop what listens there")


def _merged(deltas: Sequence[Delta]) -> Delta:
    """One delta in place of several of one choice."""
    return Delta(
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        deltas[-1].finish,
        tuple(one for delta in deltas for one in delta.logprobs),
        tuple(one for delta in deltas for one in delta.prompt_logprobs),
    )


class _Outbox:
    """The deltas of a call's choices on their way to its client; what it has not taken yet is merged into one each.

    running: the choices that have not ended by themselves.
    """

    def __init__(self, choices: int) -> None:
        self.running = set(range(choices))
        self._waiting: dict[int, list[Delta]] = defaultdict(list)
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, index: int, delta: Delta) -> None:
        if delta.finish is not None:
            self.running.discard(index)
        # Nothing comes after an error.
        if self._error is None:
            self._waiting[index].append(delta)
            self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._ready.set()

    async def take(self) -> list[tuple[int, Delta]]:
        """All that came in since, by choice; waits for something, and is empty once all has been taken.

        Raises what `fail` was given, after all that came before.
        """
        await self._ready.wait()
        taken, self._waiting = sorted(self._waiting.items()), defaultdict(list)
        if not taken and self._error is not None:
            raise self._error
        if self.running and self._error is None:
            self._ready.clear()
        return [(index, _merged(deltas)) for index, deltas in taken]


class _Health:
    """The health service's answer: SERVING while the backend really generates."""

    def __init__(self, backend: Backend, settings: GatewaySettings) -> None:
        self.servicer = health.aio.HealthServicer()
        self._backend, self._settings = backend, settings
        self._suspect = asyncio.Event()
        self._usable = True
        self._alive_at = time.monotonic()

    def alive(self) -> None:
        """A token came."""
        self._alive_at = time.monotonic()

    def suspect(self) -> None:
        """The backend said that it cannot serve."""
        self._suspect.set()

    async def watch(self) -> None:
        """Keep the answer true, for ever."""
        await self._set(True)
        while True:
            try:
                await asyncio.wait_for(self._suspect.wait(), self._settings.probe_every)
                await self._set(False)
            except TimeoutError:
                pass
            quiet = time.monotonic() - self._alive_at >= self._settings.probe_every
            if quiet or not self._usable or self._suspect.is_set():
                self._suspect.clear()
                await self._set(await self._probe())

    async def _set(self, usable: bool) -> None:
        self._usable = usable
        status = health_pb2.HealthCheckResponse.SERVING if usable else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self.servicer.set(service, status)

    async def _probe(self) -> bool:
        """Whether one plain token can be had; being too busy for it is no fault."""
        request = Request(f"probe-{uuid.uuid4().hex}", (0,), Sampling(), 1, speculation=Speculation("plain", 1))
        try:
            async with (
                asyncio.timeout(self._settings.probe_timeout),
                aclosing(self._backend.generate(request)) as stream,
            ):
                async for delta in stream:
                    if delta.finish is not None:
                        return delta.finish.reason != "error" or delta.finish.code == "exhausted"
            log.warning("the backend is not usable: a probe's stream ended without a finish")
        except TimeoutError:
            log.warning("the backend is not usable: no token within %g s", self._settings.probe_timeout)
        except Exception as error:
            log.warning("the backend is not usable: %s", error)
        return False


@dataclass(slots=True)
class _Call:
    """A call of Generate.  pumps: who takes the deltas of its choices."""

    choices: list[Request]
    outbox: _Outbox
    pumps: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.choices[0].id


class _Servicer(pb_grpc.GenerationServiceServicer):
    def __init__(self, backend: Backend, codec: Codec, watch: _Health, settings: GatewaySettings) -> None:
        self._backend, self._codec, self._health, self._settings = backend, codec, watch, settings
        # One thread: a long prompt must not hold up the streams, and tokenizers need not be safe to share.
        self._tokenizer = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        # Tops of twenty tokens each would take more time to decode than to compute.
        self._piece = lru_cache(_PIECES)(codec.piece)
        self._running: set[str] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._releases: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait until all calls have ended and their requests are cancelled."""
        # A stopped server has told its calls to end; when they do is theirs.
        for tasks in (self._calls, self._releases):
            if tasks:
                await asyncio.wait(tasks, timeout=2 * _RELEASE_TIMEOUT)
        self._tokenizer.shutdown(wait=False, cancel_futures=True)

    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:  # noqa: N802
        model = self._backend.model
        return pb.GetModelResponse(
            target=model.target,
            drafters=model.drafters,
            dtype=model.dtype,
            context_length=model.context_length,
            vocab_size=model.vocab_size,
            has_chat_template=self._codec.has_chat_template,
            default_schedule=model.speculation.schedule,
            schedules=SCHEDULE_NAMES,
            default_k=model.speculation.k,
            max_k=MAX_K,
            default_fanout=model.speculation.fanout,
            max_fanout=MAX_FANOUT,
            default_width=model.speculation.width,
            max_width=MAX_WIDTH,
            default_budget=model.speculation.budget,
            max_budget=MAX_BUDGET,
            default_max_tokens=min(model.default_max_tokens, model.context_length),
            has_response_format=self._codec.has_grammars,
        )

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # noqa: N802
        self._note_call()
        try:
            await self._generate(request, context)
            return
        except Invalid as error:
            code, detail = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except BackendError as error:
            self._health.suspect()
            code, detail = grpc.StatusCode.UNAVAILABLE, f"the model cannot be reached: {error}"
        except _Failed as error:
            code, detail = error.code, str(error)
        except Exception as error:
            log.exception("a call failed")
            code, detail = grpc.StatusCode.INTERNAL, f"unexpected {type(error).__name__}; the server's log says more"
        await context.abort(code, detail[:_MAX_DETAIL])

    def _note_call(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _generate(self, proto: pb.GenerateRequest, context: _Context) -> None:
        choices = await self._admit(proto)
        outbox = _Outbox(len(choices))
        call = _Call(choices, outbox)
        try:
            call.pumps = [asyncio.create_task(self._pump(call, index)) for index in range(len(choices))]
            while taken := await outbox.take():
                for index, delta in taken:
                    await self._deliver(context, call, index, delta)
        finally:
            await self._release(call)

    async def _deliver(self, context: _Context, call: _Call, index: int, delta: Delta) -> None:
        finish = delta.finish
        if finish is not None and finish.reason == "error":
            delta = replace(delta, finish=None)
        if delta.token_ids or delta.text or delta.finish:
            await self._write(context, await self._built(call, index, delta))
        if finish is not None:
            _raise_failure(finish)

    async def _admit(self, proto: pb.GenerateRequest) -> list[Request]:
        loop = asyncio.get_running_loop()
        args = (proto, self._codec, self._backend.model, lambda: uuid.uuid4().hex, lambda: secrets.randbits(64))
        request = await loop.run_in_executor(self._tokenizer, check, *args)
        if request.id in self._running:
            reason = f"request_id: {request.id!r} is running already; choose another, or leave it out"
            raise _Failed(grpc.StatusCode.ALREADY_EXISTS, reason)
        self._running.add(request.id)
        return choices(proto, request)

    async def _pump(self, call: _Call, index: int) -> None:
        """Take a choice's deltas from the backend as fast as they come, however slow the client is."""
        outbox = call.outbox
        try:
            async with aclosing(self._backend.generate(call.choices[index])) as stream:
                async for delta in stream:
                    self._health.alive()
                    outbox.put(index, delta)
                    if delta.finish is not None:
                        if not outbox.running:
                            # Before the client can know of the end, and use the id again.
                            self._running.discard(call.id)
                        return
            outbox.fail(_Failed(grpc.StatusCode.INTERNAL, "the answer broke off"))
        except Exception as error:
            outbox.fail(error)

    async def _write(self, context: _Context, response: pb.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._settings.stall):
                await context.write(response)
        except TimeoutError:
            reason = f"the client took nothing for {self._settings.stall:g} s"
            raise _Failed(grpc.StatusCode.ABORTED, reason) from None

    async def _built(self, call: _Call, index: int, delta: Delta) -> pb.GenerateResponse:
        if not delta.prompt_logprobs:
            return self._response(call, index, delta)
        # There may be thousands of them, and other streams shall go on meanwhile.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizer, self._response, call, index, delta)

    def _response(self, call: _Call, index: int, delta: Delta) -> pb.GenerateResponse:
        response = pb.GenerateResponse(
            text=delta.text,
            token_ids=delta.token_ids,
            index=index,
            logprobs=map(self._logprobs, delta.logprobs),
            prompt_logprobs=map(self._logprobs, delta.prompt_logprobs),
        )
        if delta.finish is not None:
            response.finish.CopyFrom(_finish(delta.finish, call))
        return response

    def _logprobs(self, one: TokenLogprobs) -> pb.TokenLogprobs:
        top = [pb.TopLogprob(token_id=id, token=self._piece(id), logprob=logprob) for id, logprob in one.top]
        return pb.TokenLogprobs(token_id=one.token, token=self._piece(one.token), logprob=one.logprob, top=top)

    async def _release(self, call: _Call) -> None:
        """Free what the call holds.  A task of its own: the call may be cancelled again while it runs."""
        task = asyncio.create_task(self._free(call))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        await asyncio.shield(task)

    async def _free(self, call: _Call) -> None:
        running = sorted(call.outbox.running)
        await asyncio.gather(*(self._cancel(call.choices[index].id) for index in running))
        # Only now: nobody may use the ids while the cancel is under way.
        for index in running:
            if index < len(call.pumps):
                call.pumps[index].cancel()
        if call.pumps:
            await asyncio.wait(call.pumps, timeout=_RELEASE_TIMEOUT)
        # Where all had ended by themselves the id has been free for long, and may be another call's.
        if call.outbox.running:
            self._running.discard(call.id)

    async def _cancel(self, id: str) -> None:
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await self._backend.cancel(id)
        except Exception as error:
            log.warning("request %s could not be cancelled: %r", id, error)


def _raise_failure(finish: Finish) -> None:
    """End the call where one of its choices did not end well."""
    if finish.reason == "cancelled":
        raise _Failed(grpc.StatusCode.UNAVAILABLE, "the server ended the request before its time")
    if finish.reason == "error":
        raise _Failed(_CODES.get(finish.code, grpc.StatusCode.INTERNAL), finish.error or "the request failed")


def _finish(finish: Finish, call: _Call) -> pb.Finish:
    stats = finish.stats
    return pb.Finish(
        finish_reason=_REASONS[finish.reason],
        seed=call.choices[0].sampling.seed,
        usage=pb.Usage(prompt_tokens=finish.prompt_tokens, completion_tokens=finish.completion_tokens),
        speculation=pb.SpeculationStats(
            schedule=stats.schedule,
            drafted=stats.drafted,
            accepted=stats.accepted,
            verify_passes=stats.verify_passes,
            acceptance_length=finish.acceptance_length,
            hits=stats.hits,
            waited_seconds=stats.waited,
            positions=[pb.PositionStats(drafted=drafted, accepted=accepted) for drafted, accepted in stats.positions],
        ),
        request_id=call.id,
    )


class RunningGateway:
    """A server that takes calls.  port: where it listens; stop it before the backend goes."""

    def __init__(self, server: grpc.aio.Server, servicer: _Servicer, watch: _Health, address: str, port: int) -> None:
        self.port = port
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server, self._servicer, self._health = server, servicer, watch
        self._watcher = asyncio.create_task(watch.watch())

    async def stop(self, grace: float = 0.0) -> None:
        """Take no more calls, let the running ones go on for `grace` seconds, then cancel them.

        A second call with less grace cuts the first one short.
        """
        self._watcher.cancel()
        await self._health.servicer.enter_graceful_shutdown()
        await self._server.stop(grace)
        await self._servicer.close()


async def serve(
    backend: Backend, codec: Codec, address: str, settings: GatewaySettings | None = None
) -> RunningGateway:
    """Serve `backend` at "HOST:PORT"; port 0 takes a free one.  Raises AddressError."""
    check_address(address)
    settings = settings or GatewaySettings()
    watch = _Health(backend, settings)
    servicer = _Servicer(backend, codec, watch, settings)
    server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=settings.max_calls)
    pb_grpc.add_GenerationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(watch.servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise _in_use(address) from error
    await server.start()
    return RunningGateway(server, servicer, watch, address, port)
