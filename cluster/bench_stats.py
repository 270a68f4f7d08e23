"""What the benchmark derives from what a client saw: counts and times are kept as they came, rates made at the end.

All times are in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from paceline.actors.trace import Span, overlap
from paceline.actors.values import Stats

PACELINE = "paceline"
PLAIN = "plain"

Positions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it.

    arrivals: when each piece of it came, since the request, and how many tokens it held.  stats: ours only.
    """

    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    seconds: float
    stats: Stats | None = None

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.arrivals[0][0] if self.arrivals else self.seconds

    @property
    def intervals(self) -> list[float]:
        """Times between tokens: a piece of n tokens that came d after the one before counts as n intervals of d/n."""
        pairs = itertools.pairwise(self.arrivals)
        return [(at - before) / n for (before, _), (at, n) in pairs for _ in range(n)]


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that were made together.  seconds: from the first request to the last finish."""

    answers: tuple[Answer, ...]
    seconds: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """What a row is about.

    cell: the drafters of the cell in whose turns it was measured; what has the same one can be compared.
    devices: how many it uses, the target's among them; of a peer on CPU, its cores.  synthetic: its drafter was told
    the answers.
    """

    system: str
    schedule: str
    drafter: str
    cell: str
    batch: int
    temperature: float
    devices: int
    dtype: str
    synthetic: bool = False
    k: int | None = None
    fanout: int | None = None
    width: int | None = None
    budget: int | None = None

    @property
    def label(self) -> str:
        """Its name among the others of its cell, batch and temperature."""
        if self.system != PACELINE:
            return f"{self.system} {self.schedule} x{self.devices}"
        return self.schedule if self.k is None else f"{self.schedule} k={self.k}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the results.  The JSON has these names; scripts rely on them.  None: not known, or without meaning.

    tokens_per_s: over the whole time of its groups, prefill included.  decode_tokens_per_s: of a stream after its
    first piece, times the batch.  acceptance_length: mean tokens per verify pass.  hit_rate: the share of verdicts
    whose branch had been grown already.  overlap: the share of verify time in which a drafter worked too.
    exposed_wait: the share of the requests' time in which they waited for a draft.  acceptance_by_position: the share
    of draft tokens at each depth that was accepted.  measured_over_formula: decode_tokens_per_s over what the
    schedule's formula gives for the costs and the acceptance of this very run.  streams: requests under way, in the
    mean.  differing: answers that are not plain's.
    """

    system: str
    schedule: str
    drafter: str
    batch: int
    temperature: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    acceptance_length: float | None
    hit_rate: float | None
    overlap: float | None
    measured_over_formula: float | None
    label: str
    cell: str
    synthetic: bool
    dtype: str
    devices: int
    k: int | None
    fanout: int | None
    width: int | None
    budget: int | None
    prompts: int
    tokens: int
    seconds: float
    streams: float
    over_plain: float | None
    decode_tokens_per_s: float | None
    formula_tokens_per_s: float | None
    ttft_p50_s: float
    ttft_p99_s: float
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[float | None, ...]
    exposed_wait: float | None
    differing: int | None


