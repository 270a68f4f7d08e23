"""What the tests with real cells share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from paceline.actors.values import Finish, Request, Sampling, Speculation

PROMPTS = (
    "Write the numbers from one to ten as words, three times.",
    "Repeat after me: the rain in Spain stays mainly in the plain. The rain in Spain",
    "Why is the sky blue?",
)


def requests(cell: Any, schedule: str, tokens: int = 40, temperature: float = 0.0, tag: str = "") -> list[Request]:
    return [
        Request(
            f"{schedule}-{temperature}-{i}{tag}",
            cell.codec.encode_chat([{"role": "user", "content": prompt}]),
            Sampling(temperature, seed=11 + i),
            tokens,
            ignore_eos=True,
            speculation=Speculation(schedule, 4),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


async def answer(cell: Any, request: Request, on_token: Callable[[int], None] = lambda _: None) -> tuple[Any, Finish]:
    ids: list[int] = []
    async for delta in cell.backend.generate(request):
        ids += delta.token_ids
        on_token(len(ids))
        if delta.finish is not None:
            return tuple(ids), delta.finish
    raise AssertionError("the stream ended without a finish")


async def answers(cell: Any, requests: list[Request]) -> list[tuple[Any, Finish]]:
    return await asyncio.gather(*(answer(cell, request) for request in requests))


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)
