"""Whether an answer is what the target would have said: the target reads it again and decides every token anew.

The prompt and the answer go through the engine in passes over long chains, so in other shapes than those in which the
answer was decoded, without drafts, and without anything that is cached.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from paceline.actors.constraints import Compile, DeadEnd, constraints_of, shaper_of
from paceline.actors.engine import Engine, Feed
from paceline.actors.rule import BadLogits, Edit, draw, perturbed
from paceline.actors.values import Request, Stats
from torch import Tensor

CHUNK = 512
"""Tokens per pass."""

_MARGINS = {"float32": 1e-3, "bfloat16": 0.5}


def default_margin(dtype: str, temperature: float) -> float:
    """The largest margin that rounding explains, in nats of the processed scores; see docs/EXACTNESS.md.

    Logits are rounded, and the temperature divides what that makes of them.
    """
    return _MARGINS[dtype] / (temperature or 1.0)


@dataclass(frozen=True, slots=True)
class Position:
    """One token of an answer, against the target's scores where it has read the answer up to there.

    Scores are those that a token is drawn by: at temperature 0 the edited logits, else the processed ones plus noise.

    index: its place in the answer, from 0.  emitted: what came.  preferred: what these scores choose, None for nothing.
    margin: the score of `preferred` minus that of `emitted`, in nats; infinite where there is a fault.
    lead: the best score minus the second best, in nats; infinite where there is no second.
    fault: why the token could not have come by these scores, however they are rounded; "" if it could.
    """

    index: int
    emitted: int
    preferred: int | None
    margin: float
    lead: float
    fault: str = ""

    @property
    def differs(self) -> bool:
        """Whether another token came than these scores choose."""
        return self.preferred != self.emitted


@dataclass(frozen=True, slots=True)
class Checked:
    """An answer that was read again.  prompt: its number, from 0.  stats: what speculation did for it."""

    prompt: int
    positions: tuple[Position, ...]
    stats: Stats

    @property
    def differing(self) -> list[Position]:
        """Where another token came."""
        return [position for position in self.positions if position.differs]


@dataclass(frozen=True, slots=True)
class Report:
    """The answers that were checked so far.  margin: the largest one that is allowed, in nats."""

    answers: tuple[Checked, ...]
    margin: float

    def plus(self, answer: Checked) -> Report:
        """The same with one answer more."""
        return replace(self, answers=(*self.answers, answer))

    @property
    def positions(self) -> list[Position]:
        return [position for answer in self.answers for position in answer.positions]

    @property
    def differing(self) -> list[Position]:
        return [position for position in self.positions if position.differs]

    @property
    def broken(self) -> list[Position]:
        """Those that differ by more than the margin, or have a fault."""
        return [position for position in self.differing if not position.margin <= self.margin]

    @property
    def rate(self) -> float | None:
        """Differing positions of all; None before there are any."""
        return len(self.differing) / len(self.positions) if self.positions else None

    @property
    def largest(self) -> float:
        """The largest margin; 0 if nothing differs."""
        return max((position.margin for position in self.differing), default=0.0)

    @property
    def near_ties(self) -> int:
        """Positions whose best two scores are within the margin, so that rounding could swap them."""
        return sum(position.lead <= self.margin for position in self.positions)

    @property
    def drafted(self) -> int:
        """Draft tokens that went through a verify pass."""
        return sum(answer.stats.drafted for answer in self.answers)

    @property
    def accepted(self) -> int:
        """Those of them that were delivered."""
        return sum(answer.stats.accepted for answer in self.answers)


def teacher_force(
    engine: Engine,
    request: Request,
    tokens: Sequence[int],
    eos_ids: frozenset[int] = frozenset(),
    compile: Compile | None = None,
    chunk: int = CHUNK,
) -> list[Position]:
    """Judge the answer `tokens` to a request, in passes of `chunk` tokens, with the request's own seed and constraints.

    eos_ids: the target's, which a request is ended by unless it says otherwise.
    Raises GrammarError, and what Engine.step raises.
    """
    if not tokens:
        return []
    edit = shaper_of(constraints_of(request, eos_ids), request.prompt, (), engine.vocab_size, compile)
    with closing(_rows(engine, request.prompt, tokens, chunk)) as rows:
        return [_judge(row, request, tokens, index, edit) for index, row in enumerate(rows)]


def _rows(engine: Engine, prompt: Sequence[int], tokens: Sequence[int], chunk: int) -> Generator[Tensor, None, None]:
    """The raw logits [V] before each of `tokens`, in order."""
    chain = (*prompt, *tokens[:-1])
    sequence = engine.open()
    try:
        for start in range(0, len(chain), chunk):
            part = chain[start : start + chunk]
            wanted = range(max(0, len(prompt) - 1 - start), len(part))
            yield from engine.step([Feed(sequence, part, tuple(range(-1, len(part) - 1)), tuple(wanted))])[0]
            engine.commit(sequence, range(len(part)))
    finally:
        engine.close(sequence)


def _judge(row: Tensor, request: Request, tokens: Sequence[int], index: int, edit: Edit | None) -> Position:
    """row: the raw logits [V] before tokens[index]."""
    emitted, at = tokens[index], len(request.prompt) + index
    try:
        edited = row if edit is None else edit(row, tuple(tokens[:index]))
        preferred = draw(edited, request.sampling, at)
    except (BadLogits, DeadEnd) as error:
        return Position(index, emitted, None, math.inf, math.inf, str(error))
    scores = perturbed(edited, request.sampling, at)
    best, second = scores.topk(2).values.tolist()
    margin = 0.0 if emitted == preferred else float(scores[preferred] - scores[emitted])
    fault = "the request's constraints or the sampling rule this token out" if math.isinf(margin) else ""
    return Position(index, emitted, preferred, margin, best - second, fault)
