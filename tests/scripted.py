"""A backend that does what a test says, and a codec whose tokens are bytes: the gateway without models."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from paceline.actors.values import Delta, Finish, Request, Speculation, Stats
from paceline.cluster.backend import BackendError, ModelInfo

MODEL = ModelInfo("tiny", ("ngram",), "float32", 64, 300, Speculation("auto", 4))
Script = Callable[[Request], AsyncIterator[Delta]]


class ByteCodec:
    """One token per byte; a chat is "<role>content" per message."""

    vocab_size = 256
    longest_token = 200
    has_chat_template = True
    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    encode_part = encode

    has_grammars = True

    def check_grammar(self, grammar: str) -> None:
        if "refused" in grammar:
            raise ValueError("it says refused")

    def piece(self, token: int) -> str:
        return chr(token)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        if messages[0]["role"] == "assistant":
            raise ValueError("the conversation must not begin with the assistant")
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


def finish(request: Request, completion: int, reason: Any = "stop", **rest: Any) -> Finish:
    name, positions = request.speculation.schedule, ((5, 2), (3, 0))
    stats = Stats(name, drafted=8, accepted=2, verify_passes=3, hits=1, waited=0.25, positions=positions)
    return Finish(reason, len(request.prompt), completion, request.sampling.seed, stats, **rest)


async def hello(request: Request) -> AsyncIterator[Delta]:
    yield Delta((1, 2), "héllo")
    yield Delta((3,), "")
    yield Delta((4, 5, 6), " wörld", finish(request, 6))


async def endless(request: Request) -> AsyncIterator[Delta]:
    yield Delta((1,), "first")
    await asyncio.Event().wait()


class ScriptedBackend:
    """Runs `script` for every request.  cancelled, closed: the ids of those that were, as they are.

    down: every request raises BackendError, as does the probe.
    """

    def __init__(self, script: Script = hello, model: ModelInfo = MODEL) -> None:
        self.script, self.model, self.down = script, model, False
        self.requests: list[Request] = []
        self.cancelled: asyncio.Queue[str] = asyncio.Queue()
        self.closed: asyncio.Queue[str] = asyncio.Queue()

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        if self.down:
            raise BackendError("the verifier is gone")
        if request.id.startswith("probe-"):
            yield Delta((1,), "", finish(request, 1, "length"))
            return
        self.requests.append(request)
        try:
            async for delta in self.script(request):
                yield delta
        finally:
            self.closed.put_nowait(request.id)

    async def cancel(self, request_id: str) -> None:
        self.cancelled.put_nowait(request_id)


def with_loop(seconds: float = 30) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Makes a coroutine a test, with a deadline on all it waits for."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            async def bounded() -> None:
                async with asyncio.timeout(seconds):
                    await test(*args, **kwargs)

            asyncio.run(bounded())

        return run

    return decorate
