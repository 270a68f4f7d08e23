"""The replicated draft tree: guesses about what follows a committed prefix.

The drafter grows it, the verifier keeps a mirror, and both re-root it by the same function when tokens are committed.
A tree is a value: every operation returns a new one, so a message that turns out bad leaves nothing to undo.

A node's id is given once, by the drafter that grew it, and stays its name on both sides: while it is a live guess,
and, for a while, after it was committed.  So growth that was on its way while the verifier committed still finds its
place: below the new root, on the committed prefix itself, or nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

ROOT = 0
"""The id that stands for the committed prefix itself: the parent of a tree's first nodes."""

LEAST_LOGQ = -1e4
"""A less likely guess counts as this one: greater numbers would swallow the sums they are part of."""

TRAIL = 256
"""How many committed positions a tree remembers, so as to place growth that was based on an older prefix."""


NAMES = 4096
"""How many names a tree keeps for nodes that were named more than once; drafters of good will need very few."""


class NewNode(NamedTuple):
    """A node as the drafter names it.  parent: a node id, or ROOT for the prefix that the growth was based on."""

    id: int
    parent: int
    token: int
    logq: float


class Node(NamedTuple):
    """A live node.  depth: 1 for a child of the root.  score: the sum of log q from the root down to it."""

    id: int
    parent: int
    token: int
    logq: float
    depth: int
    score: float


@dataclass(frozen=True, slots=True)
class Subtree:
    """Nodes to be verified in one pass, parents before children.

    parents[i]: the index of node i's parent in this subtree, -1 for the root.  ids: the nodes' ids in their tree.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    _children: Mapping[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        children = {(p, t): i for i, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True))}
        object.__setattr__(self, "_children", children)

    @property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the root, 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return tuple(depths)

    def child(self, node: int, token: int) -> int | None:
        """The index of the child of node index `node` (-1: the root) that guesses `token`, if there is one."""
        return self._children.get((node, token))


@dataclass(frozen=True, slots=True)
class Growth:
    """The result of `DraftTree.grow`: the new tree, and what became of each node that was offered.

    added: live now.  repeated: known before.  stale: its branch lost.  orphaned: its parent is unknown here.
    """

    tree: DraftTree
    added: int = 0
    repeated: int = 0
    stale: int = 0
    orphaned: int = 0


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The live guesses below a committed prefix of `base_len` tokens.

    nodes: by id, parents before children.  children: (parent id, token) -> id.  names: every known id of a live node
    -> the id it goes by, since equal paths are one node.  trail: id -> position of nodes that have been committed.
    recent: the last committed tokens, ending at position base_len - 1.
    """

    base_len: int
    nodes: Mapping[int, Node] = field(default_factory=dict)
    children: Mapping[tuple[int, int], int] = field(default_factory=dict)
    names: Mapping[int, int] = field(default_factory=dict)
    trail: Mapping[int, int] = field(default_factory=dict)
    recent: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def depth(self) -> int:
        """The length of the longest guess, in tokens; 0 for an empty tree."""
        return max((node.depth for node in self.nodes.values()), default=0)

    def grow(self, offered: Iterable[NewNode], base_len: int) -> Growth:
        """Add nodes that were grown below a prefix of `base_len` tokens; what cannot be placed is counted, not kept."""
        draft = _Builder(self)
        outcomes = [draft.place(node, base_len) for node in offered]
        counts = {kind: outcomes.count(kind) for kind in ("added", "repeated", "stale", "orphaned")}
        return Growth(draft.tree(self), **counts)

    def merge(self, other: DraftTree) -> DraftTree:
        """The union of two trees over the same prefix, by token path.  Their ids must be distinct."""
        offered = (NewNode(node.id, node.parent, node.token, node.logq) for node in other.nodes.values())
        return self.grow(offered, other.base_len).tree

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The ids along `tokens` from the root, as far as the tree goes."""
        ids: list[int] = []
        for token in tokens:
            child = self.children.get((ids[-1] if ids else ROOT, token))
            if child is None:
                break
            ids.append(child)
        return tuple(ids)

    def reroot(self, tokens: Sequence[int]) -> DraftTree:
        """The tree after `tokens` were committed: the subtree below them is kept, all else is dropped."""
        accepted = self.follow(tokens)
        base_len = self.base_len + len(tokens)
        root = accepted[-1] if len(accepted) == len(tokens) and tokens else None
        survivors = self._below(root, len(tokens)) if tokens else dict(self.nodes)
        position = {id: self.base_len + i for i, id in enumerate(accepted)}
        trail = {**self.trail, **{name: position[id] for name, id in self.names.items() if id in position}}
        return DraftTree(
            base_len=base_len,
            nodes=survivors,
            children={(node.parent, node.token): node.id for node in survivors.values()},
            names={name: id for name, id in self.names.items() if id in survivors},
            trail={id: at for id, at in trail.items() if at >= base_len - TRAIL},
            recent=(*self.recent, *tokens)[-TRAIL:],
        )

    def _below(self, root: int | None, lifted: int) -> dict[int, Node]:
        """The nodes under `root`, as nodes of a tree whose root it is; `lifted` is its depth."""
        if root is None:
            return {}
        kept: dict[int, Node] = {}
        base = self.nodes[root].score
        for node in self.nodes.values():
            if node.parent == root or node.parent in kept:
                parent = ROOT if node.parent == root else node.parent
                kept[node.id] = node._replace(parent=parent, depth=node.depth - lifted, score=node.score - base)
        return kept

    def cut(self, limit: int) -> DraftTree:
        """The tree of the `limit` nodes of highest score.  They always form a tree, since log q is never above 0."""
        if len(self.nodes) <= limit:
            return self
        best = sorted(self.nodes.values(), key=lambda node: (-node.score, node.depth))[:limit]
        keep = {node.id for node in best}
        nodes = {id: node for id, node in self.nodes.items() if id in keep}
        return replace(
            self,
            nodes=nodes,
            children={(node.parent, node.token): node.id for node in nodes.values()},
            names={name: id for name, id in self.names.items() if id in keep},
        )

    def path(self, id: int) -> tuple[int, ...]:
        """The ids from the root's child down to `id`; empty for ROOT."""
        ids: list[int] = []
        while id != ROOT:
            ids.append(id)
            id = self.nodes[id].parent
        return tuple(reversed(ids))

    def tokens(self, id: int) -> tuple[int, ...]:
        """The tokens guessed from the root down to `id`."""
        return tuple(self.nodes[node].token for node in self.path(id))

    def subtree(self, ids: Iterable[int]) -> Subtree:
        """The named nodes as a Subtree.  Each one's parent must be the root or named as well (ValueError)."""
        wanted = set(ids)
        chosen = [node for node in self.nodes.values() if node.id in wanted]
        index = {ROOT: -1} | {node.id: i for i, node in enumerate(chosen)}
        if len(index) != len(wanted) + 1 or any(node.parent not in index for node in chosen):
            raise ValueError(f"no subtree of this tree holds exactly the nodes {sorted(wanted)}")
        return Subtree(
            tuple(node.token for node in chosen),
            tuple(index[node.parent] for node in chosen),
            tuple(node.id for node in chosen),
        )

    def check(self) -> None:
        """Raise AssertionError if the tree contradicts itself."""
        seen = {ROOT: (0, 0.0)}
        for id, node in self.nodes.items():
            assert id == node.id, f"node {node.id} is filed under {id}"
            assert node.parent in seen, f"node {id} stands before its parent {node.parent}"
            depth, score = seen[node.parent]
            assert node.depth == depth + 1, f"node {id} has depth {node.depth} under a parent of depth {depth}"
            assert abs(node.score - score - node.logq) < 1e-3, f"score of node {id}"
            assert self.children[node.parent, node.token] == id, f"node {id} is not among its parent's children"
            seen[id] = (node.depth, node.score)
        assert len(self.children) == len(self.nodes), "children and nodes differ in number"
        assert set(self.names.values()) == set(self.nodes), "names and nodes differ"
        assert not set(self.trail) & set(self.names), "an id is both live and committed"


