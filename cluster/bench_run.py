"""The measuring of `paceline bench run`: the same prompts under every schedule, in turns, on a cell per drafter."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline.actors.formulas import Costs
from paceline.actors.schedules import AUTO, SCHEDULES
from paceline.actors.trace import Span
from paceline.actors.values import Finish, Request, Sampling, Speculation
from paceline.cluster.backend import Backend
from paceline.cluster.bench_prompts import Prompt
from paceline.cluster.bench_report import Report, drafter_label
from paceline.cluster.bench_stats import PACELINE, PLAIN, Answer, Case, Group, Row, Tally
from paceline.cluster.bench_theory import PassRecord, formula_rate
from paceline.cluster.config import NGRAM, ORACLE
from paceline.cluster.models import Progress
from paceline.cluster.requests import Codec

ALL_SCHEDULES = (*SCHEDULES, AUTO)
_WITH_K = frozenset({"sync", "pearl", "amusd", "saguaro"})
_WITH_FANOUT, _WITH_WIDTH = frozenset({"saguaro"}), frozenset({"swiftspec"})
_WARM_UP_TOKENS = 16


class MeasurementFailed(RuntimeError):
    """A request failed, so that nothing can be said of its schedule."""


class PeerFailed(RuntimeError):
    """Another system cannot be measured; the rest goes on without it."""


class BenchCell(Protocol):
    """What is needed of a cell."""

    @property
    def backend(self) -> Backend: ...

    @property
    def codec(self) -> Codec: ...

    def status(self) -> dict[str, Any]:
        """What its actors say of themselves."""
        ...

    def trace(self) -> list[Span]:
        """What they have done since the last call."""
        ...

    def teach(self, prompt: Sequence[int], continuation: Sequence[int], step_seconds: float) -> None:
        """Tell an oracle how the target goes on."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured.  ks: the draft depths that each schedule with a depth is run at.

    speculation: its fanout, width and budget are everybody's.
    """

    prompts: tuple[Prompt, ...]
    speculation: Speculation
    schedules: tuple[str, ...] = ALL_SCHEDULES
    ks: tuple[int, ...] = (4,)
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    tokens: int = 64

    def __post_init__(self) -> None:
        if max(self.batches) > len(self.prompts):
            raise ValueError(f"a batch of {max(self.batches)} needs as many prompts, and there are {len(self.prompts)}")

    @property
    def variants(self) -> list[Speculation]:
        """What is run: plain, which the others are compared with, and each schedule at each of its depths."""
        names = dict.fromkeys((PLAIN, *self.schedules))
        pairs = [(name, k) for name in names for k in (self.ks if name in _WITH_K else self.ks[:1])]
        return [replace(self.speculation, schedule=name, k=k) for name, k in pairs]


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, tokenized, and how it is to be answered."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: int


class Contestant(Protocol):
    """Something that answers prompts and is measured by it."""

    case: Case

    def run(self, asks: Sequence[Ask]) -> Group:
        """Answer them all, `case.batch` at a time.  Raises MeasurementFailed, or PeerFailed if it is none of ours."""
        ...


class Ours:
    """A schedule on a cell."""

    def __init__(self, cell: BenchCell, runner: asyncio.Runner, speculation: Speculation, case: Case) -> None:
        self.case, self.speculation = case, speculation
        self._cell, self._runner = cell, runner
        self._count = 0

    def run(self, asks: Sequence[Ask]) -> Group:
        """See Contestant.run."""
        requests = [self._request(ask) for ask in asks]
        self._cell.trace()
        started = time.perf_counter()
        answers = self._runner.run(streamed(self._cell.backend, requests, self.case.batch))
        seconds = time.perf_counter() - started
        return Group(tuple(answers), seconds, tuple(self._cell.trace()))

    def _request(self, ask: Ask) -> Request:
        self._count += 1
        name = f"bench-{self.case.label}-{self.case.batch}-{self.case.temperature}-{self._count}".replace(" ", "-")
        # Answers may end where the model ends them: what it would write after that is no text that anybody wants.
        return Request(name, ask.prompt, ask.sampling, ask.tokens, speculation=self.speculation)


def prompt_ids(codec: Codec, text: str) -> tuple[int, ...]:
    """What a user says, in the model's chat template if it has one."""
    return codec.encode_chat([{"role": "user", "content": text}]) if codec.has_chat_template else codec.encode(text)


