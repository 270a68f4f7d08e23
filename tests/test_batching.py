"""Who takes part in a pass, and with how much."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.actors.batching import Budget, Share, Want, prefill_shares, room_for_more, share_out, spread

PLENTY = 10_000
COUNTS = st.lists(st.integers(0, 40), max_size=12)
WANTS = st.lists(
    st.builds(
        Want, st.one_of(st.just(1), st.integers(2, 60)), st.integers(0, 20), st.integers(0, 7), st.integers(0, 9)
    ),
    max_size=10,
)


def decoder(nodes: int = 0, spare: int = 0, served: int = 0) -> Want:
    return Want(1, nodes, spare, served)


def prompt(uncached: int, spare: int = 0, served: int = 0) -> Want:
    return Want(uncached, 0, spare, served)


def shared(*wants: Want, tokens: int = 16, chunk: int = 6, free: int = PLENTY) -> list[tuple[int, int]] | None:
    shares = share_out(wants, Budget(tokens, chunk), free, block_size=4)
    return None if shares is None else [(share.tokens, share.nodes) for share in shares]


def test_each_gets_what_it_wants_while_there_is_enough() -> None:
    assert shared(decoder(3), prompt(4), decoder(2)) == [(1, 3), (4, 0), (1, 2)]
    assert shared() == []


def test_a_prompt_gets_a_chunk_beside_others_and_the_whole_pass_alone() -> None:
    assert shared(decoder(3), prompt(90)) == [(1, 3), (6, 0)]
    alone = share_out([prompt(90)], Budget(16, 6).alone(), PLENTY, 4)
    assert alone == [Share(16, 0)]


def test_a_prompt_gets_something_however_many_decode() -> None:
    budget = Budget(16, 6)
    wants = [decoder(9) for _ in range(budget.decoders(prefilling=True))]
    shares = share_out([*wants, prompt(90)], budget, PLENTY, 4)
    assert shares is not None
    assert shares[-1] == Share(2, 0)
    assert shares[:-1] == [Share(1, 0)] * 14


def test_nodes_are_shared_evenly_and_those_served_longest_ago_get_the_odd_one() -> None:
    assert shared(decoder(9, served=3), decoder(1, served=2), decoder(9, served=1)) == [(1, 6), (1, 1), (1, 6)]
    assert shared(decoder(9, served=2), decoder(9, served=1), tokens=7) == [(1, 2), (1, 3)]


def test_the_oldest_prompt_gets_half_and_every_other_one_gets_on() -> None:
    assert prefill_shares([prompt(90), prompt(90), prompt(90), prompt(3)], 20) == [13, 2, 2, 3]
    assert prefill_shares([prompt(2), prompt(90), prompt(90)], 20) == [2, 9, 9]


def test_prompts_that_a_small_budget_leaves_out_have_their_turn_next() -> None:
    served = [0] * 9
    gaps = [0] * 9
    for number in range(1, 60):
        given_now = prefill_shares([prompt(90, served=last) for last in served], 4)
        assert sum(given_now) == 4
        for i, tokens in enumerate(given_now):
            if tokens:
                gaps[i], served[i] = max(gaps[i], number - served[i]), number
    # Two of them beside the oldest one in each pass.
    assert max(gaps) <= 5


def test_scarce_blocks_go_to_tokens_then_to_prompts_then_to_nodes() -> None:
    wants = [decoder(6), prompt(12), decoder(2, spare=1)]
    assert shared(*wants, free=1) is None
    assert shared(*wants, free=2) == [(1, 3), (4, 0), (1, 0)]
    assert shared(*wants, free=3) == [(1, 3), (6, 0), (1, 0)]
    assert shared(*wants, free=4) == [(1, 6), (6, 0), (1, 0)]
    assert shared(*wants, free=5) == [(1, 6), (6, 0), (1, 2)]


@given(COUNTS, st.integers(0, 60))
def test_a_fair_division_uses_the_budget_and_favours_nobody(wanted: list[int], budget: int) -> None:
    got = spread(wanted, budget)
    assert all(0 <= g <= w for g, w in zip(got, wanted, strict=True))
    assert sum(got) == min(sum(wanted), budget)
    for g, w in zip(got, wanted, strict=True):
        assert g == w or g >= max(got) - 1, "someone went short while another got more"


@given(WANTS, st.integers(2, 40), st.integers(1, 40), st.integers(0, 30))
def test_every_pass_keeps_both_budgets_and_gets_on(wants: list[Want], tokens: int, chunk: int, free: int) -> None:
    budget = Budget(tokens, chunk)
    seats = count()
    room = budget.decoders(any(want.uncached > 1 for want in wants))
    wants = [want for want in wants if want.uncached > 1 or next(seats) < room]
    shares = share_out(wants, budget, free, block_size=4)
    if shares is None:
        assert sum(want.spare == 0 for want in wants) > free
        return
    for want, share in zip(wants, shares, strict=True):
        assert 0 <= share.tokens <= want.uncached
        assert 0 <= share.nodes <= (want.nodes if want.uncached == 1 else 0)
        assert share.tokens == 1 or want.uncached > 1, "a session that decodes was left out"
    assert sum(share.tokens + share.nodes for share in shares) <= tokens
    fed = [share.tokens for want, share in zip(wants, shares, strict=True) if want.uncached > 1]
    assert sum(fed) <= chunk
    assert not fed or any(fed), "no prompt gets on"
    used = [-(-max(0, s.tokens + s.nodes - w.spare) // 4) for w, s in zip(wants, shares, strict=True)]
    assert sum(used) <= free


def test_room_is_kept_for_what_runs_already() -> None:
    assert room_for_more(10, [], 4) == 9
    # 5 slots take two blocks, -3 none, and each grows by one.
    assert room_for_more(10, [5, -3], 4) == 5


@pytest.mark.parametrize(("tokens", "chunk", "field"), [(1, 6, "pass_tokens"), (16, 0, "prefill_chunk")])
def test_a_budget_that_would_let_somebody_starve_is_refused(tokens: int, chunk: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Budget(tokens, chunk)
