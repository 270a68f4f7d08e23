"""The replicated tree against a naive model, under every way in which messages can go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.actors.tree import NAMES, ROOT, DraftTree, NewNode


def chain(*tokens: int, first: int = 1) -> list[NewNode]:
    return [NewNode(first + i, first + i - 1 if i else ROOT, token, -0.5) for i, token in enumerate(tokens)]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tree.tokens(id) for id in tree.nodes}


def test_grow_and_reroot_on_a_hit_keep_what_lies_below():
    tree = DraftTree(10).grow([*chain(5, 6, 7), NewNode(9, 2, 8, -1.0)], 10).tree
    after = tree.reroot((5, 6))
    after.check()
    assert after.base_len == 12
    assert paths(after) == {(7,), (8,)}
    assert after.nodes[9].score == -1.0


def test_reroot_on_a_miss_drops_everything():
    tree = DraftTree(10).grow(chain(5, 6, 7), 10).tree
    assert len(tree.reroot((5, 9))) == 0
    assert len(tree.reroot((5, 6, 7, 8))) == 0


def test_growth_that_was_on_its_way_lands_below_the_new_root():
    mirror = DraftTree(10).grow(chain(5, 6), 10).tree.reroot((5, 6, 7))
    late = [NewNode(3, 2, 7, -0.1), NewNode(4, 3, 8, -0.1)]
    growth = mirror.grow(late, 10)
    assert (growth.added, growth.repeated) == (1, 1)
    assert paths(growth.tree) == {(8,)}


def test_growth_on_a_branch_that_lost_is_stale_and_its_children_are_orphans():
    mirror = DraftTree(10).grow(chain(5, 6), 10).tree.reroot((5, 9))
    growth = mirror.grow([NewNode(3, 1, 6, -0.1), NewNode(4, 2, 7, -0.1)], 10)
    assert (growth.added, growth.stale, growth.orphaned) == (0, 1, 1)


def test_equal_paths_are_one_node_under_both_names():
    tree = DraftTree(0).grow([NewNode(1, ROOT, 5, -0.5), NewNode(2, ROOT, 5, -0.7), NewNode(3, 2, 6, -0.1)], 0).tree
    tree.check()
    assert paths(tree) == {(5,), (5, 6)}
    assert paths(tree.reroot((5,)).grow([NewNode(4, 2, 7, -0.1)], 0).tree) == {(6,), (7,)}


def test_merge_is_the_union_by_path():
    left = DraftTree(3).grow(chain(5, 6), 3).tree
    right = DraftTree(3).grow(chain(5, 7, first=100), 3).tree
    merged = left.merge(right)
    merged.check()
    assert paths(merged) == {(5,), (5, 6), (5, 7)}


def test_cut_keeps_the_best_nodes_as_a_tree():
    nodes = [NewNode(1, ROOT, 1, -0.1), NewNode(2, ROOT, 2, -2.0), NewNode(3, 1, 3, -0.1), NewNode(4, 2, 4, -0.1)]
    cut = DraftTree(0).grow(nodes, 0).tree.cut(2)
    cut.check()
    assert paths(cut) == {(1,), (1, 3)}


@pytest.mark.parametrize("logq", [-1e30, -float("inf")])
def test_a_guess_of_no_likelihood_does_not_spoil_the_scores_below_it(logq):
    tree = DraftTree(10).grow([NewNode(1, ROOT, 5, logq), NewNode(2, 1, 6, -0.5)], 10).tree
    tree.check()
    after = tree.reroot((5,))
    after.check()
    assert after.nodes[2].score == pytest.approx(-0.5)


def test_a_subtree_must_be_closed():
    tree = DraftTree(0).grow(chain(5, 6), 0).tree
    assert tree.subtree([1, 2]).parents == (-1, 0)
    with pytest.raises(ValueError, match="no subtree"):
        tree.subtree([2])


@dataclass
class NaiveMirror:
    """What the mirror should hold, the slow way: every node ever heard of with its whole text from position 0."""

    committed: tuple[int, ...]
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def hear(self, node: NewNode, base: tuple[int, ...]) -> None:
        above = base if node.parent == ROOT else self.texts.get(node.parent)
        if above is not None:
            text = (*above, node.token)
            if len(text) > len(self.committed):
                alive = text[: len(self.committed)] == self.committed
            else:
                alive = self.committed[: len(text)] == text
            if alive:
                self.texts[node.id] = text

    def commit(self, tokens: tuple[int, ...]) -> None:
        self.committed = (*self.committed, *tokens)
        for id, text in list(self.texts.items()):
            short = min(len(text), len(self.committed))
            if text[:short] != self.committed[:short]:
                del self.texts[id]

    def paths(self) -> set[tuple[int, ...]]:
        length = len(self.committed)
        return {text[length:] for text in self.texts.values() if len(text) > length}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("deliver"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("lose"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("commit"), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("verdict"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_mirror_equals_the_naive_model_whatever_the_messages_do(script):
    """A drafter grows, growth is reordered, repeated and lost, verdicts come late; the mirror never disagrees."""
    text: tuple[int, ...] = (0,)
    drafter, mirror, naive = DraftTree(1), DraftTree(1), NaiveMirror(text)
    drafter_text = text
    wire: list[tuple[list[NewNode], int]] = []
    verdicts: list[tuple[int, ...]] = []
    fresh = 0
    for kind, a, b in script:
        if kind == "grow":
            ids = [ROOT, *drafter.nodes]
            fresh += 1
            node = NewNode(fresh, ids[a % len(ids)], b, -0.5)
            growth = drafter.grow([node], drafter.base_len)
            drafter = growth.tree
            if growth.added:
                wire.append(([node], drafter.base_len))
        elif kind == "deliver" and wire:
            nodes, base = wire[a % len(wire)] if b else wire.pop(a % len(wire))
            for node in nodes:
                naive.hear(node, naive.committed[:base])
            mirror = mirror.grow(nodes, base).tree
        elif kind == "lose" and wire:
            wire.pop(a % len(wire))
        elif kind == "commit":
            ids = list(mirror.nodes)
            tokens = (*(mirror.tokens(ids[a % len(ids)]) if ids and a else ()), b)
            mirror = mirror.reroot(tokens)
            naive.commit(tokens)
            verdicts.append(tokens)
        elif kind == "verdict" and verdicts:
            tokens = verdicts.pop(0)
            drafter = drafter.reroot(tokens)
            drafter_text = (*drafter_text, *tokens)
        mirror.check()
        drafter.check()
        assert paths(mirror) == naive.paths()
        assert mirror.base_len == len(naive.committed)
    for tokens in verdicts:
        drafter = drafter.reroot(tokens)
    # A push of the whole tree brings the mirror level with the drafter, whatever was lost.
    resent = [NewNode(n.id, n.parent, n.token, n.logq) for n in drafter.nodes.values()]
    assert paths(mirror.grow(resent, drafter.base_len).tree) >= paths(drafter)


def test_a_node_that_is_named_over_and_over_does_not_fill_the_memory():
    tree = DraftTree(1)
    for start in range(1, 40_000, 10_000):
        tree = tree.grow((NewNode(id, ROOT, 7, -0.1) for id in range(start, start + 10_000)), 1).tree
    assert len(tree) == 1
    assert len(tree.names) <= NAMES
    tree = tree.reroot([7])
    tree = tree.grow((NewNode(id, ROOT, 7, -0.1) for id in range(50_000, 60_000)), 1).tree
    assert len(tree.trail) <= NAMES + 1