async def streamed(
    backend: Backend, requests: Sequence[Request], streams: int, ended: Callable[[int], None] = lambda _: None
) -> list[Answer]:
    """The answers to all requests, so many at a time; each that ends is followed by the next.

    ended: is told how many have ended, at first none.  Raises MeasurementFailed and BackendError.
    """
    free, counts = asyncio.Semaphore(streams), itertools.count()

    async def one(request: Request) -> Answer:
        async with free:
            answer = await _answer(backend, request)
            ended(next(counts))
            return answer

    ended(next(counts))
    return await asyncio.gather(*map(one, requests))


async def _answer(backend: Backend, request: Request) -> Answer:
    started = time.perf_counter()
    ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    finish: Finish | None = None
    async with aclosing(backend.generate(request)) as deltas:
        async for delta in deltas:
            finish = delta.finish
            if delta.token_ids:
                arrivals.append((time.perf_counter() - started, len(delta.token_ids)))
                ids += delta.token_ids
    seconds = time.perf_counter() - started
    if finish is None or finish.reason == "error":
        raise MeasurementFailed(f"{request.id}: {finish.error if finish else 'the answer broke off'}")
    return Answer(tuple(ids), tuple(arrivals), seconds, finish.stats)


def measure(
    plan: Plan,
    cell: BenchCell,
    drafters: Sequence[str],
    peers: Sequence[Contestant],
    report: Report,
    progress: Progress,
) -> None:
    """Run the plan on a cell with these drafters; the peers too where one prompt is answered at a time, greedily.

    What is in the report at any time is complete: every contestant has answered the same prompts.
    Raises MeasurementFailed and BackendError.
    """
    with asyncio.Runner() as runner:
        for batch, temperature in itertools.product(plan.batches, plan.temperatures):
            cases = [_case(cell, variant, drafters, batch, temperature) for variant in plan.variants]
            ours = [Ours(cell, runner, variant, case) for variant, case in zip(plan.variants, cases, strict=True)]
            also = [peer for peer in peers if batch == 1 and temperature == 0]
            _Round(plan, cell, (*ours, *also), report, progress).run()


def _case(cell: BenchCell, variant: Speculation, drafters: Sequence[str], batch: int, temperature: float) -> Case:
    name = variant.schedule
    return Case(
        system=PACELINE,
        schedule=name,
        drafter=drafter_label(drafters),
        cell=drafter_label(drafters),
        batch=batch,
        temperature=temperature,
        # A lookup has no device of its own: it takes microseconds of any core.
        devices=1 if name == PLAIN else 1 + sum(drafter != NGRAM for drafter in drafters),
        dtype=cell.backend.model.dtype,
        synthetic=any(drafter.startswith(ORACLE) for drafter in drafters),
        k=variant.k if name in _WITH_K else None,
        fanout=variant.fanout if name in _WITH_FANOUT else None,
        width=variant.width if name in _WITH_WIDTH else None,
        budget=variant.budget if name in _WITH_WIDTH else None,
    )


