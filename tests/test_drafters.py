"""What the drafters guess, asked directly."""

from __future__ import annotations

from pathlib import Path

import pytest
import table_models as tables
import torch
from conftest import TableModel
from local_cell import engine_of
from paceline.actors.drafters import Ask, Drafter, DrafterFull, Guess, ModelDrafter, NgramDrafter
from paceline.actors.rule import perturbed
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import Sampling

VOCAB = 16
GREEDY = Sampling()


def _guesses(drafter: Drafter, session: int, tree: DraftTree, parent: int = ROOT, **how: int) -> list[int]:
    for _ in range(20):
        (answer,) = drafter.propose([Ask(session, tree, parent, **how)])
        if answer is not None:
            return [guess.token for guess in answer]
    raise AssertionError("the drafter never answered")


def test_ngram_continues_what_the_last_tokens_were_followed_by() -> None:
    drafter = NgramDrafter()
    session = drafter.open([1, 2, 3, 4, 5, 9, 2, 3, 4], GREEDY, 10)
    assert _guesses(drafter, session, DraftTree(9), depth=3) == [5, 9, 2]
    (chain,) = drafter.propose([Ask(session, DraftTree(9), ROOT, depth=2)])
    assert chain == (Guess(5, NgramDrafter.LOGQ, -1), Guess(9, NgramDrafter.LOGQ, 0))


def test_ngram_prefers_the_longer_match_and_then_the_later_one() -> None:
    drafter = NgramDrafter()
    longer = drafter.open([7, 1, 2, 8, 2, 9, 1, 2], GREEDY, 10)
    assert _guesses(drafter, longer, DraftTree(8)) == [8]
    later = drafter.open([2, 8, 2, 9, 5, 2], GREEDY, 10)
    assert _guesses(drafter, later, DraftTree(6)) == [9]


def test_ngram_looks_on_from_the_guesses_themselves() -> None:
    drafter = NgramDrafter()
    session = drafter.open([1, 2, 3, 4, 5, 6, 3], GREEDY, 10)
    tree = DraftTree(7).grow([NewNode(1, ROOT, 4, -0.1)], 7).tree
    assert _guesses(drafter, session, tree, parent=1, depth=2) == [5, 6]


def test_ngram_knows_nothing_of_other_sessions_and_learns_from_its_own() -> None:
    drafter = NgramDrafter()
    first = drafter.open([1, 2, 3], GREEDY, 10)
    second = drafter.open([5, 1], GREEDY, 10)
    assert _guesses(drafter, second, DraftTree(2)) == []
    drafter.reroot(first, DraftTree(3), [1])
    assert _guesses(drafter, first, DraftTree(4), depth=2) == [2, 3]
    drafter.close(first)
    drafter.close(first)


@pytest.fixture
def model(table_model: TableModel) -> Path:
    return table_model(tables.random_table(VOCAB, seed=3))


def test_a_model_ranks_its_guesses_with_the_target_s_noise(model: Path) -> None:
    sampling = Sampling(temperature=1.0, seed=77)
    drafter = ModelDrafter(engine_of(model))
    session = drafter.open([3, 5], sampling, 10)
    scores = perturbed(tables.random_table(VOCAB, seed=3)[5], sampling, position=2)
    assert _guesses(drafter, session, DraftTree(2), width=3) == scores.topk(3).indices.tolist()


def test_several_sessions_and_nodes_are_evaluated_in_one_step(model: Path) -> None:
    table = tables.random_table(VOCAB, seed=3)
    drafter = ModelDrafter(engine_of(model))
    sessions = [drafter.open([token], GREEDY, 10) for token in (1, 2)]
    trees = [DraftTree(1).grow([NewNode(1, ROOT, 4, -0.1), NewNode(2, ROOT, 6, -0.2)], 1).tree for _ in sessions]
    drafter.propose([Ask(s, t, ROOT) for s, t in zip(sessions, trees, strict=True)])
    answers = drafter.propose([Ask(s, t, node) for s, t in zip(sessions, trees, strict=True) for node in (1, 2)])
    best = [int(table[token].argmax()) for token in (4, 6)] * 2
    assert [answer[0].token for answer in answers if answer] == best
    assert all(guess.logq <= 0 for answer in answers if answer for guess in answer)


@pytest.mark.parametrize("committed", [[4], [4, 6], [4, 9], [8], [4, 6, 2]])
def test_after_any_reroot_the_guesses_are_those_of_a_fresh_session(model: Path, committed: list[int]) -> None:
    drafter = ModelDrafter(engine_of(model))
    session = drafter.open([1, 2], GREEDY, 30)
    nodes = [NewNode(1, ROOT, 4, -0.1), NewNode(2, 1, 6, -0.1), NewNode(3, ROOT, 8, -0.5), NewNode(4, 2, 7, -0.1)]
    tree = DraftTree(2).grow(nodes, 2).tree
    for node in (ROOT, 1, 2, 3):
        _guesses(drafter, session, tree, parent=node)
    drafter.reroot(session, tree, committed)
    rerooted = tree.reroot(committed)
    fresh = drafter.open([1, 2, *committed], GREEDY, 30)
    for node in (ROOT, *rerooted.nodes):
        assert _guesses(drafter, session, rerooted, node, width=4) == _guesses(drafter, fresh, rerooted, node, width=4)


def test_a_session_that_does_not_fit_is_refused_and_leaves_room_when_it_closes(model: Path) -> None:
    engine = engine_of(model, kv_tokens=320)
    drafter = ModelDrafter(engine)
    first = drafter.open([1], GREEDY, 100)
    with pytest.raises(DrafterFull, match="no room"):
        drafter.open([1], GREEDY, 100)
    drafter.close(first)
    drafter.open([1], GREEDY, 100)
    engine.check()


def test_a_long_prompt_takes_several_steps(model: Path) -> None:
    drafter = ModelDrafter(engine_of(model), prefill_chunk=8)
    prompt = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    session = drafter.open(prompt, GREEDY, 10)
    answers = [drafter.propose([Ask(session, DraftTree(30), ROOT)])[0] for _ in range(4)]
    assert answers[:3] == [None] * 3
    assert answers[3] is not None
