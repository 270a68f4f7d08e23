"""The Triton twin of verify_tree.py: every row drawn at once, then the walks, and one short answer for the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from paceline.kernels.noise import HIGHEST, LOWEST
from paceline.kernels.triton_noise import noise_of, signed
from paceline.kernels.verify_tree import Edit, Sampling, Tree, Walk, process, walk
from torch import Tensor

_TOKENS = 2048
"""Tokens of a row that one program looks at."""


@triton.jit
def _draw(
    scores,
    best,
    seeds,
    positions,
    noisy,
    values,
    tokens,
    vocab_size,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The best of each stretch of 4 * BLOCKS tokens of each row: its value and its token."""
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * 4 * BLOCKS + tl.arange(0, 4 * BLOCKS)
    score = tl.load(scores + row.to(tl.int64) * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
    if tl.load(noisy + row) != 0:
        # Where no token can win, the noise is not made.
        if tl.max(score, axis=0) + HIGHEST >= tl.load(best + row) + LOWEST:
            score += noise_of(tl.load(seeds + row), tl.load(positions + row), part * BLOCKS, BLOCKS)
        else:
            score = tl.full([4 * BLOCKS], float("-inf"), tl.float32)
    # Of equal ones the first counts, here and below, as in the reference.
    at = row * tl.num_programs(1) + part
    tl.store(values + at, tl.max(score, axis=0))
    tl.store(tokens + at, part * 4 * BLOCKS + tl.argmax(score, axis=0))


@triton.jit(do_not_specialize=["stride"])
def _walk(
    best, values, tokens, firsts, sizes, parents, guesses, out, parts, stride, PARTS: tl.constexpr, NODES: tl.constexpr
):
    """Walk down one tree.  out: per tree how many tokens, how long the path, then both, each `stride` long."""
    tree = tl.program_id(0)
    first, size = tl.load(firsts + tree), tl.load(sizes + tree)
    part, node = tl.arange(0, PARTS), tl.arange(0, NODES)
    # Node i of a tree stands at row first + 1 + i; its root's entry is nobody's child.
    parent = tl.load(parents + first + 1 + node, mask=node < size, other=-2)
    guess = tl.load(guesses + first + 1 + node, mask=node < size, other=-1)
    out += tree * (2 + 2 * stride)
    at, drawn, accepted = tl.full([], -1, tl.int64), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    going = tl.full([], 1, tl.int32)
    while going != 0:
        row = first + 1 + at
        top = tl.load(best + row)
        # No finite maximum: infinite, or not a number.
        going = ((top < float("inf")) & (top > float("-inf"))).to(tl.int32)
        if going != 0:
            value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
            token = tl.load(tokens + row * parts + tl.argmax(value, axis=0))
            tl.store(out + 2 + drawn, token)
            drawn += 1
            at = tl.max(tl.where((parent == at) & (guess == token), node, -1), axis=0).to(tl.int64)
            going = (at >= 0).to(tl.int32)
            if going != 0:
                tl.store(out + 2 + stride + accepted, at)
                accepted += 1
    tl.store(out, drawn)
    tl.store(out + 1, accepted)


def verify_tree(
    logits: Sequence[Tensor],
    trees: Sequence[Tree],
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    edits: Sequence[Edit | None],
) -> list[Walk]:
    """See verify_tree.verify_tree.  Waits for the device once, at the end, where no logits are to be edited."""
    free = [i for i, edit in enumerate(edits) if edit is None]
    drawn = iter(
        _drawn(
            [logits[i] for i in free],
            [trees[i] for i in free],
            [samplings[i] for i in free],
            [positions[i] for i in free],
        )
        if free
        else ()
    )
    # An edit may only see what is really said: what a rejected guess does to it must not matter.
    given = zip(logits, trees, samplings, positions, edits, strict=True)
    return [next(drawn) if one[-1] is None else walk(*one) for one in given]


def _drawn(
    logits: Sequence[Tensor], trees: Sequence[Tree], samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[Walk]:
    """The walks of trees whose logits are drawn from as they are."""
    scores = _processed(logits, samplings)
    # The maximum carries what is not a number along, which the kernels' own maxima do not.
    best = scores.amax(-1)
    values, tokens = _draws(scores, best, trees, samplings, positions)
    return _walks(best, values, tokens, trees)


def _processed(logits: Sequence[Tensor], samplings: Sequence[Sampling]) -> Tensor:
    """The scores of all rows, float32 [R, V]."""
    processed = [
        rows.float() if sampling.temperature == 0 else process(rows, sampling, _cut_top_p)
        for rows, sampling in zip(logits, samplings, strict=True)
    ]
    return processed[0].contiguous() if len(processed) == 1 else torch.cat(processed)


def _cut_top_p(scores: Tensor, top_p: float) -> Tensor:
    """See verify_tree.cut_top_p.  A device sorts many whole rows sooner than it tells the host which tokens matter."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    mass = scores.softmax(-1).gather(-1, order).double()
    cut = mass.cumsum(-1) - mass >= top_p
    cut[:, 0] = False
    return scores.masked_fill(torch.empty_like(cut).scatter(-1, order, cut), -torch.inf)


def _draws(
    scores: Tensor, best: Tensor, trees: Sequence[Tree], samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(values, tokens), [R, parts] each: the best draw of every part of every row."""
    seeds, at, noisy = torch.tensor(_row_facts(trees, samplings, positions), dtype=torch.int64).to(scores.device)
    rows, vocab_size = scores.shape
    parts = triton.cdiv(vocab_size, _TOKENS)
    values = torch.empty((rows, parts), device=scores.device)
    tokens = torch.empty((rows, parts), dtype=torch.int64, device=scores.device)
    _draw[(rows, parts)](
        scores, best, seeds, at, noisy, values, tokens, vocab_size, LOWEST=LOWEST, HIGHEST=HIGHEST, BLOCKS=_TOKENS // 4
    )
    return values, tokens


def _row_facts(
    trees: Sequence[Tree], samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Of each row: the seed, the position, and whether there is noise at all."""
    seeds: list[int] = []
    at: list[int] = []
    noisy: list[int] = []
    for tree, sampling, position in zip(trees, samplings, positions, strict=True):
        depths = _depths(tree)
        seeds += [signed(sampling.seed)] * len(depths)
        at += [position + depth for depth in depths]
        noisy += [int(sampling.temperature > 0)] * len(depths)
    return seeds, at, noisy


def _depths(tree: Tree) -> list[int]:
    """The depth of the root, which is 0, and of every node."""
    depths = [0]
    for parent in tree.parents:
        depths.append(depths[1 + parent] + 1)
    return depths


def _walks(best: Tensor, values: Tensor, tokens: Tensor, trees: Sequence[Tree]) -> list[Walk]:
    sizes = [len(tree.tokens) for tree in trees]
    firsts = [0, *itertools.accumulate(1 + size for size in sizes)][:-1]
    nodes = torch.tensor(
        [
            [parent for tree in trees for parent in (-2, *tree.parents)],
            [token for tree in trees for token in (-1, *tree.tokens)],
        ]
    )
    shape = torch.tensor([firsts, sizes])
    (parents, guesses), (first, size) = nodes.to(best.device), shape.to(best.device)
    stride = 1 + max(sizes)
    out = torch.zeros((len(trees), 2 + 2 * stride), dtype=torch.int64, device=best.device)
    _walk[(len(trees),)](
        best,
        values,
        tokens,
        first,
        size,
        parents,
        guesses,
        out,
        values.shape[1],
        stride,
        PARTS=triton.next_power_of_2(values.shape[1]),
        NODES=triton.next_power_of_2(stride),
    )
    answers: list[list[int]] = out.tolist()
    return [Walk(tuple(row[2 : 2 + row[0]]), tuple(row[2 + stride : 2 + stride + row[1]])) for row in answers]
