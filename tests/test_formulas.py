"""The speed formulas, where their value is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paceline.actors.formulas import Costs, best_k, expected_tokens, rate
from paceline.actors.schedules import SCHEDULES, Plan

COSTS = Costs(verify_base=0.1, verify_node=0.0, draft=0.01, latency=0.0, acceptance=(0.8,), second=0.5)


@pytest.mark.parametrize(("alpha", "k"), [(0.8, 4), (0.5, 1), (0.95, 12)])
def test_expected_tokens_are_leviathan_s(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_expected_tokens_by_position() -> None:
    assert expected_tokens((0.5, 0.8), 3) == pytest.approx(1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.8)
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens((0.3,), 0) == 1


def test_plain_and_sync_are_the_text_book_s() -> None:
    costs = replace(COSTS, verify_node=0.002, latency=0.02)
    assert rate(Plan("plain"), costs) == pytest.approx(1 / 0.102)
    assert rate(Plan("sync", k=4), costs) == pytest.approx(expected_tokens(0.8, 4) / (0.11 + 0.04 + 0.04))


def test_sync_sessions_wait_together_and_share_the_passes() -> None:
    costs = replace(COSTS, verify_node=0.002)
    assert rate(Plan("sync", k=4), costs, 8) == pytest.approx(8 * expected_tokens(0.8, 4) / (0.1 + 0.002 * 40 + 0.04))


def test_the_best_k_grows_with_the_acceptance_and_falls_with_the_cost_of_drafts() -> None:
    depths = [best_k(replace(COSTS, acceptance=(alpha,))) for alpha in (0.3, 0.6, 0.8, 0.95)]
    assert depths == sorted(depths)
    assert best_k(replace(COSTS, draft=0.05)) < best_k(COSTS)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("sessions", [1, 5])
def test_a_drafter_that_is_never_right_makes_no_schedule_faster_than_plain(schedule: str, sessions: int) -> None:
    costs = replace(COSTS, acceptance=(0.0,), second=0.0, verify_node=0.001)
    plain = rate(Plan("plain"), costs, sessions)
    assert 0 < rate(Plan(schedule, acceptance=0.0), costs, sessions) <= plain * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["sync", "amusd", "pearl"])
def test_no_chain_is_faster_than_the_hard_ceiling(schedule: str) -> None:
    """However deep a chain is, a pass yields 1 / (1 - alpha) tokens at most."""
    for draft in (0.0, 0.001, 0.02):
        for k in (1, 4, 16, 32):
            assert rate(Plan(schedule, k=k), replace(COSTS, draft=draft)) <= 1 / (1 - 0.8) / 0.1 + 1e-9


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"plain"}))
def test_more_acceptance_is_faster_and_more_latency_is_not(schedule: str) -> None:
    plan = Plan(schedule, k=4)
    speeds = [rate(plan, replace(COSTS, acceptance=(alpha,))) for alpha in (0.2, 0.5, 0.8, 0.95)]
    assert speeds == sorted(speeds)
    delayed = [rate(plan, replace(COSTS, latency=latency)) for latency in (0.0, 0.01, 0.02, 0.05)]
    assert delayed == sorted(delayed, reverse=True)


def test_prepared_outcomes_hide_the_latency_that_sync_pays_for() -> None:
    near, far = COSTS, replace(COSTS, latency=0.02)
    plan = Plan("saguaro", k=4, fresh=0, acceptance=0.8)
    assert rate(plan, far) == pytest.approx(rate(plan, near), rel=0.02)
    assert rate(Plan("sync", k=4), far) < 0.8 * rate(Plan("sync", k=4), near)


def test_measured_passes_count_before_the_line() -> None:
    costs = Costs(0.1, 0.01, 0.01, passes=((2, 0.2), (6, 0.28)))
    assert [costs.verify(rows) for rows in (1, 2, 4, 6, 10)] == pytest.approx([0.19, 0.2, 0.24, 0.28, 0.32])


def test_the_mean_of_a_session_s_passes_counts_not_the_pass_of_its_mean() -> None:
    # Up to four rows a pass takes 0.1, over thirteen 0.4: a mean of few nodes hides what the many cost.
    bent = Costs(0.1, 0.0, 0.02, acceptance=(0.5,), passes=((1, 0.1), (4, 0.1), (13, 0.4)))
    fresh, full = 2, 8
    # amusd's passes are such of `fresh` and of `full` nodes; by its own argument, after so many accepted tokens.
    again, after = 0.5 ** (full + 1), 0.5 ** (fresh + 1)
    tokens = (1 - again) * expected_tokens(0.5, fresh) + after * expected_tokens(0.5, full)
    seconds = (1 - again) * (bent.verify(fresh + 1) + fresh * 0.02) + after * bent.verify(full + 1)
    plan = Plan("amusd", full)
    assert rate(plan, bent) == pytest.approx(tokens / seconds)


def test_a_tree_s_deeper_guesses_count_by_their_own_acceptance() -> None:
    tree = Plan("swiftspec", width=4, budget=12)

    def speed(*acceptance: float) -> float:
        return rate(tree, Costs(0.1, 0.0, 0.01, acceptance=acceptance))

    assert speed(0.8, 0.3, 0.3, 0.3, 0.3) == speed(0.8, 0.3) < 0.9 * speed(0.8)


def test_the_smallest_pass_never_comes_for_nothing() -> None:
    steep = Costs(0.0, 0.002, 0.01, passes=((30, 0.02), (60, 0.08)))
    assert steep.verify(1) == 0.01
