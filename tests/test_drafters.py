"""What the drafters guess, asked directly."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import table_models as tables
import torch
from conftest import TableModel
from local_cell import LocalCell, engine_of
from paceline.actors.drafter import DrafterLoop
from paceline.actors.drafters import (
    CANDIDATES,
    RUN_AHEAD,
    Ask,
    Drafter,
    DrafterFull,
    Guess,
    ModelDrafter,
    NgramDrafter,
    Start,
)
from paceline.actors.engine import Feed
from paceline.actors.inbox import Shutdown
from paceline.actors.link import Received
from paceline.actors.memory_link import memory_link
from paceline.actors.messages import Message, Open, Verdict, encode
from paceline.actors.ranking import Ranker, Rows, top
from paceline.actors.rule import perturbed
from paceline.actors.schedules import MAX_CHILDREN, MAX_NODES, Plan
from paceline.actors.torch_engine import TorchEngine
from paceline.actors.tree import ROOT, DraftTree, NewNode
from paceline.actors.values import Request, Sampling, Speculation
from tiny_models import tiny_model
from torch import Tensor

VOCAB = 16
GREEDY = Sampling()
WARM = Sampling(temperature=1.0, seed=9)


def _guesses(drafter: Drafter, session: int, tree: DraftTree, parent: int = ROOT, **how: int) -> list[int]:
    for _ in range(20):
        (answer,) = drafter.propose([Ask(session, tree, parent, **how)])
        if answer is not None:
            return [guess.token for guess in answer]
    raise AssertionError("the drafter never answered")


def test_ngram_continues_what_the_last_tokens_were_followed_by() -> None:
    drafter = NgramDrafter()
    session = drafter.open(Start([1, 2, 3, 4, 5, 9, 2, 3, 4], GREEDY))
    assert _guesses(drafter, session, DraftTree(9), depth=3) == [5, 9, 2]
    (chain,) = drafter.propose([Ask(session, DraftTree(9), ROOT, depth=2)])
    assert chain == (Guess(5, NgramDrafter.LOGQ, -1), Guess(9, NgramDrafter.LOGQ, 0))


def test_ngram_prefers_the_longer_match_and_then_the_later_one() -> None:
    drafter = NgramDrafter()
    longer = drafter.open(Start([7, 1, 2, 8, 2, 9, 1, 2], GREEDY))
    assert _guesses(drafter, longer, DraftTree(8)) == [8]
    later = drafter.open(Start([2, 8, 2, 9, 5, 2], GREEDY))
    assert _guesses(drafter, later, DraftTree(6)) == [9]


def test_ngram_looks_on_from_the_guesses_themselves() -> None:
    drafter = NgramDrafter()
    session = drafter.open(Start([1, 2, 3, 4, 5, 6, 3], GREEDY))
    tree = DraftTree(7).grow([NewNode(1, ROOT, 4, -0.1)], 7).tree
    assert _guesses(drafter, session, tree, parent=1, depth=2) == [5, 6]


def test_ngram_knows_nothing_of_other_sessions_and_learns_from_its_own() -> None:
    drafter = NgramDrafter()
    first = drafter.open(Start([1, 2, 3], GREEDY))
    second = drafter.open(Start([5, 1], GREEDY))
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
    session = drafter.open(Start([3, 5], sampling))
    scores = perturbed(tables.random_table(VOCAB, seed=3)[5], sampling, position=2)
    assert _guesses(drafter, session, DraftTree(2), width=3) == scores.topk(3).indices.tolist()


def test_several_sessions_and_nodes_are_evaluated_in_one_step(model: Path) -> None:
    table = tables.random_table(VOCAB, seed=3)
    drafter = ModelDrafter(engine_of(model))
    sessions = [drafter.open(Start([token], GREEDY)) for token in (1, 2)]
    trees = [DraftTree(1).grow([NewNode(1, ROOT, 4, -0.1), NewNode(2, ROOT, 6, -0.2)], 1).tree for _ in sessions]
    drafter.propose([Ask(s, t, ROOT) for s, t in zip(sessions, trees, strict=True)])
    answers = drafter.propose([Ask(s, t, node) for s, t in zip(sessions, trees, strict=True) for node in (1, 2)])
    best = [int(table[token].argmax()) for token in (4, 6)] * 2
    assert [answer[0].token for answer in answers if answer] == best
    assert all(guess.logq <= 0 for answer in answers if answer for guess in answer)


@pytest.mark.parametrize("committed", [[4], [4, 6], [4, 9], [8], [4, 6, 2]])
def test_after_any_reroot_the_guesses_are_those_of_a_fresh_session(model: Path, committed: list[int]) -> None:
    drafter = ModelDrafter(engine_of(model))
    session = drafter.open(Start([1, 2], GREEDY))
    nodes = [NewNode(1, ROOT, 4, -0.1), NewNode(2, 1, 6, -0.1), NewNode(3, ROOT, 8, -0.5), NewNode(4, 2, 7, -0.1)]
    tree = DraftTree(2).grow(nodes, 2).tree
    for node in (ROOT, 1, 2, 3):
        _guesses(drafter, session, tree, parent=node)
    drafter.reroot(session, tree, committed)
    rerooted = tree.reroot(committed)
    fresh = drafter.open(Start([1, 2, *committed], GREEDY))
    for node in (ROOT, *rerooted.nodes):
        assert _guesses(drafter, session, rerooted, node, width=4) == _guesses(drafter, fresh, rerooted, node, width=4)


def test_a_session_that_does_not_fit_is_refused_and_leaves_room_when_it_closes(model: Path) -> None:
    engine = engine_of(model, kv_tokens=2 * RUN_AHEAD + 48)
    drafter = ModelDrafter(engine)
    first = drafter.open(Start([1] * 33, GREEDY))
    with pytest.raises(DrafterFull, match="no room"):
        drafter.open(Start([1], GREEDY))
    drafter.close(first)
    drafter.open(Start([1], GREEDY))
    engine.check()


def test_a_long_prompt_takes_several_steps(model: Path) -> None:
    drafter = ModelDrafter(engine_of(model), prefill_chunk=8)
    session = drafter.open(Start(_prompt(30), GREEDY))
    answers = [drafter.propose([Ask(session, DraftTree(30), ROOT)])[0] for _ in range(4)]
    assert answers[:3] == [None] * 3
    assert answers[3] is not None


def test_a_prompt_holds_up_nobody_and_two_of_them_share_a_step(model: Path) -> None:
    engine = Watched(engine_of(model, kv_tokens=4096))
    drafter = ModelDrafter(engine, prefill_chunk=8)
    drafting, long, short = (drafter.open(Start(_prompt(count), GREEDY)) for count in (1, 30, 11))
    tree = DraftTree(1)
    assert _guesses(drafter, drafting, tree)
    answered = []
    for step in range(6):
        tree = tree.grow([NewNode(step + 1, tree.path(step)[-1] if step else ROOT, step, -0.1)], 1).tree
        asks = [Ask(long, DraftTree(30), ROOT), Ask(short, DraftTree(11), ROOT), Ask(drafting, tree, step + 1)]
        answers = drafter.propose(asks)
        answered.append([answer is not None for answer in answers])
        prefilled = sum(len(feed.tokens) for feed in engine.feeds[-1] if feed.sequence in (long, short))
        assert prefilled == min(8, 41 - 8 * step)
    assert answered == [[False, done, True] for done in (False, *(True,) * 4)] + [[True] * 3]


# How much is computed, and when


class Watched:
    """An engine that notes its passes, and raises if it ever computes the same position of the same text twice."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.feeds: list[Sequence[Feed]] = []
        self.texts: list[list[tuple[int, ...]]] = []
        self.before_step: Callable[[], None] = lambda: None
        self._committed: dict[int, list[int]] = {}
        self._pending: dict[int, list[tuple[int, int]]] = {}
        self._computed: set[tuple[int, tuple[int, ...]]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def open(self, *arguments: Any) -> int:
        sequence = self.engine.open(*arguments)
        self._committed[sequence], self._pending[sequence] = [], []
        return sequence

    def step(self, feeds: Sequence[Feed]) -> list[Tensor]:
        self.before_step()
        logits = self.engine.step(feeds)
        self.feeds.append(feeds)
        self.texts.append([])
        for feed in feeds:
            for token, parent in zip(feed.tokens, feed.parents, strict=True):
                self._pending[feed.sequence].append((token, parent))
                self._note(feed.sequence, self._text(feed.sequence, len(self._pending[feed.sequence]) - 1))
        return logits

    def _text(self, sequence: int, slot: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while slot >= 0:
            token, slot = self._pending[sequence][slot]
            tokens.insert(0, token)
        return (*self._committed[sequence], *tokens)

    def _note(self, sequence: int, text: tuple[int, ...]) -> None:
        assert (sequence, text) not in self._computed, f"sequence {sequence} computed {text} again"
        self._computed.add((sequence, text))
        self.texts[-1].append(text)

    def commit(self, sequence: int, path: Sequence[int]) -> dict[int, int]:
        renamed = self.engine.commit(sequence, path)
        pending = self._pending[sequence]
        self._committed[sequence] += [pending[slot][0] for slot in path]
        kept = sorted(renamed, key=renamed.__getitem__)
        self._pending[sequence] = [(pending[slot][0], renamed.get(pending[slot][1], -1)) for slot in kept]
        return renamed

    def truncate(self, sequence: int, length: int) -> None:
        self.engine.truncate(sequence, length)
        assert length == len(self._committed[sequence]), "committed positions were dropped"
        self._pending[sequence] = []


def _prompt(count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def _grow(
    drafter: ModelDrafter, trees: dict[int, DraftTree], asked: Sequence[tuple[int, int]], width: int, ids: Iterator[int]
) -> None:
    """Ask for `width` children of all these nodes, (session, node), in one step, and add what is guessed."""
    asks = [Ask(session, trees[session], node, width) for session, node in asked]
    for (session, node), guesses in zip(asked, drafter.propose(asks), strict=True):
        assert guesses is not None
        nodes = [NewNode(next(ids), node, guess.token, guess.logq) for guess in guesses]
        trees[session] = trees[session].grow(nodes, trees[session].base_len).tree


def _leaves(tree: DraftTree) -> list[int]:
    """ROOT, of an empty tree."""
    parents = {node.parent for node in tree.nodes.values()}
    return [id for id in (ROOT, *tree.nodes) if id not in parents]


def _tiny_engine(kv_tokens: int) -> TorchEngine:
    """One whose logits depend on all that came before: a cache that was mixed up shows."""
    return TorchEngine(tiny_model("llama"), kv_tokens)


def test_one_forward_grows_all_leaves_of_all_sessions() -> None:
    engine = Watched(_tiny_engine(4096))
    drafter = ModelDrafter(engine)
    prompts = ([5, 6, 7], [8], [9, 10])
    trees = {drafter.open(Start(prompt, GREEDY)): DraftTree(len(prompt)) for prompt in prompts}
    ids = itertools.count(1)
    for level in range(3):
        _grow(drafter, trees, [(session, leaf) for session in trees for leaf in _leaves(trees[session])], 3, ids)
        assert len(engine.feeds) == 1 + level
        assert [len(feed.tokens) for feed in engine.feeds[-1]] == ([3**level] * 3 if level else [3, 1, 2])
    # What is known is answered without any.
    _grow(drafter, trees, [(session, ROOT) for session in trees], 8, ids)
    assert len(engine.feeds) == 3


# Which nodes of a tree are committed: per level the child (0 the better one of two), or -1 for a token nobody guessed.
# All nodes above the leaves have been evaluated.
COURSES = {
    "the best node": (0,),
    "a side branch": (1,),
    "down a side branch": (1, 0),
    "an evaluated path, then a leaf": (0, 1, 1, 1),
    "a leaf, then a bonus token": (1, 1, 0, 1, -1),
    "a bonus token after an evaluated path": (1, 0, -1),
    "a miss": (-1,),
}
KEPT = ("the best node", "a side branch", "down a side branch")


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_nothing_is_computed_twice_and_what_is_kept_is_right(name: str, sampling: Sampling) -> None:
    """Watched raises if anything is computed again."""
    engine = Watched(_tiny_engine(4096))
    drafter, ids = ModelDrafter(engine), itertools.count(1)
    session = drafter.open(Start([5, 6, 7], sampling))
    text, trees, kept = [5, 6, 7], {session: DraftTree(3)}, 0
    for _ in range(4):
        for depth in range(4):
            leaves = [leaf for leaf in _leaves(trees[session]) if len(trees[session].path(leaf)) == depth]
            _grow(drafter, trees, [(session, leaf) for leaf in leaves], 2, ids)
        committed = _course(trees[session], COURSES[name])
        drafter.reroot(session, trees[session], committed)
        trees[session] = trees[session].reroot(committed)
        text += committed
        kept += engine.pending(session)
        engine.check()
    assert (kept > 0) == (name in KEPT)
    _same_as_fresh(drafter, session, trees[session], text, sampling)


def test_a_leaf_is_committed_whose_sibling_was_evaluated() -> None:
    engine = Watched(_tiny_engine(4096))
    drafter, ids = ModelDrafter(engine), itertools.count(1)
    session = drafter.open(Start([5, 6, 7], GREEDY))
    trees = {session: DraftTree(3)}
    _grow(drafter, trees, [(session, ROOT)], 2, ids)
    _grow(drafter, trees, [(session, 1)], 2, ids)
    _grow(drafter, trees, [(session, 3)], 2, ids)
    tokens = {id: node.token for id, node in trees[session].nodes.items()}
    committed = [tokens[1], tokens[4]]
    drafter.reroot(session, trees[session], committed)
    trees[session] = trees[session].reroot(committed)
    assert engine.length(session) == 4
    _grow(drafter, trees, [(session, ROOT)], 2, ids)
    assert engine.texts[-1] == [(5, 6, 7, *committed)]
    _same_as_fresh(drafter, session, trees[session], [5, 6, 7, *committed], GREEDY)


def _course(tree: DraftTree, course: Sequence[int]) -> list[int]:
    at, tokens = ROOT, []
    for choice in course:
        children = [node for node in tree.nodes.values() if node.parent == at]
        if choice < 0:
            return [*tokens, next(token for token in range(VOCAB) if (at, token) not in tree.children)]
        at, token = children[choice].id, children[choice].token
        tokens.append(token)
    return tokens


def _same_as_fresh(drafter: ModelDrafter, session: int, tree: DraftTree, text: list[int], sampling: Sampling) -> None:
    """Compare the guesses everywhere with those of a drafter that sees the text for the first time."""
    fresh = ModelDrafter(_tiny_engine(4096))
    new = fresh.open(Start(text, sampling))
    found, expected = (
        [_guesses(asked, at, tree, node, width=8) for node in (ROOT, *tree.nodes)]
        for asked, at in ((drafter, session), (fresh, new))
    )
    assert found == expected


def test_one_turn_of_the_loop_is_one_forward_and_a_verdict_is_heard_before_the_next() -> None:
    """A verdict that comes in while a step runs cuts off what that step was for; the next step is below the verdict."""
    engine = Watched(_tiny_engine(4096))
    loop = DrafterLoop(ModelDrafter(engine))
    _, drafter_end = memory_link("d", lambda event: None, loop.inbox.put)
    loop.add_link(drafter_end)
    drafter_end.pump()
    plan = Plan("swiftspec", width=3)

    def receive(message: Message) -> None:
        loop.inbox.put(Received("d", drafter_end.generation, encode(message)))

    def happen() -> None:
        turns = len(engine.feeds)
        if turns == 3:
            receive(Verdict(0, 1, 3, (11,), plan))
        elif turns == 6:
            loop.inbox.put(Shutdown())

    engine.before_step = happen
    receive(Open(0, 1, (5, 6, 7), GREEDY, plan))
    loop.run()
    assert len(engine.feeds) == 7
    assert any(len(texts) == 3 for texts in engine.texts[:4])
    assert all(text[:4] != (5, 6, 7, 11) for texts in engine.texts[:4] for text in texts)
    assert all(text[:4] == (5, 6, 7, 11) for texts in engine.texts[4:] for text in texts)


@pytest.mark.parametrize("schedule", ["amusd", "pearl", "saguaro", "swiftspec"])
def test_serving_computes_nothing_twice_and_steps_once_per_turn(
    schedule: str, table_model: TableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables.random_table(VOCAB, seed=1)
    table[:, tables.EOS] = -1e4
    engine = Watched(engine_of(table_model(tables.blurred(table, seed=2)), kv_tokens=4096))
    cell = LocalCell(table_model(table), ModelDrafter(engine), speed=4.0)
    turns = 0

    def turn() -> bool:
        nonlocal turns
        before = len(engine.feeds)
        busy = DrafterLoop.turn(cell.drafter)
        turns += busy
        assert len(engine.feeds) - before <= 1
        return busy

    monkeypatch.setattr(cell.drafter, "turn", turn)
    requests = [Request(f"r{i}", (i + 1,), WARM, 30, speculation=Speculation(schedule, 3)) for i in range(3)]
    answers = cell.run(requests)
    assert sum(answer.stats.accepted for answer in answers) > 0
    assert max(len(feeds) for feeds in engine.feeds) == 3
    if schedule in ("saguaro", "swiftspec"):
        assert max(len(feed.tokens) for feeds in engine.feeds for feed in feeds) >= 3
    assert cell.drafter.counters["failed_sessions"] == 0
    assert len(engine.feeds) <= turns


# Limits


def test_the_limits_are_those_of_the_schedules() -> None:
    assert (CANDIDATES, RUN_AHEAD) == (MAX_CHILDREN, MAX_NODES)


def _grow_far(drafter: ModelDrafter, trees: dict[int, DraftTree], ids: Iterator[int]) -> None:
    """Ask for more nodes than a session may have."""
    for _ in range(14):
        _grow(drafter, trees, [(session, leaf) for session in trees for leaf in _leaves(trees[session])[:32]], 8, ids)


def test_whole_trees_of_all_sessions_fit_and_what_is_beyond_them_is_not_grown(model: Path) -> None:
    """The pool is exactly as large as what was promised."""
    engine = Watched(engine_of(model, kv_tokens=2 * (16 + RUN_AHEAD)))
    drafter, ids = ModelDrafter(engine), itertools.count(1)
    trees = {drafter.open(Start([1] * 16, GREEDY)): DraftTree(16) for _ in range(2)}
    with pytest.raises(DrafterFull):
        drafter.open(Start([1], GREEDY))
    _grow_far(drafter, trees, ids)
    engine.check()
    for session, tree in trees.items():
        assert len(tree) > RUN_AHEAD == engine.pending(session)
        assert drafter.propose([Ask(session, tree, _leaves(tree)[-1], 8)]) == [()]
        # A verdict makes room again.
        token = next(iter(tree.nodes.values())).token
        drafter.reroot(session, tree, [token])
        rerooted = tree.reroot([token])
        assert drafter.propose([Ask(session, rerooted, _leaves(rerooted)[-1], 8)])[0]


def test_a_full_pool_refuses_guesses_and_never_raises(model: Path) -> None:
    """Both sessions become longer than the pool is; who finds no room goes on when the other one has closed."""
    engine = Watched(engine_of(model, kv_tokens=2 * (16 + RUN_AHEAD)))
    drafter, ids = ModelDrafter(engine), itertools.count(1)
    trees = {drafter.open(Start([1] * 16, GREEDY)): DraftTree(16) for _ in range(2)}
    first, second = trees
    _grow_far(drafter, trees, ids)
    drafter.reroot(first, trees[first], [2] * 250)
    trees[first] = trees[first].reroot([2] * 250)
    # The other tree holds what the first session's tokens need.
    for _ in range(3):
        drafter.propose([Ask(first, trees[first], ROOT)])
    assert engine.free_blocks == 0
    drafter.reroot(first, trees[first], [2] * 60)
    trees[first] = trees[first].reroot([2] * 60)
    assert [drafter.propose([Ask(first, trees[first], ROOT)])[0] for _ in range(3)][-1] == ()
    leaf = _leaves(trees[second])[-1]
    assert drafter.propose([Ask(first, trees[first], ROOT), Ask(second, trees[second], leaf)]) == [(), ()]
    # What is known is still told.
    assert drafter.propose([Ask(second, trees[second], ROOT, 3)])[0]
    engine.check()
    drafter.close(second)
    assert _guesses(drafter, first, trees[first])
    engine.check()


def test_a_tree_ends_where_the_context_of_the_drafter_does(table_model: TableModel) -> None:
    engine = engine_of(table_model(tables.random_table(VOCAB, seed=3), context=8))
    drafter, ids = ModelDrafter(engine), itertools.count(1)
    session = drafter.open(Start([1, 2, 3, 4, 5], GREEDY))
    trees = {session: DraftTree(5)}
    for _ in range(6):
        _grow(drafter, trees, [(session, leaf) for leaf in _leaves(trees[session])], 2, ids)
    depths = Counter(node.depth for node in trees[session].nodes.values())
    # Three more positions can be evaluated, and what follows the last of them be guessed.
    assert depths == {1: 2, 2: 4, 3: 8, 4: 16}
    # In one step with nodes that are deep enough inside.
    fresh = drafter.open(Start([1, 2, 3, 4, 5], GREEDY))
    deep = next(node.id for node in trees[session].nodes.values() if node.depth == 4)
    assert drafter.propose([Ask(fresh, trees[session], node) for node in (deep, ROOT)])[0] == ()
    _grow(drafter, {fresh: trees[session]}, [(fresh, 1), (fresh, deep)], 1, ids)


def test_what_begins_beyond_the_context_is_never_fed(table_model: TableModel) -> None:
    engine = Watched(engine_of(table_model(tables.random_table(VOCAB, seed=3), context=8)))
    drafter = ModelDrafter(engine)
    session = drafter.open(Start([1] * 9, GREEDY))
    assert drafter.propose([Ask(session, DraftTree(9), ROOT)]) == [()]
    assert not engine.feeds


# Ranking


@pytest.mark.parametrize("vocab", [1, 7, 64, 600, 1000, 4099])
def test_the_largest_scores_are_found(vocab: int) -> None:
    scores = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    scores[2, : vocab // 2] = -torch.inf
    values, columns = top(scores, 8)
    expected = scores.topk(min(8, vocab))
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0)
    torch.testing.assert_close(scores.gather(1, columns), values, rtol=0, atol=0)


def test_sessions_of_all_kinds_are_ranked_together() -> None:
    generator = torch.Generator().manual_seed(1)
    cut = (Sampling(1.3, top_k=5, seed=3), Sampling(0.6, top_p=0.8, min_p=0.01, seed=4))
    samplings = (GREEDY, WARM, cut[0], GREEDY, WARM, cut[1])
    logits = [torch.randn(rows, 3000, generator=generator) * 3 for rows in (3, 4, 1, 0, 0, 2)]
    positions = ([9, 9, 10], [4, 6, 5, 4], [7], [], [], [30, 31])
    found = Ranker(8, VOCAB).rank([Rows(*part) for part in zip(logits, samplings, positions, strict=True)])
    for rows, sampling, places, answers in zip(logits, samplings, positions, found, strict=True):
        assert len(answers) == len(places)
        for row, place, answer in zip(rows, places, answers, strict=True):
            scores = perturbed(row, sampling, place)
            best = scores.log_softmax(-1).topk(8)
            wanted = [t for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True) if v > -torch.inf]
            assert [candidate.token for candidate in answer] == wanted
            assert [c.logq for c in answer] == pytest.approx(best.values.tolist()[: len(answer)], abs=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_logits_that_are_not_numbers_give_no_guesses_and_spoil_no_others(sampling: Sampling) -> None:
    good, bad = torch.arange(600.0)[None].sin() * 4, torch.full((1, 600), torch.nan)
    alone = Ranker(8, VOCAB).rank([Rows(good, sampling, [5])])
    mixed = Ranker(8, VOCAB).rank([Rows(rows, sampling, [5]) for rows in (bad, good)])
    assert (mixed[0], mixed[1]) == ([()], alone[0])
    assert len(alone[0][0]) == 8
