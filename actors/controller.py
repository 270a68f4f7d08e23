"""The controller: which schedule, and with which numbers, a session is speculated now.

It measures what passes, draft steps and the link cost and how good the guesses are, asks the formulas how fast each
plan should be, and takes the fastest.  A formula may be wrong, so what each schedule promises is corrected by what it
has really yielded.  Plain values in and out: it has no clock, and knows of no loop.

What was learned belongs to a drafter and outlives the sessions, so that a short request begins with what others know.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.actors.formulas import Costs, rate
from paceline.actors.schedules import AUTO, MAX_LEAVES, Plan, plan_of
from paceline.actors.tree import DraftTree, Subtree
from paceline.actors.values import Speculation

_WINDOW = 31
"""How many of the last measurements of a kind count; their median does."""

_STALE = 4096
"""After so many passes without another one of its size, the time of a pass is forgotten."""

_FEW = 3
"""So many passes of a size are needed before they count beside others."""

_SLOPE = 0.005
"""How much longer a pass takes for each more row, as a share of it, before passes of two sizes were seen."""

_DEPTHS = 8
"""Depths whose acceptance is told apart."""

_TRIALS = 300
"""Of more trials than so many, the older ones count less and less."""

_TIERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512)
"""Numbers of sessions, and of rows, that are told apart."""

_FIRST = Plan("saguaro", k=4, fanout=3, fresh=0)
"""Before anything is known: it drafts beside the passes and never waits, so that even a bad drafter costs little."""

_LEAST_PASS = 1e-6

_PROBE = Plan("saguaro", k=2, fanout=1, fresh=0)
"""What a plain session tries now and then, to see whether drafting would pay by now."""


class Level(NamedTuple):
    """One step of a pass down its tree: how many children were offered, and which of them was right.

    rank: 0 for the one of highest log q, and so on; -1 if none was right.
    """

    offered: int
    rank: int


def levels(mirror: DraftTree, tree: Subtree, path: Sequence[int]) -> tuple[Level, ...]:
    """What a pass over `tree`, nodes of `mirror`, has shown of the guesses; path: the accepted ones, as indices."""
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(index)
    seen: list[Level] = []
    for at, chosen in zip((-1, *path), (*path, -1), strict=True):
        offered = sorted(children.get(at, ()), key=lambda index: -mirror.nodes[tree.ids[index]].logq)
        if offered:
            seen.append(Level(len(offered), offered.index(chosen) if chosen in offered else -1))
    return tuple(seen)


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """gain: a plan that promises less than so much more than the present one is not worth a change.
    dwell: verdicts of a session, at least, from one change to the next; check: from one comparison with other plans to
    the next.  refresh: passes after which speeds are worked out anew; sooner in the beginning.  bonus: how much better
    than expected a schedule may be, as a share, that has not been tried for long; above `gain`, or none would be tried.
    probe_after, probe: how many verdicts plain sessions give between two probes, at least, and how many one takes.
    """

    gain: float = 0.04
    dwell: int = 12
    check: int = 6
    refresh: int = 64
    bonus: float = 0.06
    probe_after: int = 192
    probe: int = 6


class _Median:
    """The median of the last few numbers, or of all if `window` is None."""

    def __init__(self, window: int | None = _WINDOW) -> None:
        self._seen: deque[float] = deque(maxlen=window)

    def note(self, value: float) -> None:
        self._seen.append(value)

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def value(self) -> float:
        return self.share(0.5)

    def share(self, share: float) -> float:
        """The number that this share of them lies below."""
        return sorted(self._seen)[int(share * len(self._seen))] if self._seen else 0.0


class _Rate:
    """How often something is right; the older a trial, the less it counts."""

    def __init__(self) -> None:
        self.trials = self.right = 0.0

    def note(self, right: bool) -> None:
        if self.trials >= _TRIALS:
            self.fade(1 - 1 / _TRIALS)
        self.trials += 1
        self.right += right

    def fade(self, share: float) -> None:
        self.trials *= share
        self.right *= share

    def estimate(self, prior: float, weight: float) -> float:
        return (self.right + prior * weight) / (self.trials + weight)


class _Skill:
    """How good a drafter's guesses are: the best one at each depth, and the next ones."""

    def __init__(self) -> None:
        self.depths = [_Rate() for _ in range(_DEPTHS)]
        self.second = _Rate()

    def note(self, seen: Iterable[Level]) -> None:
        for depth, level in enumerate(seen):
            self.depths[min(depth, _DEPTHS - 1)].note(level.rank == 0)
            if level.rank == 0:
                continue
            for rank in range(1, level.offered if level.rank < 0 else level.rank + 1):
                self.second.note(rank == level.rank)

    def fade(self, share: float) -> None:
        for depth in self.depths:
            # Not so far that a mere guess counts again.
            if depth.trials > 60:
                depth.fade(share)

    def acceptance(self) -> tuple[float, ...]:
        """By depth; a depth that was seldom reached is taken for as good as the one above it."""
        found: list[float] = []
        for depth in self.depths:
            found.append(depth.estimate(found[-1] if found else 0.6, 20.0 if found else 2.0))
        return tuple(found)


