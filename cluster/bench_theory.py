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
_ALL = "all"


class CostRecord:
    """What passes and draft steps took over a whole run, not only lately as the verifier's own estimates have it."""

    def __init__(self) -> None:
        self._meter = CostMeter(window=None)

    def add(self, spans: Iterable[Span]) -> None:
        """Take in what was done."""
        for span in spans:
            if span.name == VERIFY and not span.args["prompt"]:
                rows = int(span.args["sessions"]) + int(span.args["nodes"])
                self._meter.note_pass(span.end - span.start, rows)
            elif span.name == DRAFT:
                self._meter.note_draft_step(_ALL, span.end - span.start)

    def applied(self, latest: Costs) -> Costs:
        """The verifier's latest estimates, with these times instead."""
        mine = self._meter.costs(_ALL)
        if mine is None:
            return latest
        timed = {name: getattr(mine, name) for name in ("verify_base", "verify_node", "draft", "passes")}
        return replace(latest, **timed)


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
    steps = [span.end - span.start for span in tally.spans if span.name == DRAFT]
    draft = statistics.median(steps) if steps else costs.draft
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