@dataclass(slots=True)
class Tally:
    """All that a case has done so far.  differing: None where its tokens cannot be compared with plain's."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    differing: int | None = 0

    def add(self, group: Group, plain: Group) -> None:
        """Count a group of requests, which plain has answered as `plain`."""
        self.answers += group.answers
        self.seconds += group.seconds
        self.spans += group.spans
        if self.differing is None or not all(answer.tokens for answer in group.answers):
            self.differing = None
            return
        pairs = zip(group.answers, plain.answers, strict=True)
        self.differing += sum(mine.tokens != theirs.tokens for mine, theirs in pairs)

    @property
    def tokens(self) -> int:
        return sum(n for answer in self.answers for _, n in answer.arrivals)

    @property
    def rate(self) -> float:
        """Tokens per second of the groups' whole time."""
        return _ratio(self.tokens, self.seconds) or 0.0

    @property
    def step(self) -> float | None:
        """The median time between two tokens."""
        return _quantile(self._intervals(), 0.5)

    @property
    def stream_rate(self) -> float | None:
        """Tokens per second of one stream, from its first piece on."""
        intervals = self._intervals()
        return _ratio(len(intervals), sum(intervals))

    @property
    def positions(self) -> Positions:
        """(drafted, accepted) by depth, summed."""
        per_answer = [stats.positions for stats in self._stats()]
        columns = itertools.zip_longest(*per_answer, fillvalue=(0, 0))
        return tuple((sum(d for d, _ in column), sum(a for _, a in column)) for column in columns)

    @property
    def hit_rate(self) -> float | None:
        stats = self._stats()
        passes = sum(one.verify_passes for one in stats)
        return _ratio(sum(one.hits for one in stats), passes) if any(one.drafted for one in stats) else None

    def row(self, case: Case, plain: float | None, formula: float | None) -> Row:
        """The line of the results.  plain: its tokens per second.  formula: what the schedule should decode at."""
        decode = self.stream_rate * case.batch if self.stream_rate else None
        firsts = [answer.first for answer in self.answers]
        intervals, busy = self._intervals(), sum(answer.seconds for answer in self.answers)
        drafted, accepted = (sum(getattr(one, name) for one in self._stats()) for name in ("drafted", "accepted"))
        waited = sum(one.waited for one in self._stats())
        return Row(
            system=case.system,
            schedule=case.schedule,
            drafter=case.drafter,
            batch=case.batch,
            temperature=case.temperature,
            tokens_per_s=self.rate,
            tokens_per_s_per_device=self.rate / case.devices,
            acceptance_length=self._acceptance_length(),
            hit_rate=self.hit_rate,
            overlap=overlap(self.spans),
            measured_over_formula=_ratio(decode, formula),
            label=case.label,
            cell=case.cell,
            synthetic=case.synthetic,
            dtype=case.dtype,
            devices=case.devices,
            k=case.k,
            fanout=case.fanout,
            width=case.width,
            budget=case.budget,
            prompts=len(self.answers),
            tokens=self.tokens,
            seconds=self.seconds,
            streams=_ratio(busy, self.seconds) or 0.0,
            over_plain=_ratio(self.rate, plain),
            decode_tokens_per_s=decode,
            formula_tokens_per_s=formula,
            ttft_p50_s=_quantile(firsts, 0.5) or 0.0,
            ttft_p99_s=_quantile(firsts, 0.99) or 0.0,
            inter_token_p50_s=_quantile(intervals, 0.5),
            inter_token_p99_s=_quantile(intervals, 0.99),
            acceptance_rate=_ratio(accepted, drafted),
            acceptance_by_position=tuple(_ratio(a, d) for d, a in self.positions),
            exposed_wait=_ratio(waited, busy) if self._stats() else None,
            differing=self.differing,
        )

    def _acceptance_length(self) -> float | None:
        """Tokens per pass.  Of a peer, what comes together is what one pass has made."""
        stats = self._stats()
        if stats:
            return _ratio(self.tokens, sum(one.verify_passes for one in stats))
        return _ratio(self.tokens, sum(len(answer.arrivals) for answer in self.answers))

    def _stats(self) -> list[Stats]:
        return [answer.stats for answer in self.answers if answer.stats is not None]

    def _intervals(self) -> list[float]:
        return [interval for answer in self.answers for interval in answer.intervals]


def acceptance_by_depth(positions: Positions) -> tuple[float, ...]:
    """How often a draft token at each depth is right, given that those above it are; as deep as that can be told.

    Of the drafts accepted at one depth, the share that went on (drafted there over drafted here) met the next one.
    """
    found = []
    before = (1, 1)
    for depth, (drafted, accepted) in enumerate(positions):
        met = drafted if depth == 0 else before[1] * drafted / before[0]
        if not met:
            break
        found.append(min(1.0, accepted / met))
        before = (drafted, accepted)
    return tuple(found)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
