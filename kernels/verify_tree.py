"""Deciding the tokens of a pass: noise, the argmax of the processed scores, and the walk down each draft tree.

At temperature > 0 the token after a node is ``argmax_v(score[v] + noise[v])``, else the argmax of its edited logits.
This is the plain PyTorch reference; the device kernel takes the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from paceline.kernels.dispatch import kernel
from paceline.kernels.noise import contenders
from torch import Tensor


class Sampling(Protocol):
    """How a token is drawn.  temperature: 0 is greedy.  top_k, top_p, min_p: 0, 1 and 0 are off.  seed: 64 bits."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...


class Tree(Protocol):
    """N guesses, parents before children.  parents[i]: the index of node i's parent, -1 for the root."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def parents(self) -> Sequence[int]: ...
    def child(self, node: int, token: int) -> int | None:
        """The index of the child of node index `node` (-1: the root) that guesses `token`, if there is one."""
        ...


Edit = Callable[[Tensor, tuple[int, ...]], Tensor]
"""What a request does to a row of logits [V] before it is drawn from, given the tokens between its committed prefix and
that row; a new float32 row.  It may raise, which ends the walk there."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What was drawn in one tree.

    path: indices of the accepted nodes, root first.  tokens: those of `path`, then the draw that no child equals; that
    one is missing where the row that it is drawn from has no finite maximum, or could not be edited.
    fault: what the edit of that row raised.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    fault: Exception | None = None

    @property
    def broken(self) -> bool:
        """Whether the walk ended at a row that nothing can be drawn from."""
        return len(self.tokens) == len(self.path)


@kernel("triton_verify")
def verify_tree(
    logits: Sequence[Tensor],
    trees: Sequence[Tree],
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    edits: Sequence[Edit | None],
) -> list[Walk]:
    """Walk down each tree while a child equals the draw.

    logits: per tree its raw rows [1 + N, V], row 0 after the last committed token, row 1 + i after node i.
    positions: per tree the index in the whole sequence of the first token to be decided.
    """
    return [walk(*one) for one in zip(logits, trees, samplings, positions, edits, strict=True)]


def walk(rows: Tensor, tree: Tree, sampling: Sampling, position: int, edit: Edit | None) -> Walk:
    """One of these walks."""
    # Only the rows along the path are looked at: on a CPU a draw costs more than the way back to Python.
    tokens: list[int] = []
    path: list[int] = []
    node: int | None = -1
    while node is not None:
        row = rows[1 + node]
        try:
            edited = row if edit is None else edit(row, tuple(tokens))
        except Exception as fault:
            return Walk(tuple(tokens), tuple(path), fault)
        token = draw(edited, sampling, position + len(tokens))
        if token is None:
            break
        tokens.append(token)
        node = tree.child(node, token)
        if node is not None:
            path.append(node)
    return Walk(tuple(tokens), tuple(path))


def draw(row: Tensor, sampling: Sampling, position: int) -> int | None:
    """The token at `position`, given its edited logits [V]; None if they have no finite maximum."""
    if sampling.temperature == 0:
        best, token = row.max(-1)
        return int(token) if math.isfinite(best) else None
    scores = process(row, sampling)
    best = scores.max()
    if not math.isfinite(best):
        return None
    tokens, noise = contenders(scores, float(best), sampling.seed, position)
    return int(tokens[(scores.index_select(0, tokens) + noise).argmax()])


def cut_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Keep a token of scores [V] while the mass of the likelier ones, and of equal ones before it, is below top_p."""
    probabilities = scores.softmax(-1)
    # The tokens up to this bound make up at most half of what top-p cuts, so they are cut, and need not be sorted.
    possible = (probabilities > (1 - top_p) / (2 * scores.numel())).nonzero()[:, 0]
    ordered = possible[scores[possible].sort(descending=True, stable=True).indices]
    mass = probabilities[ordered].double()
    keep = mass.cumsum(-1) - mass < top_p
    # The likeliest one always stays.
    keep[:1] = True
    kept = ordered[keep]
    return torch.full_like(scores, -torch.inf).index_copy_(0, kept, scores[kept])


def process(logits: Tensor, sampling: Sampling, cut: Callable[[Tensor, float], Tensor] = cut_top_p) -> Tensor:
    """The scores that a token is drawn from, float32 [V], from the edited logits [V] at temperature > 0.

    In this order: temperature, top-k, top-p, min-p.  A token that is cut scores -inf.
    cut: what applies top-p; with one that takes many rows, logits may be [.., V].
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        threshold = scores.topk(sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if sampling.top_p < 1:
        scores = cut(scores, sampling.top_p)
    if sampling.min_p > 0:
        probabilities = scores.softmax(-1)
        floor = sampling.min_p * probabilities.amax(-1, keepdim=True)
        scores = scores.masked_fill(probabilities < floor, -torch.inf)
    return scores
