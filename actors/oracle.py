"""A synthetic drafter for checking the machinery against theory, apart from any real drafter's quality.

It has been told how the target goes on, is wrong as often as it is told to, and takes as long as it is told to.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from paceline.actors.drafters import Ask, Guess, Start
from paceline.actors.tree import ROOT, DraftTree

PREFIX = "oracle:"
_FORM = "oracle:alpha=0.8,cost=0.1[,second=0.5]"
_RANKS = 64
"""A right guess of this rank or a later one is one that nobody will ask for."""


@dataclass(frozen=True, slots=True)
class OracleSpec:
    """How good and how fast an oracle is.

    alpha: how often its first guess for a position is right.  cost: one draft step, in plain target steps.
    second: given that its guesses for a position so far are wrong, how often the next one is right.
    """

    alpha: float
    cost: float
    second: float = 0.5

    def __post_init__(self) -> None:
        for name in ("alpha", "second"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"the oracle's {name} must be between 0 and 1, got {getattr(self, name)}")
        if not 0 <= self.cost < math.inf:
            raise ValueError(f"the oracle's cost must be 0 or more target steps, got {self.cost}")

    def log_q(self, rank: int) -> float:
        """The log of the rate at which the guess of this rank (0: the first) is right."""
        rate = self.alpha if rank == 0 else (1 - self.alpha) * (1 - self.second) ** (rank - 1) * self.second
        return math.log(max(rate, 1e-9))

    def right_rank(self, text: bytes, position: int) -> int:
        """The rank of the right guess for a position of a text; the same whenever it is asked."""
        digest = hashlib.blake2b(position.to_bytes(8, "little"), key=text, digest_size=16).digest()
        first, others = (int.from_bytes(half, "little") / 2**64 for half in (digest[:8], digest[8:]))
        if first < self.alpha:
            return 0
        # The number of failures before the next success: geometric.
        miss = 1 - self.second
        if miss <= 0 or others == 0:
            return 1 if miss <= 0 else _RANKS
        return 1 + min(_RANKS, int(math.log(others) / math.log(miss))) if miss < 1 else _RANKS


def parse_oracle(name: str) -> OracleSpec:
    """The spec in a drafter's name such as ``oracle:alpha=0.8,cost=0.1``.  ValueError says what is wrong with it."""
    if not name.startswith(PREFIX):
        raise ValueError(f'an oracle is written {_FORM}, got "{name}"')
    known = [f.name for f in fields(OracleSpec)]
    given: dict[str, str] = {}
    for part in name.removeprefix(PREFIX).split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known or key in given:
            raise ValueError(f'"{part}" is not understood in "{name}"; an oracle is written {_FORM}')
        given[key] = value
    missing = [key for key in ("alpha", "cost") if key not in given]
    if missing:
        raise ValueError(f'"{name}" lacks {" and ".join(missing)}; an oracle is written {_FORM}')
    return OracleSpec(**{key: _number(value, key) for key, value in given.items()})


def _number(text: str, key: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f'the oracle\'s {key} must be a number, got "{text}"') from None


@dataclass(frozen=True, slots=True)
class _Lesson:
    """prompt_len: how many of `tokens`, prompt and continuation, are the prompt's.  digest: stands for the tokens."""

    tokens: tuple[int, ...]
    prompt_len: int
    step_seconds: float
    digest: bytes

    def fits(self, committed: Sequence[int]) -> bool:
        return self.prompt_len <= len(committed) and self.tokens[: len(committed)] == tuple(committed)


@dataclass(slots=True)
class _Pupil:
    """One session.  tried: how many lessons were known when none of them fitted."""

    tokens: list[int]
    lesson: _Lesson | None = None
    tried: int = field(default=-1)


class OracleDrafter:
    """A Drafter that knows the continuations it was taught, and guesses nothing for any other session.

    A step, over however many asks, takes `cost` times the step time it was taught, its own computing included.
    sleep, clock: in seconds.
    """

    def __init__(
        self,
        spec: OracleSpec,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.version = 0
        self._spec, self._sleep, self._clock = spec, sleep, clock
        self._lessons: list[_Lesson] = []
        self._lock = threading.Lock()
        self._pupils: dict[int, _Pupil] = {}
        self._ids = itertools.count()

    def teach(self, prompt: Sequence[int], continuation: Sequence[int], step_seconds: float) -> None:
        """From any thread: `prompt` is continued like this by the target, whose plain step takes `step_seconds`."""
        tokens = (*prompt, *continuation)
        digest = hashlib.blake2b(repr(tokens).encode(), digest_size=16).digest()
        lesson = _Lesson(tokens, len(prompt), step_seconds, digest)
        with self._lock:
            # A new list each time, so that the drafting thread may read the old one without the lock.
            self._lessons = [*self._lessons, lesson]

    def open(self, start: Start) -> int:
        """See Drafter.open."""
        session = next(self._ids)
        self._pupils[session] = _Pupil(list(start.tokens))
        return session

    def close(self, session: int) -> None:
        """See Drafter.close."""
        self._pupils.pop(session, None)

    def reroot(self, session: int, tree: DraftTree, tokens: Sequence[int]) -> None:
        """See Drafter.reroot."""
        pupil = self._pupils[session]
        pupil.tokens += tokens
        lesson = pupil.lesson
        if lesson is not None and lesson.tokens[len(pupil.tokens) - len(tokens) : len(pupil.tokens)] != tuple(tokens):
            pupil.lesson, pupil.tried = None, -1

    def propose(self, asks: Sequence[Ask]) -> list[tuple[Guess, ...] | None]:
        """See Drafter.propose.  Every ask is answered by one level, however many it would take."""
        started = self._clock()
        lessons = [self._lesson(self._pupils[ask.session]) for ask in asks]
        answers = [self._answer(ask, lesson) for ask, lesson in zip(asks, lessons, strict=True)]
        answered = (lesson for lesson, answer in zip(lessons, answers, strict=True) if lesson is not None and answer)
        step = max((lesson.step_seconds for lesson in answered), default=0.0)
        rest = self._spec.cost * step - (self._clock() - started)
        if rest > 0:
            self._sleep(rest)
        return list(answers)

    def _lesson(self, pupil: _Pupil) -> _Lesson | None:
        """What is known of a session; the last thing taught comes first."""
        lessons = self._lessons
        if pupil.lesson is None and pupil.tried != len(lessons):
            pupil.tried = len(lessons)
            pupil.lesson = next((lesson for lesson in reversed(lessons) if lesson.fits(pupil.tokens)), None)
        return pupil.lesson

    def _answer(self, ask: Ask, lesson: _Lesson | None) -> tuple[Guess, ...]:
        guessed = ask.tree.tokens(ask.parent) if ask.parent != ROOT else ()
        base = ask.tree.base_len
        position = base + len(guessed)
        if lesson is None or position >= len(lesson.tokens):
            return ()
        # Below a wrong guess all guesses are as good, and none says that it is wrong.
        truth = lesson.tokens[position] if lesson.tokens[base:position] == guessed else None
        right = self._spec.right_rank(lesson.digest, position) if truth is not None else None
        return tuple(
            Guess(truth if truth is not None and rank == right else _wrong(rank, truth), self._spec.log_q(rank))
            for rank in range(ask.width)
        )


def _wrong(rank: int, truth: int | None) -> int:
    """A token that is not the right one, another one for every rank."""
    return rank if truth is None or rank < truth else rank + 1