class _Round:
    """Every contestant on every prompt, for one set of drafters, batch and temperature.  The first of them is plain."""

    def __init__(
        self, plan: Plan, cell: BenchCell, contestants: Sequence[Contestant], report: Report, progress: Progress
    ) -> None:
        self._plan, self._cell, self._report, self._progress = plan, cell, report, progress
        self._contestants = list(contestants)
        self._plain = contestants[0].case
        self._tallies = {contestant.case: Tally() for contestant in contestants}
        self._record = PassRecord()
        self._started = time.monotonic()

    def run(self) -> None:
        groups = self._groups()
        self._warm_up(groups[0])
        self._started = time.monotonic()
        for index, asks in enumerate(groups):
            done = self._answers(index, len(groups), asks)
            for case, group in done.items():
                self._tallies[case].add(group, done[self._plain])
                self._record.add(group.spans)
                self._report.spans += group.spans
            self._report.put(self._rows())

    def _groups(self) -> list[list[Ask]]:
        """The prompts in groups that everybody answers in turn.

        At a batch above 1 a group is about two batches, so that a request that has ended is followed by another one.
        """
        asks = [self._ask(number, prompt) for number, prompt in enumerate(self._plan.prompts)]
        batch, count = self._plain.batch, len(asks)
        parts = count if batch == 1 else max(1, count // (2 * batch))
        return [asks[count * i // parts : count * (i + 1) // parts] for i in range(parts)]

    def _ask(self, number: int, prompt: Prompt) -> Ask:
        return Ask(
            prompt_ids(self._cell.codec, prompt.text), Sampling(self._plain.temperature, seed=number), self._plan.tokens
        )

    def _warm_up(self, asks: Sequence[Ask]) -> None:
        short = [replace(ask, tokens=min(ask.tokens, _WARM_UP_TOKENS)) for ask in asks]
        for contestant in list(self._contestants):
            self._say(f"warming up {contestant.case.label}")
            self._run(contestant, short)

    def _answers(self, index: int, count: int, asks: Sequence[Ask]) -> dict[Case, Group]:
        done: dict[Case, Group] = {}
        for contestant in self._order(index):
            self._say(f"group {index + 1} of {count}{self._left(index, count)}: {contestant.case.label}")
            group = self._run(contestant, asks)
            if group is not None:
                done[contestant.case] = group
            if contestant.case is self._plain and group is not None:
                self._teach(asks, group)
        return done

    def _order(self, index: int) -> list[Contestant]:
        """Each group begins with another one, lest one of them always come first.

        Only where the drafter has to be told plain's answers, plain does.
        """
        fixed = 1 if self._plain.synthetic else 0
        first, turning = self._contestants[:fixed], self._contestants[fixed:]
        at = index % len(turning) if turning else 0
        return [*first, *turning[at:], *turning[:at]]

    def _run(self, contestant: Contestant, asks: Sequence[Ask]) -> Group | None:
        """Its answers; None, and it is out, if it is a peer that has failed."""
        try:
            return contestant.run(asks)
        except PeerFailed as error:
            self._report.note(f"{contestant.case.label} is left out: {error}")
            self._contestants.remove(contestant)
            self._report.drop(contestant.case)
            del self._tallies[contestant.case]
            return None

    def _teach(self, asks: Sequence[Ask], group: Group) -> None:
        """Tell a synthetic drafter the answers: with the same seed they are the same under every schedule."""
        if not self._plain.synthetic:
            return
        lesson = Tally()
        lesson.add(group, group)
        for ask, answer in zip(asks, group.answers, strict=True):
            self._cell.teach(ask.prompt, answer.tokens, lesson.step or 0.0)

    def _rows(self) -> list[Row]:
        plain = self._tallies[self._plain].rate
        costs = self._costs()
        rows = []
        for contestant in self._contestants:
            case, tally = contestant.case, self._tallies[contestant.case]
            theory = formula_rate(case, contestant.speculation, tally, costs) if isinstance(contestant, Ours) else None
            rows.append(tally.row(case, plain, theory))
        return rows

    def _costs(self) -> Costs | None:
        """What was measured of passes, draft steps, guesses and links; None before the verifier has."""
        known: Mapping[str, Mapping[str, Any]] = (self._cell.status()["verifier"] or {}).get("costs", {})
        # Sessions that are drafted by the same drafters have their costs in common; here all of them are.
        return next((self._record.applied(Costs(**costs)) for costs in known.values()), None)

    def _say(self, what: str) -> None:
        plain = self._plain
        self._progress(f"drafter {plain.drafter}, batch {plain.batch}, temperature {plain.temperature:g}: {what}")

    def _left(self, index: int, count: int) -> str:
        """How long the rest will take, once that can be told."""
        if index == 0:
            return ""
        minutes = (time.monotonic() - self._started) / index * (count - index) / 60
        return f", about {minutes:.0f} min left"
