"""The controller by itself: what it learns from what it is told, and what it makes of it."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from paceline.actors.controller import Controller, ControllerSettings, CostMeter, Level, chunk, levels
from paceline.actors.formulas import Costs
from paceline.actors.schedules import SCHEDULES, Plan
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import Speculation

AUTO = Speculation("auto")
RIGHT, WRONG = Level(1, 0), Level(1, -1)


def _fed(meter: CostMeter, passes: int = 40, seconds: float = 0.1, rows: int = 5) -> CostMeter:
    for _ in range(passes):
        meter.note_pass(seconds, rows)
        meter.note_draft_step("d", 0.01)
        meter.note_latency("d", 0.002)
    return meter


def _live(controller: Controller, session: int, alpha: float, verdicts: int, draft: float = 0.01) -> list[Plan]:
    """A session goes on, and every schedule yields what its chain would; its plans."""
    rng, plans = random.Random(session), []
    controller.note_pass(0.1, 1)
    for _ in range(verdicts):
        plan = controller.plan(session, AUTO, 1, "d")
        plans.append(plan)
        depth = {"plain": 0, "swiftspec": plan.budget}.get(plan.schedule, plan.k)
        seen: list[Level] = []
        while len(seen) < depth and (not seen or seen[-1] == RIGHT):
            seen.append(RIGHT if rng.random() < alpha else WRONG)
        controller.note_growth("d", draft)
        seconds = 0.1 + 0.01 * depth
        controller.note_pass(seconds, 1 + depth)
        controller.note_verdict(session, seen, 1 + seen.count(RIGHT), seconds)
    return plans


def test_levels_tell_which_guess_of_how_many_was_right() -> None:
    nodes = [NewNode(1, ROOT, 5, -2.0), NewNode(2, ROOT, 6, -0.5), NewNode(3, 1, 7, -0.1), NewNode(4, 1, 8, -0.2)]
    mirror = DraftTree(1).grow(nodes, 1).tree
    tree = mirror.subtree((1, 2, 3, 4))
    assert levels(mirror, tree, (0,)) == (Level(2, 1), Level(2, -1))
    assert levels(mirror, tree, (0, 2)) == (Level(2, 1), Level(2, 0))
    assert levels(mirror, tree, ()) == (Level(2, -1),)
    assert levels(mirror, mirror.subtree(()), ()) == ()


def test_an_outlier_moves_no_estimate() -> None:
    meter = _fed(CostMeter())
    for _ in range(5):
        meter.note_pass(3.0, 5)
        meter.note_draft_step("d", 1.0)
        meter.note_latency("d", 0.5)
    costs = meter.costs("d")
    assert costs is not None
    assert (costs.verify(5), costs.draft, costs.latency) == pytest.approx((0.1, 0.01, 0.002))


def test_estimates_follow_a_change() -> None:
    meter = _fed(_fed(CostMeter()), seconds=0.2)
    costs = meter.costs("d")
    assert costs is not None
    assert costs.verify(5) == pytest.approx(0.2)


def test_acceptance_is_learned_by_depth_and_shrinks_to_the_depth_above() -> None:
    meter = _fed(CostMeter())
    for i in range(200):
        meter.note_walk("d", (RIGHT, RIGHT if i % 2 else WRONG))
    costs = meter.costs("d")
    assert costs is not None
    assert costs.accepts(1) > 0.97
    assert costs.accepts(2) == pytest.approx(0.54, abs=0.03)
    assert costs.accepts(3) == pytest.approx(costs.accepts(2))


def test_the_next_guesses_are_told_apart_from_the_first() -> None:
    meter = _fed(CostMeter())
    for i in range(300):
        meter.note_walk("d", (Level(3, (0, 1, -1)[i % 3]),))
    costs = meter.costs("d")
    assert costs is not None
    # One right of three tries: rank 1 at once, or neither of two.
    assert costs.second == pytest.approx(1 / 3, abs=0.03)


def test_before_anything_is_known_auto_is_modest_and_asynchronous() -> None:
    plan = Controller().plan(1, AUTO, 1, "d")
    assert (plan.schedule, plan.k, plan.fresh) == ("saguaro", 4, 0)
    assert plan.within_limits()


def test_without_a_drafter_auto_is_plain() -> None:
    assert Controller().plan(1, AUTO, 1).schedule == "plain"


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_fixed_schedule_keeps_what_the_request_says(schedule: str) -> None:
    controller, wanted = Controller(), Speculation(schedule, k=7, fanout=2, width=3, budget=9)
    _fed(controller.meter)
    for _ in range(60):
        controller.meter.note_walk("d", (RIGHT, WRONG))
    plan = controller.plan(1, wanted, 1, "d")
    assert (plan.schedule, plan.fanout, plan.width, plan.budget) == (schedule, 2, 3, 9)
    assert plan.k == 7
    assert plan.acceptance == pytest.approx(0.95, abs=0.06)


def test_pearl_s_chunk_is_what_is_drafted_during_a_pass() -> None:
    costs = Costs(0.1, 0.0, 0.03)
    assert (chunk(costs, 1, 10), chunk(costs, 1, 2)) == (3, 2)
    controller = Controller()
    _fed(controller.meter)
    assert controller.plan(1, Speculation("pearl", k=16), 1, "d").k == 10


def test_a_bad_drafter_ends_in_plain_and_costs_little_from_then_on() -> None:
    controller = Controller()
    plans = _live(controller, 1, alpha=0.0, verdicts=2000)
    drafted = [plan for plan in plans[200:] if plan.schedule != "plain"]
    # Each of these passes takes a tenth or two longer than a plain one.
    assert 0 < len(drafted) < 0.1 * len(plans)
    assert {plan.schedule for plan in plans[-50:]} == {"plain"}


def test_a_drafter_that_becomes_good_is_found_by_a_probe() -> None:
    controller = Controller(ControllerSettings(probe_after=50))
    _live(controller, 1, alpha=0.0, verdicts=300)
    plans = _live(controller, 1, alpha=0.95, verdicts=600)
    assert plans[-1].schedule != "plain"


def test_a_new_session_begins_with_what_others_have_learned() -> None:
    controller = Controller()
    last = _live(controller, 1, alpha=0.9, verdicts=300)[-1]
    controller.forget(1)
    assert controller.plan(2, AUTO, 1, "d") == last


def test_equal_plans_are_kept_and_most_calls_cost_nothing() -> None:
    controller = Controller()
    plans = _live(controller, 1, alpha=0.8, verdicts=600)
    assert sum(a != b for a, b in itertools.pairwise(plans[300:])) < 8
    started = time.perf_counter()
    for _ in range(2000):
        controller.plan(1, AUTO, 1, "d")
    assert (time.perf_counter() - started) / 2000 < 50e-6


def test_a_schedule_that_yields_less_than_it_promises_is_left() -> None:
    """Whatever auto chooses yields a third of its promise, plain all of it: plain it must become."""
    controller = Controller()
    for _ in range(1500):
        plan = controller.plan(1, AUTO, 1, "d")
        plain = plan.schedule == "plain"
        controller.note_growth("d", 0.01)
        controller.note_pass(0.1, 1 if plain else 1 + plan.k)
        seconds = 0.1 if plain else 0.6
        controller.note_verdict(1, () if plain else (RIGHT, RIGHT, WRONG), 1 if plain else 3, seconds)
    assert plan.schedule == "plain"


def test_passes_that_a_coarse_clock_does_not_see_are_no_fault() -> None:
    controller = Controller()
    for _ in range(200):
        controller.note_pass(0.0, 4)
        controller.note_growth("d", 0.001)
        for session, schedule in enumerate(("saguaro", "swiftspec", "pearl", "auto")):
            controller.plan(session, Speculation(schedule), 4, "d")
            controller.note_verdict(session, [Level(1, 0)], 2, 0.0)
