"""What theory says a row of the benchmark should reach, from what its own run has cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from paceline.actors.controller import CostMeter, chunk
from paceline.actors.formulas import Costs, rate
from paceline.actors.schedules import SCHEDULES, Plan, plan_of
from paceline.actors.trace import DRAFT, VERIFY, Span
from paceline.actors.values import Speculation
from paceline.cluster.bench_stats import Case, Tally, acceptance_by_depth

_FRESH = range(4)


class PassRecord:
    """What passes took over a whole run, not only lately as the verifier's own estimates have it."""

    def __init__(self) -> None:
        self._meter = CostMeter(window=None)

    def add(self, spans: Iterable[Span]) -> None:
        """Take in what was done; passes that read a prompt do not count."""
        for span in spans:
            if span.name == VERIFY and not span.args["prompt"]:
                rows = int(span.args["sessions"]) + int(span.args["nodes"])
                self._meter.note_pass(span.end - span.start, rows)

    def applied(self, latest: Costs) -> Costs:
        """The verifier's latest estimates, with these times instead."""
        if not self._meter.passes:
            return latest
        base, node, curve = self._meter.pass_times()
        return replace(latest, verify_base=base, verify_node=node, passes=curve)


def draft_step(spans: Iterable[Span]) -> float | None:
    """How long a draft step took, in seconds: the median of the slowest drafter, for a lookup takes next to nothing."""
    steps: dict[str, list[float]] = {}
    for span in spans:
        if span.name == DRAFT:
            steps.setdefault(span.lane, []).append(span.end - span.start)
    return max(map(statistics.median, steps.values()), default=None)


def formula_rate(case: Case, speculation: Speculation, tally: Tally, costs: Costs | None) -> float | None:
    """Tokens per second that the schedule's formula gives; None where it has none, or the costs are not known.

    The acceptance by depth is this row's own; but a tree's rows do not tell the first guess from the others, so that of
    all the drafter's rows stands in for it.
    """
    if costs is None or case.schedule not in SCHEDULES:
        return None
    # Trees are what has a width.
    own = () if case.width is not None else acceptance_by_depth(tally.positions)
    # A step takes longer the more it grows, so each schedule has its own.
    draft = draft_step(tally.spans) or costs.draft
    costs = replace(costs, acceptance=own or costs.acceptance, draft=draft)
    return rate(_tuned(plan_of(speculation), costs, case.batch), costs, case.batch)


def _tuned(plan: Plan, costs: Costs, sessions: int) -> Plan:
    """The plan with what the verifier sets by its measurements, not by the request; see Controller."""
    plan = replace(plan, acceptance=costs.accepts(1))
    if plan.schedule == "pearl":
        return replace(plan, k=chunk(costs, sessions, plan.k))
    if plan.schedule in ("saguaro", "swiftspec"):
        return max((replace(plan, fresh=fresh) for fresh in _FRESH), key=lambda plan: rate(plan, costs, sessions))
    return plan
