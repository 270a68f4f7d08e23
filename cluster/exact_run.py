"""`paceline verify-exact`: a cell answers prompts with drafts, then the target reads the answers and judges them."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.actors.device import Device, torch_dtype
from paceline.actors.exactness import Checked, Position, Report, default_margin, teacher_force
from paceline.actors.values import Request, Sampling, Speculation, Stats
from paceline.cluster.bench_prompts import Prompt
from paceline.cluster.bench_report import about, drafter_label
from paceline.cluster.bench_run import BenchCell, prompt_ids, streamed
from paceline.cluster.config import CellConfig
from paceline.cluster.models import Progress, resolve

Piece = Callable[[int], str]
"""The text of a token."""

_SEEDS = 1 << 64
_FEW = 0.05  # of all positions


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked.  seed: of the first prompt; each further one has the next.  batch: requests that run at once.

    margin: the largest one that is allowed, in nats of the processed scores; None for what the dtype explains.
    """

    prompts: tuple[Prompt, ...]
    speculation: Speculation
    temperature: float = 0.0
    seed: int = 0
    tokens: int = 64
    batch: int = 4
    margin: float | None = None

    def allowed(self, dtype: str) -> float:
        """The margin that is allowed in this dtype."""
        return default_margin(dtype, self.temperature) if self.margin is None else self.margin


@dataclass(frozen=True, slots=True)
class Answered:
    """A request, and what came of it."""

    request: Request
    tokens: tuple[int, ...]
    stats: Stats


def answer(cell: BenchCell, plan: Plan, progress: Progress) -> list[Answered]:
    """What a cell answers.  Raises MeasurementFailed and BackendError."""
    requests = [_request(cell, plan, number) for number in range(len(plan.prompts))]

    def ended(count: int) -> None:
        progress(f"answering, {count} of {len(requests)} prompts")

    answers = asyncio.run(streamed(cell.backend, requests, plan.batch, ended))
    return [
        Answered(request, answer.tokens, answer.stats or Stats(plan.speculation.schedule))
        for request, answer in zip(requests, answers, strict=True)
    ]


def _request(cell: BenchCell, plan: Plan, number: int) -> Request:
    sampling = Sampling(plan.temperature, seed=(plan.seed + number) % _SEEDS)
    prompt = prompt_ids(cell.codec, plan.prompts[number].text)
    return Request(f"exact-{number}", prompt, sampling, plan.tokens, speculation=plan.speculation)


def check(
    config: CellConfig, dtype: str, answered: Sequence[Answered], eos_ids: frozenset[int], progress: Progress
) -> Iterator[Checked]:
    """The answers, judged, one by one, by the config's target in this process, which settles on the device.

    Raises ModelError, and what load_engine raises.
    """
    directory = resolve(config.target, progress=progress).directory
    progress("loading the target once more")
    # Imported here, since it takes seconds.
    from paceline.actors.torch_engine import load_engine
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # ours is there
    device = Device.resolve(config.device)
    device.claim()
    room = max(len(one.request.prompt) + len(one.tokens) for one in answered)
    # Hardly any two passes have one shape, so none is worth recording.
    engine = load_engine(directory, device.torch, torch_dtype(dtype), room, graphs=False)
    for number, one in enumerate(answered):
        progress(f"reading again, {number} of {len(answered)} answers")
        yield Checked(number, tuple(teacher_force(engine, one.request, one.tokens, eos_ids)), one.stats)


def describe(answer: Checked, piece: Piece) -> str:
    """A line for each position of an answer that differs."""
    return "".join(f"prompt {answer.prompt}, {_described(position, piece)}\n" for position in answer.differing)


def _described(position: Position, piece: Piece) -> str:
    came = f"position {position.index}: {_quoted(position.emitted, piece)} came"
    if position.preferred is None:
        return f"{came}, but nothing can: {position.fault}"
    preferred = f"{came}, {_quoted(position.preferred, piece)} is preferred"
    return f"{preferred}: {position.fault}" if position.fault else f"{preferred} by {position.margin:.3g} nats"


def _quoted(token: int, piece: Piece) -> str:
    return f"{json.dumps(piece(token), ensure_ascii=False)} ({token})"


def render(report: Report, prompts: int) -> str:
    """What was found, in a few lines.  prompts: how many were to be checked."""
    count, differing = len(report.positions), len(report.differing)
    if not count:
        return "no answer was read again"
    lines = [
        f"{len(report.answers)} of {prompts} answers, {count} positions: {differing} differ ({differing / count:.3%}), "
        f"by {report.largest:.3g} nats at most; {report.margin:.3g} are allowed",
        f"near ties, the best two scores within {report.margin:.3g} nats: {report.near_ties / count:.1%} of positions",
        f"drafts: {report.drafted} tokens verified, {report.accepted} of them accepted, which is "
        f"{report.accepted / count:.1%} of positions",
    ]
    return "\n".join([*lines, *warnings(report)])


def warnings(report: Report) -> list[str]:
    """What the report cannot show."""
    if not report.accepted:
        return ["warning: no draft was accepted, so this says nothing about drafts"]
    if report.accepted < _FEW * len(report.positions):
        return ["warning: hardly any draft was accepted, so this says little about drafts"]
    return []


def write_json(path: Path, config: CellConfig, plan: Plan, report: Report, piece: Piece) -> None:
    """Save all of it.  A margin that is not finite is null, and has a fault.  OSError if it cannot be written."""
    found = {
        **about(["paceline", *sys.argv[1:]], _settings(config, plan)),
        "complete": len(report.answers) == len(plan.prompts),
        "answers": len(report.answers),
        "positions": len(report.positions),
        "differing": len(report.differing),
        "rate": report.rate,
        "largest_margin": _finite(report.largest),
        "margin": report.margin,
        "above_margin": len(report.broken),
        "near_ties": report.near_ties,
        "drafted": report.drafted,
        "accepted": report.accepted,
        "warnings": warnings(report),
        "differences": [
            {"prompt": answer.prompt, **_as_object(position, piece)}
            for answer in report.answers
            for position in answer.differing
        ],
    }
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _settings(config: CellConfig, plan: Plan) -> dict[str, Any]:
    return {
        "target": config.target,
        "drafter": drafter_label(config.drafters),
        "device": config.device,
        "dtype": config.dtype,
        "schedule": plan.speculation.schedule,
        "k": plan.speculation.k,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "prompts": len(plan.prompts),
        "tokens per answer, at most": plan.tokens,
        "batch": plan.batch,
    }


def _as_object(position: Position, piece: Piece) -> dict[str, Any]:
    preferred = position.preferred
    return {
        "position": position.index,
        "emitted": position.emitted,
        "emitted_text": piece(position.emitted),
        "preferred": preferred,
        "preferred_text": None if preferred is None else piece(preferred),
        "margin": _finite(position.margin),
        "fault": position.fault,
    }


def _finite(margin: float) -> float | None:
    return margin if math.isfinite(margin) else None
