"""The schedules as plain functions of plain values."""

from __future__ import annotations

import pytest
from paceline.actors.schedules import SCHEDULES, Expand, Verify, Wait, Waiting
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import Speculation

IDLE = Waiting(drafting=True, done=False, waited=0.0, patience=0.5)


def _chain(length: int, base_len: int = 7) -> DraftTree:
    nodes = [NewNode(i, i - 1 if i > 1 else ROOT, 10 + i, -0.1) for i in range(1, length + 1)]
    return DraftTree(base_len).grow(nodes, base_len).tree


@pytest.mark.parametrize("length", [0, 1, 5])
def test_plain_grows_nothing_and_verifies_the_root_alone(length: int) -> None:
    plain = SCHEDULES["plain"]
    assert plain.grow(_chain(length), Speculation("plain", 4)) == ()
    assert plain.ripe(_chain(length), Speculation("plain", 4), IDLE) == Verify()


def test_sync_grows_a_chain_of_k_and_then_rests() -> None:
    """Leviathan et al. 2023, algorithm 1: gamma guesses, one after the other."""
    sync, speculation = SCHEDULES["sync"], Speculation("sync", 3)
    assert sync.grow(_chain(0), speculation) == (Expand(ROOT, depth=3),)
    assert sync.grow(_chain(2), speculation) == (Expand(2, depth=1),)
    assert sync.grow(_chain(3), speculation) == ()


def test_sync_waits_for_all_k_but_not_for_ever() -> None:
    sync, speculation = SCHEDULES["sync"], Speculation("sync", 3)
    assert sync.ripe(_chain(2), speculation, IDLE) == Wait(0.5)
    assert sync.ripe(_chain(3), speculation, IDLE) == Verify((1, 2, 3))
    for hopeless in (
        Waiting(drafting=False, done=False, waited=0.0, patience=0.5),
        Waiting(drafting=True, done=True, waited=0.0, patience=0.5),
        Waiting(drafting=True, done=False, waited=0.6, patience=0.5),
    ):
        assert sync.ripe(_chain(2), speculation, hopeless) == Verify((1, 2))
        assert sync.ripe(_chain(0), speculation, hopeless) == Verify()


def test_amusd_drafts_on_while_k_tokens_are_verified() -> None:
    """McDanel 2024, section 3: the drafter does not stop at what the verifier has taken."""
    amusd, speculation = SCHEDULES["amusd"], Speculation("amusd", 3)
    assert amusd.grow(_chain(3), speculation) == (Expand(3, depth=4),)
    assert amusd.grow(_chain(7), speculation) == ()


def test_amusd_verifies_what_is_pending_once_it_is_two() -> None:
    amusd, speculation = SCHEDULES["amusd"], Speculation("amusd", 3)
    assert amusd.ripe(_chain(1), speculation, IDLE) == Wait(0.5)
    assert amusd.ripe(_chain(2), speculation, IDLE) == Verify((1, 2))
    assert amusd.ripe(_chain(6), speculation, IDLE) == Verify((1, 2, 3))
    assert amusd.ripe(_chain(1), Speculation("amusd", 1), IDLE) == Verify((1,))


@pytest.mark.parametrize("name", ["sync", "amusd"])
def test_after_a_divergence_the_chain_starts_at_the_committed_prefix(name: str) -> None:
    tree = _chain(3).reroot([11, 99])
    assert SCHEDULES[name].grow(tree, Speculation(name, 3))[0].parent == ROOT


def test_amusd_goes_on_below_an_accepted_chain() -> None:
    """All k accepted and the bonus token guessed as well: what was grown beyond them is the next draft."""
    tree = _chain(7).reroot([11, 12, 13, 14])
    amusd, speculation = SCHEDULES["amusd"], Speculation("amusd", 3)
    assert amusd.ripe(tree, speculation, IDLE) == Verify((5, 6, 7))
    assert amusd.grow(tree, speculation) == (Expand(7, depth=4),)


def test_of_several_children_the_likeliest_is_followed() -> None:
    nodes = [NewNode(1, ROOT, 5, -2.0), NewNode(2, ROOT, 6, -0.5), NewNode(3, 2, 7, -1.0), NewNode(4, 1, 8, -0.1)]
    tree = DraftTree(1).grow(nodes, 1).tree
    assert SCHEDULES["sync"].ripe(tree, Speculation("sync", 2), IDLE) == Verify((2, 3))
