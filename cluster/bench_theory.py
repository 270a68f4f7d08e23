"""What theory says a row of the benchmark should reach, from what its own run has cost."""

from __future__ import annotations

from dataclasses import replace

from paceline.actors.controller import chunk
from paceline.actors.formulas import Costs, rate
from paceline.actors.schedules import SCHEDULES, Plan, plan_of
from paceline.actors.values import Speculation
from paceline.cluster.bench_stats import Case, Tally, acceptance_by_depth

_FRESH = range(4)


def formula_rate(case: Case, speculation: Speculation, tally: Tally, costs: Costs | None) -> float | None:
    """Tokens per second that the schedule's formula gives; None where it has none, or the costs are not known.

    The acceptance by depth is this row's own; but a tree's rows do not tell the first guess from the others, so that of
    all the drafter's rows stands in for it.
    """
    if costs is None or case.schedule not in SCHEDULES:
        return None
    # Trees are what has a width.
    own = () if case.width is not None else acceptance_by_depth(tally.positions)
    costs = replace(costs, acceptance=own or costs.acceptance)
    return rate(_tuned(plan_of(speculation), costs, case.batch), costs, case.batch)


def _tuned(plan: Plan, costs: Costs, sessions: int) -> Plan:
    """The plan with what the verifier sets by its measurements, not by the request; see Controller."""
    plan = replace(plan, acceptance=costs.accepts(1))
    if plan.schedule == "pearl":
        return replace(plan, k=chunk(costs, sessions, plan.k))
    if plan.schedule in ("saguaro", "swiftspec"):
        return max((replace(plan, fresh=fresh) for fresh in _FRESH), key=lambda plan: rate(plan, costs, sessions))
    return plan