@dataclass(slots=True)
class _PassTimes:
    """Passes of about one size.  seen: the number of the last one."""

    rows: _Median
    seconds: _Median
    seen: int = 0


class CostMeter:
    """Estimates of what things cost: medians, so that an outlier is only that.

    window: how many measurements of a kind count, the newest ones, so that the estimates move; None for all that were
    ever made.  passes: how many were noted.
    """

    def __init__(self, window: int | None = _WINDOW) -> None:
        self.passes = 0
        self._window = window
        self._times: dict[int, _PassTimes] = {}
        self._steps: dict[str, _Median] = {}
        self._latencies: dict[str, _Median] = {}
        self._skills: dict[str, _Skill] = {}

    def note_pass(self, seconds: float, rows: int) -> None:
        """A pass over so many rows, none of them a prompt's."""
        self.passes += 1
        times = self._times.setdefault(_tier(rows), _PassTimes(self._median(), self._median()))
        times.rows.note(rows)
        times.seconds.note(seconds)
        times.seen = self.passes

    def note_draft_step(self, drafter: str, seconds: float) -> None:
        """A draft step, by the drafter's own clock."""
        self._steps.setdefault(drafter, self._median()).note(seconds)

    def note_latency(self, drafter: str, seconds: float) -> None:
        """One way of the link."""
        self._latencies.setdefault(drafter, self._median()).note(max(0.0, seconds))

    def _median(self) -> _Median:
        return _Median(self._window)

    def note_walk(self, drafter: str, seen: Iterable[Level]) -> None:
        """What a pass has shown of the guesses."""
        self.skill(drafter).note(seen)

    def skill(self, drafter: str) -> _Skill:
        """How good this drafter is."""
        return self._skills.setdefault(drafter, _Skill())

    def costs(self, drafter: str, shift: float = 0.0) -> Costs | None:
        """The estimates, None before there are any.  shift: how much better the guesses are, in logits."""
        steps = self._steps.get(drafter)
        if self.passes < _FEW or steps is None:
            return None
        # What is above the lowest is not the link: the verdict came in the middle of a step.
        latency = self._latencies.get(drafter, _Median()).share(0.1)
        skill = self.skill(drafter)
        base, node, curve = self.pass_times()
        return Costs(
            verify_base=base,
            verify_node=node,
            draft=steps.value,
            latency=latency,
            acceptance=tuple(_shifted(alpha, shift) for alpha in skill.acceptance()),
            second=skill.second.estimate(0.4, 20.0),
            passes=curve,
        )

    def pass_times(self) -> tuple[float, float, tuple[tuple[float, float], ...]]:
        """verify_base, verify_node and passes of Costs; at least one pass must have been noted."""
        curve = self._curve()
        first, last = curve[0], curve[-1]
        slope = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0
        node = slope or _SLOPE * first[1]
        return first[1] - node * first[0], node, curve

    def _curve(self) -> tuple[tuple[float, float], ...]:
        """(rows, seconds) by rows; a pass over more rows never takes less."""
        # Copied first: the costs are asked for from other threads, too.
        oldest = self.passes - _STALE if self._window is not None else 0
        fresh = [times for times in list(self._times.values()) if times.seen > oldest]
        # A few may be outliers, and would lift all that is larger.
        known = [times for times in fresh if len(times.seconds) >= _FEW] or fresh
        most, curve = 0.0, []
        for rows, seconds in sorted((times.rows.value, times.seconds.value) for times in known):
            most = max(most, seconds)
            curve.append((rows, most))
        return tuple(curve)


def _tier(count: int) -> int:
    return min(_TIERS, key=lambda tier: abs(tier - count))


def _logit(share: float) -> float:
    inside = min(max(share, 0.01), 0.99)
    return math.log(inside / (1 - inside))


