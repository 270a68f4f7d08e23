"""The schedules as plain functions of plain values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paceline.actors.schedules import (
    MAX_CHILDREN,
    MAX_NODES,
    SCHEDULES,
    Expand,
    Plan,
    Verify,
    Wait,
    Waiting,
    fan_out,
    plan_of,
)
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import Speculation

IDLE = Waiting(drafting=True, done=False, waited=0.0, patience=0.5)
HIT = Waiting(drafting=True, done=False, waited=0.0, patience=0.5, guessed=True, hit=True)


def _chain(length: int, base_len: int = 7) -> DraftTree:
    nodes = [NewNode(i, i - 1 if i > 1 else ROOT, 10 + i, -0.1) for i in range(1, length + 1)]
    return DraftTree(base_len).grow(nodes, base_len).tree


@pytest.mark.parametrize("length", [0, 1, 5])
def test_plain_grows_nothing_and_verifies_the_root_alone(length: int) -> None:
    plain = SCHEDULES["plain"]
    assert plain.grow(_chain(length), Plan("plain", 4)) == ()
    assert plain.ripe(_chain(length), Plan("plain", 4), IDLE) == Verify()


def test_sync_grows_a_chain_of_k_and_then_rests() -> None:
    """Leviathan et al. 2023, algorithm 1: gamma guesses, one after the other."""
    sync, plan = SCHEDULES["sync"], Plan("sync", 3)
    assert sync.grow(_chain(0), plan) == (Expand(ROOT, depth=3),)
    assert sync.grow(_chain(2), plan) == (Expand(2, depth=1),)
    assert sync.grow(_chain(3), plan) == ()


def test_sync_waits_for_all_k_but_not_for_ever() -> None:
    sync, plan = SCHEDULES["sync"], Plan("sync", 3)
    assert sync.ripe(_chain(2), plan, IDLE) == Wait(0.5)
    assert sync.ripe(_chain(3), plan, IDLE) == Verify((1, 2, 3))
    for hopeless in (
        Waiting(drafting=False, done=False, waited=0.0, patience=0.5),
        Waiting(drafting=True, done=True, waited=0.0, patience=0.5),
        Waiting(drafting=True, done=False, waited=0.6, patience=0.5),
    ):
        assert sync.ripe(_chain(2), plan, hopeless) == Verify((1, 2))
        assert sync.ripe(_chain(0), plan, hopeless) == Verify()


def test_amusd_drafts_on_while_k_tokens_are_verified() -> None:
    """McDanel 2024, section 3: the drafter does not stop at what the verifier has taken."""
    amusd, plan = SCHEDULES["amusd"], Plan("amusd", 3)
    assert amusd.grow(_chain(3), plan) == (Expand(3, depth=4),)
    assert amusd.grow(_chain(7), plan) == ()


def test_amusd_verifies_what_is_pending_once_it_is_two() -> None:
    amusd, plan = SCHEDULES["amusd"], Plan("amusd", 3)
    assert amusd.ripe(_chain(1), plan, IDLE) == Wait(0.5)
    assert amusd.ripe(_chain(2), plan, IDLE) == Verify((1, 2))
    assert amusd.ripe(_chain(6), plan, IDLE) == Verify((1, 2, 3))
    assert amusd.ripe(_chain(1), Plan("amusd", 1), IDLE) == Verify((1,))


@pytest.mark.parametrize("name", ["sync", "amusd"])
def test_after_a_divergence_the_chain_starts_at_the_committed_prefix(name: str) -> None:
    tree = _chain(3).reroot([11, 99])
    assert SCHEDULES[name].grow(tree, Plan(name, 3))[0].parent == ROOT


def test_amusd_goes_on_below_an_accepted_chain() -> None:
    """All k accepted and the bonus token guessed as well: what was grown beyond them is the next draft."""
    tree = _chain(7).reroot([11, 12, 13, 14])
    amusd, plan = SCHEDULES["amusd"], Plan("amusd", 3)
    assert amusd.ripe(tree, plan, IDLE) == Verify((5, 6, 7))
    assert amusd.grow(tree, plan) == (Expand(7, depth=4),)


def test_of_several_children_the_likeliest_is_followed() -> None:
    nodes = [NewNode(1, ROOT, 5, -2.0), NewNode(2, ROOT, 6, -0.5), NewNode(3, 2, 7, -1.0), NewNode(4, 1, 8, -0.1)]
    tree = DraftTree(1).grow(nodes, 1).tree
    assert SCHEDULES["sync"].ripe(tree, Plan("sync", 2), IDLE) == Verify((2, 3))


def _tree(*nodes: tuple[int, int, int, float], base_len: int = 7) -> DraftTree:
    return DraftTree(base_len).grow([NewNode(*node) for node in nodes], base_len).tree


def test_auto_begins_with_one_of_the_others_and_an_unknown_name_is_refused() -> None:
    assert plan_of(Speculation("auto", 6)).schedule in SCHEDULES
    assert plan_of(Speculation("swiftspec", 6, 2, 3, 9)) == Plan("swiftspec", 6, 2, 3, 9)
    with pytest.raises(ValueError, match=r"no schedule 'fast', only plain, .*auto"):
        plan_of(Speculation("fast"))


class TestPearl:
    """Liu et al. 2025, section 4 and figure 3: pre-verify after a rejection, post-verify while chunks are accepted."""

    pearl, plan = SCHEDULES["pearl"], Plan("pearl", 4)

    def test_pre_verify_checks_the_first_token_of_a_chunk_while_it_grows(self) -> None:
        assert self.pearl.ripe(_chain(0), self.plan, IDLE) == Verify()
        assert self.pearl.ripe(_chain(2), self.plan, IDLE) == Verify()

    def test_first_token_rejected_the_drafter_starts_again_and_pre_verify_is_next(self) -> None:
        after = _chain(4).reroot([99])
        assert self.pearl.grow(after, self.plan)[0].parent == ROOT
        assert self.pearl.ripe(after, self.plan, IDLE) == Verify()

    def test_first_token_accepted_the_rest_of_the_chunk_is_post_verified_once_it_is_whole(self) -> None:
        after = _chain(3).reroot([11])
        assert self.pearl.ripe(after, self.plan, HIT) == Wait(0.5)
        assert self.pearl.ripe(_chain(1).reroot([11]), self.plan, replace(HIT, hit=False)) == Wait(0.5)
        assert self.pearl.ripe(_chain(4).reroot([11]), self.plan, HIT) == Verify((2, 3, 4))

    def test_all_accepted_the_next_chunk_was_drafted_meanwhile(self) -> None:
        growing = _chain(4)
        assert self.pearl.grow(growing, self.plan) == (Expand(4, depth=5),)
        after = _chain(9).reroot([11, 12, 13, 14, 15])
        assert self.pearl.ripe(after, self.plan, HIT) == Verify((6, 7, 8, 9))

    def test_rejected_at_i_what_hung_below_is_gone_and_pre_verify_is_next(self) -> None:
        after = _chain(9).reroot([11, 12, 99])
        assert len(after) == 0
        assert self.pearl.ripe(after, self.plan, IDLE) == Verify()

    def test_a_chunk_of_one_is_never_waited_for_longer_than_one_token(self) -> None:
        assert self.pearl.ripe(_chain(1), Plan("pearl", 1), HIT) == Verify((1,))


class TestSaguaro:
    """Kumar, Dao and May 2026, section 4: prepare for what the verification may say."""

    saguaro, plan = SCHEDULES["saguaro"], Plan("saguaro", k=2, fanout=1, acceptance=0.5)

    def test_the_draft_that_is_verified_next_comes_first(self) -> None:
        assert self.saguaro.grow(_chain(0), self.plan) == (Expand(ROOT, depth=2),)
        assert self.saguaro.grow(_chain(1), self.plan) == (Expand(1, depth=1),)

    def test_then_other_outcomes_are_prepared_under_each_position_likelier_cuts_first(self) -> None:
        # a = 0.5, k = 2: the draft is cut at 0, 1, 2 with probabilities 1/2, 1/4, 1/4; roots 0.71, 0.5, 0.5 of 3.
        assert fan_out(0.5, 2, 3) == (1, 1, 1)
        assert self.saguaro.grow(_chain(2), self.plan) == (
            Expand(ROOT, width=2),
            Expand(1, width=2),
            Expand(2, width=1),
        )

    def test_each_outcome_is_continued_by_k(self) -> None:
        tree = _tree((1, ROOT, 11, -0.1), (2, 1, 12, -0.1), (3, ROOT, 50, -2.0), (4, 1, 60, -2.0), (5, 2, 13, -0.1))
        assert self.saguaro.grow(tree, self.plan) == (Expand(5, depth=2), Expand(3, depth=2), Expand(4, depth=2))
        grown = tree.grow([NewNode(6, 5, 14, -0.1), NewNode(7, 6, 15, -0.1)], 7).tree
        assert self.saguaro.grow(grown, self.plan) == (Expand(3, depth=2), Expand(4, depth=2))

    def test_on_a_hit_the_prepared_branch_is_verified_at_once(self) -> None:
        nodes = ((1, ROOT, 11, -0.1), (2, 1, 12, -0.1), (4, 1, 60, -2.0), (6, 4, 61, -0.5), (7, 6, 62, -0.5))
        after = _tree(*nodes).reroot([11, 60])
        assert self.saguaro.ripe(after, self.plan, HIT) == Verify((6, 7))

    def test_a_hit_on_a_branch_that_is_half_grown_takes_what_is_there(self) -> None:
        after = _tree((1, ROOT, 11, -0.1), (4, 1, 60, -2.0), (6, 4, 61, -0.5)).reroot([11, 60])
        assert self.saguaro.ripe(after, self.plan, HIT) == Verify((6,))

    def test_on_a_miss_a_short_fresh_draft_or_one_token_whichever_pays(self) -> None:
        missed = _chain(3).reroot([11, 99])
        assert self.saguaro.ripe(missed, Plan("saguaro", 4, fresh=2), IDLE) == Wait(0.5)
        assert self.saguaro.ripe(_chain(2), Plan("saguaro", 4, fresh=2), IDLE) == Verify((1, 2))
        assert self.saguaro.ripe(missed, Plan("saguaro", 4, fresh=0), IDLE) == Verify()

    def test_all_accepted_and_the_bonus_token_prepared_is_a_hit_too(self) -> None:
        tree = _tree((1, ROOT, 11, -0.1), (2, 1, 12, -0.1), (3, 2, 13, -0.1), (4, 3, 14, -0.1), (5, 4, 15, -0.1))
        assert self.saguaro.ripe(tree.reroot([11, 12, 13]), self.plan, HIT) == Verify((4, 5))

    def test_growth_ends_at_the_bound(self) -> None:
        wide = Plan("saguaro", k=2, fanout=8)
        assert self.saguaro.grow(_chain(MAX_NODES), wide) == ()


class TestFanOut:
    """The capped geometric rule: F_j ~ P(cut at j)^(1 / (1 + r)), with all of a^k left at the last position."""

    def test_it_falls_geometrically_and_rises_at_the_cap(self) -> None:
        assert fan_out(0.8, 4, 25) == (5, 5, 4, 4, 7)
        # sqrt(1/2), sqrt(1/4), sqrt(1/4) of 10 tenths of their sum.
        assert fan_out(0.5, 2, 10) == (4, 3, 3)

    def test_a_poor_drafter_s_first_position_gets_most(self) -> None:
        assert fan_out(0.05, 4, 10) == (8, 2, 0, 0, 0)

    @pytest.mark.parametrize("acceptance", [0.0, 0.3, 1.0])
    def test_no_position_gets_more_than_a_node_may_have(self, acceptance: float) -> None:
        assert max(fan_out(acceptance, 3, 200)) == MAX_CHILDREN


class TestSwiftSpec:
    """Zhang et al. 2025, sections 3.1 and 3.2: a tree grown best first, through every verification."""

    swiftspec, plan = SCHEDULES["swiftspec"], Plan("swiftspec", width=2, budget=3)

    def test_the_root_s_children_come_first(self) -> None:
        assert self.swiftspec.grow(_tree(), self.plan) == (Expand(ROOT, width=2),)

    def test_then_the_w_leaves_of_highest_cumulative_log_q(self) -> None:
        tree = _tree((1, ROOT, 5, -0.2), (2, ROOT, 6, -1.0), (3, 1, 7, -0.3), (4, 1, 8, -2.0))
        assert self.swiftspec.grow(tree, self.plan) == (Expand(3, width=2), Expand(2, width=2))

    def test_the_best_subtree_of_b_nodes_is_verified(self) -> None:
        tree = _tree((1, ROOT, 5, -0.2), (2, ROOT, 6, -1.0), (3, 1, 7, -0.3), (4, 1, 8, -2.0))
        assert self.swiftspec.ripe(tree, self.plan, HIT) == Verify((1, 2, 3))

    def test_what_survives_a_verdict_stays_under_its_name_and_is_verified_at_once(self) -> None:
        tree = _tree((1, ROOT, 5, -0.2), (2, ROOT, 6, -1.0), (3, 1, 7, -0.3), (4, 3, 8, -0.1)).reroot([5])
        assert set(tree.nodes) == {3, 4}
        assert self.swiftspec.ripe(tree, self.plan, HIT) == Verify((3, 4))
        assert self.swiftspec.grow(tree, self.plan) == (Expand(4, width=2),)

    def test_after_a_miss_the_tree_starts_anew(self) -> None:
        missed = _tree((1, ROOT, 5, -0.2)).reroot([9])
        assert self.swiftspec.ripe(missed, self.plan, IDLE) == Wait(0.5)
        assert self.swiftspec.grow(missed, self.plan) == (Expand(ROOT, width=2),)

    def test_growth_ends_at_the_bound(self) -> None:
        assert self.swiftspec.grow(_chain(MAX_NODES), self.plan) == ()
