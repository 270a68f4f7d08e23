"""What the benchmark derives, from deltas made by hand."""

from __future__ import annotations

import pytest
from paceline.actors.trace import Span
from paceline.actors.values import Stats
from paceline.cluster.bench_stats import Answer, Case, Group, Tally, acceptance_by_depth

CASE = Case("paceline", "sync", "ngram", "ngram", 2, 0.0, devices=2, dtype="float32", k=3)


def answer(tokens: int, *arrivals: tuple[float, int], seconds: float, **stats: object) -> Answer:
    counts = Stats("sync", **({"verify_passes": len(arrivals)} | stats))  # type: ignore[arg-type]
    return Answer(tuple(range(tokens)), arrivals, seconds, counts)


def test_a_piece_of_n_tokens_counts_as_n_intervals():
    one = answer(6, (0.5, 1), (1.1, 3), (1.2, 2), seconds=1.2)
    assert one.first == 0.5
    assert one.intervals == pytest.approx([0.2, 0.2, 0.2, 0.05, 0.05])


def test_an_answer_in_one_piece_has_no_intervals():
    assert answer(4, (0.5, 4), seconds=0.5).intervals == []


def test_a_row_is_what_can_be_calculated_by_hand():
    a = answer(
        5, (1.0, 1), (2.0, 4), seconds=2.0, drafted=3, accepted=3, hits=1, waited=0.5, positions=((1, 1), (1, 1))
    )
    b = answer(3, (1.0, 1), (3.0, 2), seconds=3.0, drafted=5, accepted=1, hits=0, waited=1.0, positions=((2, 1),))
    spans = (Span("verifier", "verify", 0.0, 2.0), Span("drafter-0", "draft", 1.5, 2.5))
    tally = Tally()
    tally.add(Group((a, b), 4.0, spans), plain=Group((a, a), 8.0))
    row = tally.row(CASE, plain=1.0, formula=4.0)
    assert (row.tokens, row.prompts, row.seconds) == (8, 2, 4.0)
    assert (row.tokens_per_s, row.tokens_per_s_per_device, row.over_plain) == (2.0, 1.0, 2.0)
    assert row.streams == 5 / 4
    # Six intervals in three seconds of stream, two streams at a time.
    assert row.decode_tokens_per_s == pytest.approx(4.0)
    assert row.measured_over_formula == pytest.approx(1.0)
    assert (row.acceptance_length, row.acceptance_rate, row.hit_rate) == (2.0, 0.5, 0.25)
    assert row.acceptance_by_position == (2 / 3, 1.0)
    assert row.exposed_wait == pytest.approx(1.5 / 5)
    assert row.overlap == pytest.approx(0.25)
    assert (row.ttft_p50_s, row.differing) == (1.0, 1)
    assert row.inter_token_p50_s == pytest.approx(0.25)
    assert row.inter_token_p99_s == pytest.approx(1.0)
    assert (row.label, row.k) == ("sync k=3", 3)


def test_what_is_not_known_is_none_and_not_zero():
    tally = Tally()
    group = Group((Answer((), ((0.5, 1), (1.0, 1)), 1.0),), 1.0)
    tally.add(group, plain=group)
    row = tally.row(CASE, plain=None, formula=None)
    unknown = ("hit_rate", "overlap", "measured_over_formula", "over_plain", "differing", "exposed_wait")
    assert all(getattr(row, name) is None for name in unknown)
    # Of another system, what comes together is what one pass has made.
    assert row.acceptance_length == 1.0


def test_plain_has_no_hits_rather_than_a_rate_of_zero():
    tally = Tally()
    group = Group((answer(2, (0.5, 1), (1.0, 1), seconds=1.0),), 1.0)
    tally.add(group, plain=group)
    assert tally.hit_rate is None


def test_acceptance_by_depth_is_conditional_and_knows_of_shorter_drafts():
    # Of ten drafts eight were right at the first token; half of the drafts ended at the second.
    assert acceptance_by_depth(((10, 8), (10, 6), (5, 3))) == pytest.approx((0.8, 0.75, 1.0))
    assert acceptance_by_depth(((4, 0), (4, 0))) == (0.0,)
    assert acceptance_by_depth(()) == ()