def _shifted(share: float, shift: float) -> float:
    return 1 / (1 + math.exp(-_logit(share) - shift)) if shift else share


@dataclass(slots=True)
class _Record:
    """What a schedule has yielded, and what had been promised of it, in tokens; both fade."""

    tokens: float = 0.0
    promised: float = 0.0
    verdicts: float = 0.0

    def note(self, tokens: float, promised: float) -> None:
        self.tokens += tokens
        self.promised += promised
        self.verdicts += 1

    def fade(self) -> None:
        self.tokens, self.promised, self.verdicts = 0.998 * self.tokens, 0.998 * self.promised, 0.998 * self.verdicts


@dataclass(slots=True)
class _Lane:
    """What all sessions of one drafter share.

    records: by schedule.  rates: of plans, by plan, sessions and shift; choices: the fastest plan of each schedule, by
    sessions and shift; both hold until `stale_at`, a number of passes.  plan: what was chosen last.
    until_probe, pause: verdicts of plain sessions until the next probe, and from one probe to the next.
    """

    pause: int
    plan: Plan = _FIRST
    since: int = 0
    until_probe: int = 0
    stale_at: int = 0
    records: dict[str, _Record] = field(default_factory=dict)
    rates: dict[tuple[Plan, int, float], float] = field(default_factory=dict)
    choices: dict[tuple[int, float], tuple[Plan, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    """since: verdicts since its plan was changed.  promised: tokens per second, by the formula; 0 if not known.

    probing: verdicts that are left of a probe.  tier: of the number of sessions when it was planned.
    checked_at: the value of `since` when its plan was compared with others last.  max_k: see Speculation.
    """

    drafter: str
    plan: Plan
    since: int = 0
    promised: float = 0.0
    probing: int = 0
    tier: int = 0
    checked_at: int = 0
    max_k: int | None = None
    skill: _Rate = field(default_factory=_Rate)

    @property
    def bounded(self) -> bool:
        """Whether some plans are not for it."""
        return self.max_k is not None


class Controller:
    """Plans all sessions of one verifier, those of a fixed schedule, too.  Belongs to one thread.

    A session is planned when it opens and after each of its verdicts; most of these calls only look up its plan.
    """

    def __init__(self, settings: ControllerSettings | None = None) -> None:
        self._settings = settings or ControllerSettings()
        self.meter = CostMeter()
        self._lanes: dict[str, _Lane] = {}
        self._sessions: dict[int, _Session] = {}

    # What is seen

    def note_pass(self, seconds: float, rows: int) -> None:
        """A pass over so many rows (roots and nodes) took so long.  Not for passes that read a prompt."""
        # A clock may be too coarse to see a pass; one that takes no time would be infinitely fast.
        self.meter.note_pass(max(seconds, _LEAST_PASS), rows)

    def note_growth(self, drafter: str, step_seconds: float) -> None:
        """A drafter says how long a step of it takes."""
        if step_seconds > 0:
            self.meter.note_draft_step(drafter, step_seconds)

    def note_latency(self, drafter: str, seconds: float) -> None:
        """One way of the link to a drafter took so long."""
        self.meter.note_latency(drafter, seconds)

    def note_verdict(self, session: int, seen: Sequence[Level], tokens: int, seconds: float) -> None:
        """A pass gave a session so many tokens, so many seconds after its last one; see `levels` for `seen`.

        seconds: 0 if there was none before, or if the session stood still meanwhile.
        """
        state = self._sessions.get(session)
        if state is None:
            return
        lane = self._lane(state.drafter)
        self.meter.note_walk(state.drafter, seen)
        for level in seen:
            state.skill.note(level.rank == 0)
        state.since += 1
        state.probing = max(0, state.probing - 1)
        if state.plan == lane.plan:
            lane.since += 1
        if state.plan.schedule == "plain":
            lane.until_probe -= 1
        # What comes just after a change is still the last plan's.
        if state.since > 2 and seconds > 0 and state.promised > 0 and not state.probing:
            for record in lane.records.values():
                record.fade()
            lane.records.setdefault(state.plan.schedule, _Record()).note(tokens, state.promised * seconds)

    def forget(self, session: int) -> None:
        """A session has ended, or its drafter is gone."""
        self._sessions.pop(session, None)

    def costs(self) -> dict[str, Costs]:
        """What is known of the costs, by what drafts.  From any thread."""
        known = {drafter: self.meter.costs(drafter) for drafter in list(self._lanes)}
        return {drafter: costs for drafter, costs in known.items() if costs is not None}

    # What is chosen

    def plan(self, session: int, speculation: Speculation, sessions: int, drafter: str = "") -> Plan:
        """How a session is speculated now, one of `sessions` that run.

        drafter: what drafts it, by a name that stands for one kind of guesses and costs; "" if nothing does.
        An `auto` session without a drafter is plain.
        """
        state = self._sessions.get(session)
        if state is None or state.drafter != drafter:
            state = self._sessions[session] = self._begin(speculation, drafter)
        if not drafter:
            return state.plan
        tier = _tier(sessions)
        lane = self._lane(drafter)
        if speculation.schedule != AUTO:
            if tier != state.tier or self.meter.passes >= lane.stale_at or state.since >= self._settings.dwell:
                state.plan, state.tier, state.since = self._tuned(lane, speculation, tier, drafter), tier, 0
        elif self._due(state, tier):
            self._choose(lane, state, tier)
        return state.plan

    def _begin(self, speculation: Speculation, drafter: str) -> _Session:
        if speculation.schedule != AUTO:
            return _Session(drafter, plan_of(speculation))
        if not drafter:
            return _Session(drafter, Plan("plain"))
        lane, max_k = self._lane(drafter), speculation.max_k
        return _Session(drafter, lane.plan.up_to(max_k), lane.since, max_k=max_k)

    def _lane(self, drafter: str) -> _Lane:
        pause = self._settings.probe_after
        return self._lanes.setdefault(drafter, _Lane(pause, until_probe=pause))

    def _due(self, state: _Session, tier: int) -> bool:
        """Whether it is time to think about a session's plan."""
        if tier != state.tier or not state.promised:
            return True
        if state.plan == _PROBE.up_to(state.max_k):
            return not state.probing
        checked = state.since - state.checked_at >= self._settings.check
        return state.since >= self._settings.dwell and checked

    def _choose(self, lane: _Lane, state: _Session, tier: int) -> None:
        """Put a session on the plan that promises most, if that is worth a change."""
        shift = self._shift(state)
        costs = self.meter.costs(state.drafter, shift)
        if costs is None:
            return
        self._refresh(lane)
        score = self._scorer(lane, costs, tier, shift)
        choices = [plan.up_to(state.max_k) for plan in self._choices(lane, costs, tier, shift)]
        best = max(choices, key=score)
        if score(best) > (1 + self._settings.gain) * score(state.plan):
            self._change(lane, state, best)
        elif abs(state.plan.acceptance - costs.accepts(1)) > 0.1:
            state.plan = replace(state.plan, acceptance=_rounded(costs))
            if not state.bounded:
                lane.plan = state.plan
        state.checked_at = state.since
        state.tier, state.promised = tier, self._rate(lane, state.plan, costs, tier, shift) / tier
        self._maybe_probe(lane, state)

    def _change(self, lane: _Lane, state: _Session, plan: Plan) -> None:
        state.plan, state.since = plan, 0
        # What one request forbids is nothing for the next ones to begin with.
        if not state.bounded:
            lane.plan, lane.since = plan, 0
        if plan.schedule != "plain":
            lane.pause = self._settings.probe_after

    def _maybe_probe(self, lane: _Lane, state: _Session) -> None:
        """Let a plain session draft for a few passes, ever more rarely while that does not pay."""
        if state.plan.schedule != "plain" or lane.until_probe > 0:
            return
        lane.until_probe = lane.pause
        lane.pause = min(2 * lane.pause, 16 * self._settings.probe_after)
        # What is known is old; what the probe shows shall count.
        self.meter.skill(state.drafter).fade(0.5)
        state.plan, state.since = _PROBE.up_to(state.max_k), 0
        state.checked_at, state.probing = 0, self._settings.probe

    def _shift(self, state: _Session) -> float:
        """How much better a session is drafted than the drafter's others, in logits, in steps that are worth a look."""
        common = self.meter.skill(state.drafter).depths[0]
        if common.trials < _WINDOW:
            return 0.0
        alpha = common.estimate(0.6, 4.0)
        shift = _logit(state.skill.estimate(alpha, 40.0)) - _logit(alpha)
        return round(2 * shift) / 2

    def _refresh(self, lane: _Lane) -> None:
        """Forget what was worked out from estimates that are old by now."""
        passes = self.meter.passes
        if passes >= lane.stale_at:
            lane.stale_at = passes + min(self._settings.refresh, max(4, passes // 2))
            lane.rates.clear()
            lane.choices.clear()

    def _rate(self, lane: _Lane, plan: Plan, costs: Costs, tier: int, shift: float) -> float:
        key = (plan, tier, shift)
        if key not in lane.rates:
            lane.rates[key] = rate(plan, costs, tier)
        return lane.rates[key]

    def _scorer(self, lane: _Lane, costs: Costs, tier: int, shift: float) -> Callable[[Plan], float]:
        """A plan's promise, corrected by what its schedule has yielded, and raised while that is little known."""
        tokens = sum(record.tokens for record in lane.records.values())
        promised = sum(record.promised for record in lane.records.values())
        # A little that slows all schedules down alike, such as other requests' prompts, says nothing about any of them.
        common = min(max((tokens + 50) / (promised + 50), 0.85), 1.0)

        def score(plan: Plan) -> float:
            record = lane.records.get(plan.schedule, _Record())
            ratio = (record.tokens + 30 * common) / (record.promised + 30)
            bonus = self._settings.bonus * 20 / (20 + record.verdicts)
            return self._rate(lane, plan, costs, tier, shift) * (min(max(ratio / common, 0.3), 2.0) + bonus)

        return score

    def _choices(self, lane: _Lane, costs: Costs, tier: int, shift: float) -> tuple[Plan, ...]:
        """The fastest plan of each schedule."""
        key = (tier, shift)
        if key not in lane.choices:

            def speed(plan: Plan) -> float:
                return self._rate(lane, plan, costs, tier, shift)

            lane.choices[key] = tuple(candidates(costs, tier, speed))
        return lane.choices[key]

    def _tuned(self, lane: _Lane, speculation: Speculation, tier: int, drafter: str) -> Plan:
        """The plan of a fixed schedule: what the request says, and what is best left to measurement."""
        plan, costs = plan_of(speculation), self.meter.costs(drafter)
        if costs is None:
            return plan
        self._refresh(lane)
        plan = replace(plan, acceptance=_rounded(costs))
        if plan.schedule == "pearl":
            return replace(plan, k=chunk(costs, tier, plan.k))
        if plan.schedule in ("saguaro", "swiftspec"):
            return _with_fresh(plan, lambda plan: self._rate(lane, plan, costs, tier, 0.0))
        return plan


def chunk(costs: Costs, sessions: int, most: int) -> int:
    """PEARL's chunk: as many tokens as are drafted during a pass; Liu et al. (2025), section 4.3."""
    return min(most, max(1, round(costs.verify(sessions) / max(costs.draft, 1e-6))))


def candidates(costs: Costs, sessions: int, speed: Callable[[Plan], float]) -> Iterator[Plan]:
    """The fastest plan of each schedule, by `speed`."""
    alpha = _rounded(costs)

    def best(schedule: str, *numbers: dict[str, int]) -> Plan:
        return max((Plan(schedule, acceptance=alpha, **given) for given in numbers), key=speed)

    yield Plan("plain", acceptance=alpha)
    yield best("sync", *({"k": k} for k in (1, 2, 3, 4, 6, 8, 12, 16)))
    yield best("amusd", *({"k": k} for k in (2, 3, 4, 6, 8, 12)))
    yield best("pearl", {"k": chunk(costs, sessions, 16)})
    deep = best("saguaro", *({"k": k, "fanout": _fanout(k), "fresh": 0} for k in (1, 2, 3, 4, 5, 6, 8, 12)))
    yield _with_fresh(deep, speed)
    wide = best("swiftspec", *({"width": w, "budget": b, "fresh": 1} for w, b in _TREES))
    yield _with_fresh(wide, speed)


_TREES = ((2, 6), (4, 6), (4, 12), (4, 24))
"""width and budget of swiftspec that are compared."""


def _fanout(k: int) -> int:
    """As many outcomes per position as can grow in one step."""
    return max(1, min(3, MAX_LEAVES // (k + 1)))


def _with_fresh(plan: Plan, speed: Callable[[Plan], float]) -> Plan:
    """The plan with the number of fresh tokens after a miss that is best."""
    return max((replace(plan, fresh=fresh) for fresh in (0, 1, 2, 3)), key=speed)


def _rounded(costs: Costs) -> float:
    # Two plans that differ in nothing that matters shall be equal.
    return round(20 * costs.accepts(1)) / 20
