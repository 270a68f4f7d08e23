"""The gateway over real connections: what clients see, and what the backend is told when they go."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from paceline.actors.schedules import SCHEDULES
from paceline.actors.values import Delta, Request, Speculation, TokenLogprobs
from paceline.cluster.gateway import (
    CHANNEL_OPTIONS,
    SERVICE,
    AddressError,
    AddressInUse,
    GatewaySettings,
    RunningGateway,
    serve,
)
from paceline.cluster.requests import derived_seed
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc as pb_grpc
from scripted import MODEL, ByteCodec, ScriptedBackend, endless, finish, hello, with_loop

HI = pb.GenerateRequest(text="hi")


@asynccontextmanager
async def served(
    backend: ScriptedBackend, options=CHANNEL_OPTIONS, **settings: float
) -> AsyncIterator[tuple[RunningGateway, grpc.aio.Channel, pb_grpc.GenerationServiceStub]]:
    gateway = await serve(backend, ByteCodec(), "127.0.0.1:0", GatewaySettings(**settings))
    try:
        async with grpc.aio.insecure_channel(gateway.address, options=options) as channel:
            yield gateway, channel, pb_grpc.GenerationServiceStub(channel)
    finally:
        await gateway.stop()


async def read(call) -> list[pb.GenerateResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def status(call) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with; it must not be OK."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    return caught.value.code(), caught.value.details()


# Choices, log-probabilities, what cannot be

LIKELY = TokenLogprobs(65, -0.5, ((65, -0.5), (66, -1.5)))


async def three(request: Request) -> AsyncIterator[Delta]:
    """A choice whose length is its index; the later ones are the faster ones."""
    index = int(request.id.partition("#")[2] or 0)
    for _ in range(3 - index):
        await asyncio.sleep(0)
    yield Delta((65,), f"{index}", logprobs=(LIKELY,), prompt_logprobs=(LIKELY, LIKELY) if index == 0 else ())
    yield Delta((66,) * index, "b" * index, finish(request, 1 + index), logprobs=(LIKELY,) * index)


@with_loop()
async def test_every_choice_comes_whole_with_its_index():
    backend = ScriptedBackend(three)
    async with served(backend) as (_, _, stub):
        wanted = pb.GenerateRequest(text="hi", n=4, sampling=pb.SamplingOptions(seed=5), request_id="mine")
        responses = await read(stub.Generate(wanted))
        # The id is free again.
        await read(stub.Generate(wanted))
    texts = {i: "".join(r.text for r in responses if r.index == i) for i in range(4)}
    assert texts == {i: f"{i}{'b' * i}" for i in range(4)}
    ends = {r.index: r.finish for r in responses if r.HasField("finish")}
    assert {i: end.usage.completion_tokens for i, end in ends.items()} == {i: 1 + i for i in range(4)}
    assert {(end.seed, end.request_id) for end in ends.values()} == {(5, "mine")}
    assert [r.sampling.seed for r in backend.requests[:4]] == [derived_seed(5, i) for i in range(4)]
    assert backend.cancelled.empty()


@with_loop()
async def test_log_probabilities_come_with_their_tokens():
    async with served(ScriptedBackend(three)) as (_, _, stub):
        responses = await read(stub.Generate(HI))
    (one,) = [one for response in responses for one in response.logprobs]
    assert (one.token_id, one.token, one.logprob) == (65, "A", -0.5)
    assert [(top.token_id, top.token, top.logprob) for top in one.top] == [(65, "A", -0.5), (66, "B", -1.5)]
    assert [len(response.prompt_logprobs) for response in responses if response.prompt_logprobs] == [2]


@with_loop()
async def test_one_choice_that_fails_ends_the_call_and_the_others():
    async def second_fails(request: Request) -> AsyncIterator[Delta]:
        if request.id.endswith("#1"):
            yield Delta((1,), "x")
            yield Delta((), "y", finish(request, 1, "error", error="response_format: no way on", code="invalid"))
        else:
            await asyncio.Event().wait()

    backend = ScriptedBackend(second_fails)
    async with served(backend) as (_, _, stub):
        call = stub.Generate(pb.GenerateRequest(text="hi", n=3, request_id="mine"))
        assert await status(call) == (grpc.StatusCode.INVALID_ARGUMENT, "response_format: no way on")
        assert {await backend.cancelled.get() for _ in range(2)} == {"mine", "mine#2"}
        backend.script = hello
        await read(stub.Generate(pb.GenerateRequest(text="hi", request_id="mine")))


@with_loop()
async def test_a_client_that_goes_ends_every_choice():
    backend = ScriptedBackend(endless)
    async with served(backend) as (_, _, stub):
        call = stub.Generate(pb.GenerateRequest(text="hi", n=3, request_id="mine"))
        await call.read()
        call.cancel()
        assert {await backend.cancelled.get() for _ in range(3)} == {"mine", "mine#1", "mine#2"}
        assert {await backend.closed.get() for _ in range(3)} == {"mine", "mine#1", "mine#2"}


@with_loop()
async def test_a_field_of_a_newer_api_is_refused():
    newer = pb.GenerateRequest.FromString(HI.SerializeToString() + b"\xa2\x06\x01A")
    async with served(ScriptedBackend()) as (_, _, stub):
        code, why = await status(stub.Generate(newer))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert why.startswith("request: its field number 100 is not known")


# Answers


@with_loop()
async def test_an_answer_is_streamed_and_its_last_message_tells_how_it_ended():
    backend = ScriptedBackend()
    async with served(backend) as (_, _, stub):
        request = pb.GenerateRequest(text="hi", sampling=pb.SamplingOptions(seed=2**64 - 1), request_id="mine")
        responses = await read(stub.Generate(request))
    assert "".join(response.text for response in responses) == "héllo wörld"
    assert [token for response in responses for token in response.token_ids] == [1, 2, 3, 4, 5, 6]
    assert [response.HasField("finish") for response in responses[:-1]] == [False] * (len(responses) - 1)
    end = responses[-1].finish
    assert end == pb.Finish(
        finish_reason=pb.FINISH_REASON_STOP,
        seed=2**64 - 1,
        usage=pb.Usage(prompt_tokens=2, completion_tokens=6),
        speculation=pb.SpeculationStats(
            schedule="auto",
            drafted=8,
            accepted=2,
            verify_passes=3,
            acceptance_length=2.0,
            hits=1,
            waited_seconds=0.25,
            positions=[pb.PositionStats(drafted=5, accepted=2), pb.PositionStats(drafted=3)],
        ),
        request_id="mine",
    )
    assert backend.cancelled.empty()


@with_loop()
async def test_deltas_arrive_while_the_answer_still_runs():
    async with served(ScriptedBackend(endless)) as (_, _, stub):
        call = stub.Generate(HI)
        assert (await call.read()).text == "first"
        call.cancel()


@with_loop()
async def test_what_a_request_leaves_out_is_drawn_and_returned():
    backend = ScriptedBackend()
    async with served(backend) as (_, _, stub):
        ends = [(await read(stub.Generate(HI)))[-1].finish for _ in range(2)]
    assert [(end.seed, end.request_id) for end in ends] == [(r.sampling.seed, r.id) for r in backend.requests]
    assert ends[0].seed != ends[1].seed
    assert ends[0].request_id != ends[1].request_id


@with_loop()
async def test_get_model_tells_what_is_served():
    async with served(ScriptedBackend()) as (_, _, stub):
        model = await stub.GetModel(pb.GetModelRequest())
    assert (model.target, model.dtype, model.context_length) == ("tiny", "float32", 64)
    assert (model.drafters, model.vocab_size, model.has_chat_template) == (["ngram"], 300, True)
    assert (model.default_schedule, model.schedules) == ("auto", [*SCHEDULES, "auto"])
    assert (model.default_k, model.default_fanout, model.default_width, model.default_budget) == (4, 3, 4, 12)
    assert (model.default_max_tokens, model.has_response_format) == (64, True)
    assert (model.max_k, model.max_fanout, model.max_width, model.max_budget) == (32, 8, 16, 64)


@with_loop()
async def test_every_number_of_a_schedule_reaches_the_backend():
    backend = ScriptedBackend()
    async with served(backend) as (_, _, stub):
        wanted = pb.SpeculationOptions(schedule="swiftspec", k=2, fanout=5, width=6, budget=7)
        end = (await read(stub.Generate(pb.GenerateRequest(text="hi", speculation=wanted))))[-1].finish.speculation
    assert backend.requests[0].speculation == Speculation("swiftspec", 2, 5, 6, 7)
    assert end.schedule == "swiftspec"


@with_loop()
async def test_streams_run_side_by_side():
    both = asyncio.Barrier(2)

    async def meeting(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), f"{request.id} ")
        await both.wait()
        yield Delta((2,), request.id, finish(request, 2))

    async with served(ScriptedBackend(meeting)) as (_, _, stub):
        calls = [stub.Generate(pb.GenerateRequest(text="hi", request_id=name)) for name in ("a", "b")]
        answers = await asyncio.gather(*map(read, calls))
    assert ["".join(response.text for response in answer) for answer in answers] == ["a a", "b b"]


@with_loop()
async def test_a_request_id_is_free_again_as_soon_as_its_answer_ended():
    async with served(ScriptedBackend()) as (_, _, stub):
        for _ in range(20):
            await read(stub.Generate(pb.GenerateRequest(text="hi", request_id="same")))


# Errors


@with_loop()
async def test_a_wrong_request_is_refused_naming_the_field_and_never_reaches_the_backend():
    backend = ScriptedBackend()
    async with served(backend) as (_, _, stub):
        wrong = pb.GenerateRequest(text="hi", sampling=pb.SamplingOptions(top_p=1.5))
        code, detail = await status(stub.Generate(wrong))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert detail.startswith("sampling.top_p: must be above 0 and at most 1, got 1.5")
    assert not backend.requests


@with_loop()
async def test_a_refusal_stays_short_however_long_what_it_refuses():
    async with served(ScriptedBackend()) as (_, _, stub):
        messages = [pb.ChatMessage(role="\u6f22" * 100_000, content="hi")]
        code, detail = await status(stub.Generate(pb.GenerateRequest(chat=pb.ChatInput(messages=messages))))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert detail.startswith("chat.messages[0].role: must be one of")


@with_loop()
async def test_a_prompt_of_five_megabytes_gets_through_to_the_check():
    async with served(ScriptedBackend()) as (_, _, stub):
        code, detail = await status(stub.Generate(pb.GenerateRequest(text="x" * 5_000_000)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert detail.startswith("text: 5000000 characters are more than 64 tokens can hold")


@with_loop()
async def test_a_running_id_is_refused_and_the_running_request_goes_on():
    go_on = asyncio.Event()

    async def waiting(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "first")
        await go_on.wait()
        yield Delta((2,), "second", finish(request, 2))

    backend = ScriptedBackend(waiting)
    async with served(backend) as (_, _, stub):
        request = pb.GenerateRequest(text="hi", request_id="mine")
        first = stub.Generate(request)
        await first.read()
        code, detail = await status(stub.Generate(request))
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert "request_id" in detail
        go_on.set()
        assert (await first.read()).text == "second"
    assert backend.cancelled.empty()


@pytest.mark.parametrize(
    ("rest", "code", "detail"),
    [
        ({"error": "the queue is full", "code": "exhausted"}, "RESOURCE_EXHAUSTED", "the queue is full"),
        ({"error": "no finite maximum", "code": "bad_logits"}, "INTERNAL", "no finite maximum"),
        ({"error": "ValueError: oh"}, "INTERNAL", "ValueError: oh"),
        ({}, "INTERNAL", "the request failed"),
    ],
)
@with_loop()
async def test_an_error_of_the_backend_becomes_a_status(rest, code, detail):
    async def failing(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "part", finish(request, 1, "error", **rest))

    async with served(ScriptedBackend(failing)) as (_, _, stub):
        call = stub.Generate(HI)
        assert (await call.read()).text == "part"
        assert await status(call) == (grpc.StatusCode[code], detail)


@with_loop()
async def test_an_answer_that_the_server_ends_says_so_and_is_no_success():
    async def ended(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "part", finish(request, 1, "cancelled"))

    async with served(ScriptedBackend(ended)) as (_, _, stub):
        call = stub.Generate(HI)
        response = await call.read()
        assert (response.text, response.finish.finish_reason) == ("part", pb.FINISH_REASON_CANCELLED)
        assert (await status(call))[0] == grpc.StatusCode.UNAVAILABLE


@with_loop()
async def test_a_bug_becomes_a_short_status_and_a_logged_traceback(caplog):
    async def buggy(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "part")
        raise KeyError("secret")

    backend = ScriptedBackend(buggy)
    async with served(backend) as (_, _, stub):
        code, detail = await status(stub.Generate(HI))
        assert code == grpc.StatusCode.INTERNAL
        assert detail == "unexpected KeyError; the server's log says more"
        assert await backend.cancelled.get()
    assert "secret" in caplog.text
    assert "Traceback" in caplog.text


@with_loop()
async def test_a_stream_without_an_end_is_an_error():
    async def broken(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "part")

    async with served(ScriptedBackend(broken)) as (_, _, stub):
        call = stub.Generate(HI)
        assert (await call.read()).text == "part"
        assert await status(call) == (grpc.StatusCode.INTERNAL, "the answer broke off")


@with_loop()
async def test_a_backend_whose_cancel_fails_still_ends_the_call():
    class Stubborn(ScriptedBackend):
        async def cancel(self, request_id: str) -> None:
            raise RuntimeError("no")

    backend = Stubborn(endless)
    async with served(backend) as (_, _, stub):
        call = stub.Generate(HI)
        await call.read()
        call.cancel()
        assert await backend.closed.get() == backend.requests[0].id


# Clients that go


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
@with_loop()
async def test_a_client_that_goes_cancels_its_request(how):
    backend = ScriptedBackend(endless)
    async with served(backend) as (gateway, _, _):
        async with grpc.aio.insecure_channel(gateway.address) as own:
            stub = pb_grpc.GenerationServiceStub(own)
            call = stub.Generate(HI, timeout=0.5 if how == "deadline" else None)
            assert (await call.read()).text == "first"
            if how == "cancel":
                call.cancel()
            elif how == "deadline":
                assert (await status(call))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                await own.close()
            assert await backend.cancelled.get() == backend.requests[0].id
            assert await backend.closed.get() == backend.requests[0].id
        assert backend.cancelled.empty()


@with_loop()
async def test_a_cancelled_request_that_has_no_token_yet_is_cancelled_too():
    started = asyncio.Event()

    async def prefilling(request: Request) -> AsyncIterator[Delta]:
        started.set()
        await asyncio.Event().wait()
        yield Delta((1,), "")

    backend = ScriptedBackend(prefilling)
    async with served(backend) as (_, _, stub):
        call = stub.Generate(HI)
        await started.wait()
        call.cancel()
        assert await backend.cancelled.get() == backend.requests[0].id


async def flood(request: Request) -> AsyncIterator[Delta]:
    """Far more than connections buffer."""
    for index in range(100):
        yield Delta((index,), f"{index:06d}" * 20_000)
        await asyncio.sleep(0)
    yield Delta((), "", finish(request, 100))


@with_loop()
async def test_a_slow_reader_holds_up_neither_its_request_nor_others_and_loses_nothing():
    backend = ScriptedBackend(flood)
    async with served(backend) as (_, _, stub):
        slow = stub.Generate(HI)
        responses = [await slow.read()]
        await backend.closed.get()
        backend.script = hello
        assert len(await read(stub.Generate(HI))) <= 3
        responses += await read(slow)
    assert "".join(r.text for r in responses) == "".join(f"{index:06d}" * 20_000 for index in range(100))
    assert [token for r in responses for token in r.token_ids] == list(range(100))
    assert len(responses) < 100, "what waited was merged"
    assert backend.cancelled.empty()


@with_loop()
async def test_a_client_that_reads_nothing_loses_its_call():
    async def torrent(request: Request) -> AsyncIterator[Delta]:
        while True:
            yield Delta((1,), "x" * 1_000_000)
            await asyncio.sleep(0.01)

    backend = ScriptedBackend(torrent)
    async with served(backend, stall=0.5) as (_, _, stub):
        call = stub.Generate(HI)
        await call.read()
        assert await backend.cancelled.get() == backend.requests[0].id
        assert await status(call) == (grpc.StatusCode.ABORTED, "the client took nothing for 0.5 s")


@pytest.mark.slow
@with_loop(60)
async def test_a_quiet_client_that_pings_every_ten_seconds_is_not_sent_away():
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with served(ScriptedBackend(endless), options) as (_, _, stub):
        call = stub.Generate(HI)
        await call.read()
        # The third ping that comes too soon ends a connection: at 30 s, if ours did.
        end = asyncio.create_task(call.read())
        assert await asyncio.wait([end], timeout=35) == (set(), {end})
        call.cancel()
        end.cancel()


# Health, reflection, start and stop


async def check(stub: health_pb2_grpc.HealthStub, service: str = "") -> str:
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


@with_loop()
async def test_health_is_serving_while_the_backend_is_usable_and_only_then():
    backend = ScriptedBackend()
    async with served(backend, probe_every=0.05) as (_, channel, stub):
        health = health_pb2_grpc.HealthStub(channel)
        assert [await check(health, service) for service in ("", SERVICE)] == ["SERVING"] * 2
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        backend.down = True
        code, detail = await status(stub.Generate(HI))
        assert (code, "the verifier is gone" in detail) == (grpc.StatusCode.UNAVAILABLE, True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert [await check(health, service) for service in ("", SERVICE)] == ["NOT_SERVING"] * 2
        backend.down = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@with_loop()
async def test_health_recovers_under_steady_traffic():
    backend = ScriptedBackend()
    async with served(backend, probe_every=0.05) as (_, channel, stub):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        backend.down = True
        await status(stub.Generate(HI))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        backend.down = False

        async def traffic() -> None:
            while True:
                async for _ in stub.Generate(HI):
                    pass

        busy = asyncio.create_task(traffic())
        try:
            async with asyncio.timeout(20):
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        finally:
            busy.cancel()
        watch.cancel()


@with_loop()
async def test_health_finds_a_stuck_backend_without_any_request():
    class Stuck(ScriptedBackend):
        async def generate(self, request: Request) -> AsyncIterator[Delta]:
            await asyncio.Event().wait()
            yield Delta((), "")

    async with served(Stuck(), probe_every=0.01, probe_timeout=0.1) as (_, channel, _):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass
        watch.cancel()


@with_loop()
async def test_reflection_lists_the_services():
    async with served(ScriptedBackend()) as (_, channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asks = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, file = [answer async for answer in stub.ServerReflectionInfo(iter(asks))]
    assert {SERVICE, "grpc.health.v1.Health"} <= {s.name for s in listed.list_services_response.service}
    assert b"GenerateRequest" in file.file_descriptor_response.file_descriptor_proto[0]


@with_loop()
async def test_a_taken_port_is_an_error_that_names_it():
    async with served(ScriptedBackend()) as (gateway, _, _):
        with pytest.raises(AddressInUse, match=f"{gateway.address} is in use; choose another port"):
            await serve(ScriptedBackend(), ByteCodec(), gateway.address)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=address):
            await serve(ScriptedBackend(), ByteCodec(), address)


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", ":50051", "127.0.0.1:", "127.0.0.1:x", "[::1:5", "::1:5", "h:65536"]
)
@with_loop()
async def test_a_malformed_address_is_an_error_that_says_what_to_write(address):
    with pytest.raises(AddressError, match="write HOST:PORT"):
        await serve(ScriptedBackend(), ByteCodec(), address)


@with_loop()
async def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(AddressError, match="is it an address of this machine"):
        await serve(ScriptedBackend(), ByteCodec(), "192.0.2.1:50051")


@with_loop()
async def test_stopping_lets_running_calls_end_and_takes_no_new_ones():
    go_on = asyncio.Event()

    async def waiting(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "first")
        await go_on.wait()
        yield Delta((2,), "second", finish(request, 2))

    async with served(ScriptedBackend(waiting)) as (gateway, channel, stub):
        running = stub.Generate(HI)
        await running.read()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        stopping = asyncio.create_task(gateway.stop(20))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        assert (await status(stub.Generate(HI)))[0] == grpc.StatusCode.UNAVAILABLE
        go_on.set()
        assert (await running.read()).text == "second"
        await stopping


@with_loop()
async def test_stopping_without_grace_cancels_what_runs():
    backend = ScriptedBackend(endless)
    async with served(backend) as (gateway, _, stub):
        call = stub.Generate(HI)
        await call.read()
        slow = asyncio.create_task(gateway.stop(20))
        await gateway.stop()
        await slow
        assert backend.cancelled.get_nowait() == backend.requests[0].id
        assert (await status(call))[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@with_loop()
async def test_stopping_waits_for_calls_that_their_clients_have_just_cancelled():
    backend = ScriptedBackend(endless)
    async with served(backend) as (gateway, _, stub):
        calls = [stub.Generate(HI) for _ in range(4)]
        for call in calls:
            await call.read()
            call.cancel()
        await gateway.stop()
        assert {backend.cancelled.get_nowait() for _ in calls} == {request.id for request in backend.requests}


@with_loop()
async def test_a_model_without_a_chat_template_is_told():
    class Plain(ByteCodec):
        has_chat_template = False

    backend = ScriptedBackend(model=dataclasses.replace(MODEL, target="plain"))
    gateway = await serve(backend, Plain(), "127.0.0.1:0")
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        assert not (await stub.GetModel(pb.GetModelRequest())).has_chat_template
        messages = [pb.ChatMessage(role="user", content="hi")]
        code, detail = await status(stub.Generate(pb.GenerateRequest(chat=pb.ChatInput(messages=messages))))
    await gateway.stop()
    assert (code, detail[:5]) == (grpc.StatusCode.INVALID_ARGUMENT, "chat:")
