"""A client of the gateway, with errors in plain words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from paceline.cluster.gateway import CHANNEL_OPTIONS, split_address
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc as pb_grpc

CONNECT_TIMEOUT = 10.0


class CallError(RuntimeError):
    """A call failed.  wrong: because of the request, so that sending it again is of no use."""

    def __init__(self, message: str, wrong: bool = False) -> None:
        super().__init__(message)
        self.wrong = wrong


class Client:
    """Calls one gateway.  Get one from `connect`."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = pb_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        self._address = address

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        """The responses to a request, the last one of each choice with its finish.  Raises CallError."""
        left = request.n or 1
        try:
            async for response in self._stub.Generate(request):
                left -= response.HasField("finish")
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        if left:
            raise CallError("the server's answer broke off")

    async def model(self) -> pb.GetModelResponse:
        """What is served.  Raises CallError."""
        try:
            return await self._stub.GetModel(pb.GetModelRequest(), timeout=CONNECT_TIMEOUT)  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error

    def _explain(self, error: grpc.aio.AioRpcError) -> CallError:
        code, detail = error.code(), error.details() or ""
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return CallError(detail, wrong=True)
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return CallError(f"what answers at {self._address} is no paceline server of this version")
        return CallError(f"{detail or 'the call failed'} ({code.name})")


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[Client]:
    """A client of the gateway at "HOST:PORT".  Raises CallError if nothing answers there, AddressError."""
    split_address(address)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                reached = await _reached(channel)
        except TimeoutError:
            reached = False
        if not reached:
            raise CallError(f"nothing answers at {address}; is `paceline up` running there?")
        yield Client(channel, address)


async def _reached(channel: grpc.aio.Channel) -> bool:
    """Whether the first try to connect succeeds; a call's own error would not tell this from a server's."""
    state = channel.get_state(try_to_connect=True)
    while state not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return state is grpc.ChannelConnectivity.READY
