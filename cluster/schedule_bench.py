"""`paceline bench schedules`: the schedules side by side, on the same prompts, in one run on one cell."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.actors.text import TextCodec
from paceline.actors.values import Request, Sampling, Speculation
from paceline.cluster.backend import Backend

Progress = Callable[[str], None]

# Half of them leave the words to the model, half ask it to repeat or vary what is given, where drafting is easier.
PROMPTS = (
    "Why is the sky blue?",
    "Give me three tips for sleeping better.",
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain what a hash table is to a beginner.",
    "Repeat this sentence five times: The early train to the coast leaves at half past six.",
    "List the numbers from one to thirty, in words.",
    "Rewrite in the past tense: She opens the door, looks outside, calls the dog, closes the door and sits down.",
    "Write a Python class Point with fields x, y and z, and methods add_x, add_y and add_z that each add to one field.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one schedule did over all prompts.

    seconds: from request to finish, summed.  differing: answers that are not the first schedule's.
    """

    schedule: str
    tokens: int
    seconds: float
    passes: int
    drafted: int
    accepted: int
    differing: int

    @property
    def rate(self) -> float:
        """Tokens per second at batch 1, prefill included."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify pass."""
        return self.tokens / self.passes


async def measure(
    backend: Backend, codec: TextCodec, schedules: Sequence[str], k: int, tokens: int, progress: Progress
) -> list[Row]:
    """Run every prompt under every schedule, one at a time, in turns, so that slow minutes fall on all alike.

    Raises RuntimeError when a request fails.
    """
    prompts = [codec.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    answers: dict[tuple[str, int], tuple[int, ...]] = {}
    sums = {schedule: Counter[str]() for schedule in schedules}
    seconds = dict.fromkeys(schedules, 0.0)
    for i, prompt in enumerate(prompts):
        # Each prompt begins with another schedule, lest one of them always come first.
        for schedule in (*schedules[i % len(schedules) :], *schedules[: i % len(schedules)]):
            progress(f"prompt {i + 1} of {len(prompts)}, {schedule}")
            request = Request(
                f"bench-{i}-{schedule}",
                prompt,
                Sampling(),
                tokens,
                ignore_eos=True,
                speculation=Speculation(schedule, k),
            )
            started = time.perf_counter()
            answers[schedule, i] = await _answer(backend, request, sums[schedule])
            seconds[schedule] += time.perf_counter() - started
    differing = {s: sum(answers[s, i] != answers[schedules[0], i] for i in range(len(prompts))) for s in schedules}
    return [_row(schedule, sums[schedule], seconds[schedule], differing[schedule]) for schedule in schedules]


async def _answer(backend: Backend, request: Request, sums: Counter[str]) -> tuple[int, ...]:
    ids: list[int] = []
    async for delta in backend.generate(request):
        ids += delta.token_ids
        if delta.finish is not None:
            if delta.finish.reason == "error":
                raise RuntimeError(f"{request.id}: {delta.finish.error}")
            stats = delta.finish.stats
            sums.update(tokens=len(ids), passes=stats.verify_passes, drafted=stats.drafted, accepted=stats.accepted)
    return tuple(ids)


def _row(schedule: str, sums: Counter[str], seconds: float, differing: int) -> Row:
    return Row(schedule, sums["tokens"], seconds, sums["passes"], sums["drafted"], sums["accepted"], differing)


def render(rows: Sequence[Row]) -> str:
    """The rows as a table; ratios are to the first of them."""
    head = "schedule  tokens/s  ratio  acceptance length  drafted  accepted  differing"
    lines = [
        f"{row.schedule:<8}  {row.rate:8.2f}  {row.rate / rows[0].rate:5.2f}  {row.acceptance_length:17.2f}  "
        f"{row.drafted:7d}  {row.accepted:8d}  {row.differing:9d}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def run(backend: Backend, codec: TextCodec, k: int, tokens: int, progress: Progress) -> str:
    """Measure plain, sync and amusd, and return the table."""
    return render(asyncio.run(measure(backend, codec, ("plain", "sync", "amusd"), k, tokens, progress)))