class _Builder:
    """The working copy of one `grow`: the maps are copied once, however many nodes come."""

    def __init__(self, tree: DraftTree) -> None:
        self.base_len, self.recent = tree.base_len, tree.recent
        self.nodes, self.children = dict(tree.nodes), dict(tree.children)
        self.names, self.trail = dict(tree.names), dict(tree.trail)

    def tree(self, old: DraftTree) -> DraftTree:
        return replace(old, nodes=self.nodes, children=self.children, names=self.names, trail=self.trail)

    def place(self, new: NewNode, base_len: int) -> str:
        id, parent, token, logq = new
        names = self.names
        if id == ROOT or id in names or id in self.trail:
            return "repeated"
        known = names.get(parent)
        if known is not None:
            return self._add(id, known, token, logq)
        if parent != ROOT and parent not in self.trail:
            return "orphaned"
        position = base_len if parent == ROOT else self.trail[parent] + 1
        return self._add(id, ROOT, token, logq) if position == self.base_len else self._commit(new, position)

    def _add(self, id: int, parent: int, token: int, logq: float) -> str:
        twin = self.children.get((parent, token))
        if twin is not None:
            if len(self.names) < NAMES:
                self.names[id] = twin
            return "repeated"
        above = self.nodes.get(parent)
        depth, score = (above.depth, above.score) if above else (0, 0.0)
        logq = max(logq, LEAST_LOGQ)
        self.nodes[id] = Node(id, parent, token, logq, depth + 1, score + logq)
        self.children[parent, token] = id
        self.names[id] = id
        return "added"

    def _commit(self, new: NewNode, position: int) -> str:
        """A node whose position has been decided meanwhile: remember it if it guessed right, as others hang below."""
        back = self.base_len - position
        if 0 < back <= len(self.recent) and self.recent[-back] == new.token:
            if len(self.trail) < NAMES:
                self.trail[new.id] = position
            return "repeated"
        return "stale"
