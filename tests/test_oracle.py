"""The oracle: as good, as bad and as slow as it is told to be."""

from __future__ import annotations

import math

import pytest
from paceline.actors.drafters import Ask, Guess, Start
from paceline.actors.oracle import OracleDrafter, OracleSpec, parse_oracle
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import Sampling

PROMPT = (3, 1, 4)
TEXT = tuple(20 + i % 7 for i in range(4000))
GREEDY = Sampling()


class Watch:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def _taught(spec: OracleSpec, watch: Watch | None = None) -> OracleDrafter:
    watch = watch or Watch()
    oracle = OracleDrafter(spec, watch.sleep, watch)
    oracle.teach(PROMPT, TEXT, step_seconds=0.2)
    return oracle


def _ask(oracle: OracleDrafter, session: int, tree: DraftTree, parent: int = ROOT, width: int = 1) -> tuple[Guess, ...]:
    (answer,) = oracle.propose([Ask(session, tree, parent, width)])
    assert answer is not None
    return answer


def _ranks(spec: OracleSpec, count: int, width: int = 8) -> list[int]:
    """Which of the guesses at each position is right; width if none is."""
    oracle = _taught(spec)
    session, tree = oracle.open(Start(PROMPT, GREEDY)), DraftTree(len(PROMPT))
    ranks: list[int] = []
    for token in TEXT[:count]:
        tokens = [guess.token for guess in _ask(oracle, session, tree, width=width)]
        assert len(set(tokens)) == width
        ranks.append(tokens.index(token) if token in tokens else width)
        oracle.reroot(session, tree, [token])
        tree = tree.reroot([token])
    return ranks


def test_the_rates_are_those_it_was_given_and_its_log_q_says_so() -> None:
    spec = OracleSpec(alpha=0.7, cost=0, second=0.4)
    ranks = _ranks(spec, 3000)
    for rank, expected in enumerate((0.7, 0.3 * 0.4, 0.3 * 0.6 * 0.4)):
        assert ranks.count(rank) / len(ranks) == pytest.approx(expected, abs=0.03)
        assert spec.log_q(rank) == pytest.approx(math.log(expected))


@pytest.mark.parametrize(("alpha", "second", "ranks"), [(1.0, 0.5, {0}), (0.0, 1.0, {1}), (0.0, 0.0, {8})])
def test_always_right_and_never_right(alpha: float, second: float, ranks: set[int]) -> None:
    assert set(_ranks(OracleSpec(alpha, 0, second), 100)) == ranks


def test_it_errs_at_the_same_positions_every_time_and_at_others_in_another_text() -> None:
    spec = OracleSpec(0.5, 0)
    assert _ranks(spec, 50) == _ranks(spec, 50)
    assert [spec.right_rank(b"a", at) for at in range(50)] != [spec.right_rank(b"b", at) for at in range(50)]


def test_it_guesses_on_below_its_own_guesses_and_nonsense_below_wrong_ones() -> None:
    oracle = _taught(OracleSpec(1.0, 0))
    session = oracle.open(Start((*PROMPT, *TEXT[:2]), GREEDY))
    nodes = [NewNode(1, ROOT, TEXT[2], -0.1), NewNode(2, 1, TEXT[3], -0.1), NewNode(3, ROOT, 99, -1.0)]
    tree = DraftTree(5).grow(nodes, 5).tree
    assert _ask(oracle, session, tree, parent=2)[0].token == TEXT[4]
    below_wrong = _ask(oracle, session, tree, parent=3, width=2)
    assert [guess.logq for guess in below_wrong] == [guess.logq for guess in _ask(oracle, session, tree, 2, width=2)]


def test_one_step_for_many_asks_takes_its_cost_once_less_its_own_time() -> None:
    watch = Watch()
    oracle = _taught(OracleSpec(0.8, cost=0.1), watch)
    sessions = [oracle.open(Start(PROMPT, GREEDY)) for _ in range(3)]
    oracle.propose([Ask(session, DraftTree(3), ROOT) for session in sessions])
    assert watch.slept == [pytest.approx(0.1 * 0.2)]


def test_what_it_was_not_taught_it_neither_guesses_nor_takes_time_for() -> None:
    watch = Watch()
    oracle = _taught(OracleSpec(0.8, 0.1), watch)
    stranger = oracle.open(Start((9, 9), GREEDY))
    assert _ask(oracle, stranger, DraftTree(2)) == ()
    left = oracle.open(Start(PROMPT, GREEDY))
    oracle.reroot(left, DraftTree(3), [TEXT[0] + 1])
    assert _ask(oracle, left, DraftTree(4)) == ()
    ended = oracle.open(Start((*PROMPT, *TEXT), GREEDY))
    assert _ask(oracle, ended, DraftTree(3 + len(TEXT))) == ()
    assert watch.slept == []
    oracle.teach((9, 9), (5, 5), 0.2)
    assert len(_ask(oracle, stranger, DraftTree(2))) == 1


def test_the_last_lesson_that_fits_is_followed() -> None:
    oracle = _taught(OracleSpec(1.0, 0))
    oracle.teach(PROMPT, (7, 8), 0.2)
    session = oracle.open(Start(PROMPT, GREEDY))
    assert _ask(oracle, session, DraftTree(3))[0].token == 7
    oracle.reroot(session, DraftTree(3), [TEXT[0]])
    assert _ask(oracle, session, DraftTree(4))[0].token == TEXT[1]
    oracle.close(session)
    oracle.close(session)


def test_a_name_gives_a_spec() -> None:
    assert parse_oracle("oracle:alpha=0.8,cost=0.1") == OracleSpec(0.8, 0.1, 0.5)
    assert parse_oracle("oracle: cost=2, alpha=1, second=0.25") == OracleSpec(1.0, 2.0, 0.25)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("oracle", "an oracle is written oracle:alpha"),
        ("oracle:alpha=0.8", "lacks cost"),
        ("oracle:alpha=0.8,cost=0.1,beta=1", '"beta=1" is not understood'),
        ("oracle:alpha=0.8,cost=0.1,cost=2", '"cost=2" is not understood'),
        ("oracle:alpha=0.8,cost", '"cost" is not understood'),
        ("oracle:alpha=much,cost=0.1", 'alpha must be a number, got "much"'),
        ("oracle:alpha=1.8,cost=0.1", "alpha must be between 0 and 1, got 1.8"),
        ("oracle:alpha=nan,cost=0.1", "alpha must be between 0 and 1, got nan"),
        ("oracle:alpha=0.8,cost=-1", "cost must be 0 or more"),
        ("oracle:alpha=0.8,cost=inf", "cost must be 0 or more"),
    ],
)
def test_a_bad_name_says_what_is_wrong(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_oracle(name)
