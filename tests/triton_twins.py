"""The Triton kernels against their references: under Triton's interpreter if TRITON_INTERPRET is 1, else on a GPU.

test_triton.py runs this file in a process of its own, since Triton reads that variable once, when it is imported.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Sequence

import pytest
import torch
from paceline.actors import graphs
from paceline.actors.constraints import Shaper
from paceline.actors.engine import Feed
from paceline.actors.graphs import CudaCapture
from paceline.actors.rule import draw
from paceline.actors.torch_engine import TorchEngine
from paceline.actors.tree import Subtree
from paceline.actors.values import Constraints, Sampling
from paceline.kernels.dispatch import Kernel
from paceline.kernels.kv_compact import kv_compact
from paceline.kernels.noise import gumbel
from paceline.kernels.tree_attention import TreeBatch, TreeSequence, tree_attention
from paceline.kernels.verify_tree import Edit, verify_tree
from tiny_models import VOCAB, tiny_model
from torch import Tensor

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# The interpreter computes in numpy, which has no bfloat16.
HALF = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
BLOCK = 4
SAMPLINGS = [
    Sampling(),
    Sampling(0.8, seed=2**64 - 3),
    Sampling(1.3, top_k=7, seed=4),
    Sampling(0.7, top_p=0.9, seed=2**63),
    Sampling(1.0, min_p=0.05, seed=1),
    Sampling(1.1, top_k=40, top_p=0.95, min_p=0.01, seed=9),
]


def random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    """(depths, ancestors) of the slots of a random forest: deep at first, bushy later."""
    depths: list[int] = []
    ancestors: list[int] = []
    for slot in range(size):
        parent = slot - 1 if slot < size // 2 else rng.randrange(-1, slot)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        ancestors.append(1 << slot | (ancestors[parent] if parent >= 0 else 0))
    return depths, ancestors


def random_sequences(rng: random.Random, shapes: Sequence[tuple[int, int, int]], block_size: int) -> list[TreeSequence]:
    """Sequences of (committed, pending, new) positions, in scattered blocks."""
    needed = [-(-(committed + pending) // block_size) for committed, pending, _ in shapes]
    free = rng.sample(range(sum(needed) + 3), sum(needed))
    sequences = []
    for (committed, pending, new), count in zip(shapes, needed, strict=True):
        blocks, free = free[:count], free[count:]
        depths, ancestors = random_tree(rng, pending)
        sequences.append(TreeSequence(tuple(blocks), committed, tuple(depths), tuple(ancestors[pending - new :])))
    return sequences


def random_batch(rng: random.Random, shapes: Sequence[tuple[int, int, int]]) -> tuple[TreeBatch, int]:
    """A batch of such sequences, and the rows of its pool."""
    sequences = random_sequences(rng, shapes, BLOCK)
    blocks = sum(len(sequence.blocks) for sequence in sequences) + 3
    return TreeBatch(sequences, BLOCK, DEVICE), blocks * BLOCK


@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "value_dim", "half", "options"),
    [
        (2, 2, 16, 16, False, {}),
        (6, 2, 64, 64, True, {}),
        (3, 1, 24, 40, False, {"softcap": 3.0}),
        (2, 1, 32, 32, False, {"window": 5}),
        (1, 1, 16, 16, True, {"window": 1}),
        (20, 1, 16, 16, False, {"window": 40, "softcap": 20.0}),
    ],
)
def test_attention_sees_what_the_reference_sees(heads, key_heads, dim, value_dim, half, options):
    rng = random.Random(dim * heads)
    # A prefill, many slots of which few are new, a single token, nothing committed, and more than fits one turn.
    batch, rows = random_batch(rng, [(0, 3, 3), (13, 130, 5), (70, 1, 1), (0, 66, 12), (149, 9, 7)])
    make = torch.Generator().manual_seed(heads)
    tokens = sum(sequence.new for sequence in batch.sequences)
    # As the model makes it: heads first, and seen through a transposition.
    query = torch.randn(heads, tokens, dim, generator=make).to(DEVICE, HALF if half else torch.float32).transpose(0, 1)
    keys, values = (torch.randn(rows, key_heads, n, generator=make).to(query) for n in (dim, value_dim))
    outside = torch.ones(rows, dtype=torch.bool)
    for sequence in batch.sequences:
        outside[sequence.slots(BLOCK, 0, sequence.total)] = False
    keys[outside], values[outside] = math.nan, math.nan
    arguments = {"scaling": dim**-0.5, "softcap": None, "window": None, **options}
    expected = tree_attention.reference(query, keys, values, batch, **arguments)
    found = tree_attention.twin(query, keys, values, batch, **arguments)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    tolerance = 2e-2 if half else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_recorded_passes_compute_what_the_others_do(name, monkeypatch):
    monkeypatch.setattr(graphs, "_SIGHTINGS", 1)
    recorded = []

    def capture(run):
        recorded.append(1)
        return run if DEVICE.type == "cpu" else CudaCapture(DEVICE)(run)

    model = tiny_model(name).to(DEVICE)
    plain, fast = TorchEngine(model, 240, BLOCK), TorchEngine(model, 240, BLOCK, capture=capture)
    fast_ids, plain_ids = ([engine.open() for _ in range(3)] for engine in (fast, plain))
    rng = random.Random(3)
    for turn in range(8):
        feeds = []
        for index in rng.sample(range(3), rng.randint(1, 3)):
            parents = tuple(rng.randrange(-1, slot) for slot in range(rng.randint(1, 6)))
            tokens = tuple(rng.randrange(VOCAB) for _ in parents)
            feeds.append((index, tokens, parents, tuple(rng.sample(range(len(tokens)), rng.randint(0, len(tokens))))))
        expected = plain.step([Feed(plain_ids[index], *rest) for index, *rest in feeds])
        with monkeypatch.context() as patched:
            # Only the kernels can read what a graph reads.
            patched.setattr(Kernel, "has_twin_on", lambda self, device: True)
            found = fast.step([Feed(fast_ids[index], *rest) for index, *rest in feeds])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        for index, _, parents, _ in feeds:
            path = [0] if turn % 2 else [len(parents) - 1]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            for engine, ids in ((plain, plain_ids), (fast, fast_ids)):
                engine.commit(ids[index], path)
                engine.truncate(ids[index], engine.length(ids[index]))
    assert len(recorded) >= 3
    fast.check()


def drafted(rng: random.Random, rows: Tensor, sampling: Sampling, position: int, edit: Edit | None) -> Subtree:
    """A tree whose nodes are now right, now wrong, with siblings, for rows that are numbered as its nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    depths, paths = [0], [()]
    for node in range(rows.shape[0] - 1):
        parent = rng.choice([-1, node - 1, node - 1, node - 1]) if node else -1
        row, path = rows[1 + parent].cpu(), paths[1 + parent]
        right = draw(edit(row, path) if edit else row, sampling, position + depths[1 + parent])
        token = right if rng.random() < 0.7 else rng.randrange(rows.shape[1])
        while (parent, token) in zip(parents, tokens, strict=True):
            token = rng.randrange(rows.shape[1])
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[1 + parent] + 1)
        paths.append((*path, token))
    return Subtree(tuple(tokens), tuple(parents), tuple(range(1, len(tokens) + 1)))


@pytest.mark.parametrize("vocab", [9, 2051])
def test_the_same_tokens_are_drawn_and_the_same_paths_walked(vocab):
    rng = random.Random(vocab)
    make = torch.Generator().manual_seed(vocab)
    logits = [torch.randn(1 + n, vocab, generator=make).mul(4) for n in (0, 1, 3, 6, 3, 4)]
    logits[3][0, : vocab // 2] = -torch.inf
    positions = [rng.randrange(2**31) for _ in SAMPLINGS]
    constraints = Constraints(
        ((1, 3.0), (3, -50.0)), 1.3, 0.5, 0.5, bad_words=((4,), (2, 5)), min_tokens=3, ends=(0, 1)
    )
    edits = [Shaper(constraints, (1, 2), (), vocab) if i % 2 else None for i in range(len(SAMPLINGS))]
    trees = [drafted(rng, *one) for one in zip(logits, SAMPLINGS, positions, edits, strict=True)]
    on_device = [rows.to(DEVICE) for rows in logits]
    found = verify_tree.twin(on_device, trees, SAMPLINGS, positions, edits)
    assert found == verify_tree.reference(logits, trees, SAMPLINGS, positions, edits)
    assert sum(len(walk.path) for walk in found) > 3
    assert any(len(walk.path) < len(tree.tokens) for walk, tree in zip(found, trees, strict=True))
    # A session alone gets what it got in company.
    assert verify_tree.twin(on_device[3:4], trees[3:4], SAMPLINGS[3:4], positions[3:4], edits[3:4]) == found[3:4]


def test_a_row_that_cannot_be_edited_ends_its_own_walk_when_it_is_reached():
    rows = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    first = draw(rows[0], Sampling(), 7)
    reached, missed = Subtree((first, 3), (-1, 0), (1, 2)), Subtree((first + 1, 3), (-1, 0), (1, 2))

    def refuse(row: Tensor, path: tuple[int, ...]) -> Tensor:
        if path:
            raise ValueError("not here")
        return row

    arguments = ([reached, missed, reached], [Sampling()] * 3, [7] * 3, [refuse, refuse, None])
    for walks in (
        verify_tree.twin([rows[:3].to(DEVICE)] * 3, *arguments),
        verify_tree.reference([rows[:3]] * 3, *arguments),
    ):
        assert [walk.tokens[:1] for walk in walks] == [(first,)] * 3
        assert (walks[0].broken, str(walks[0].fault), walks[0].path) == (True, "not here", (0,))
        assert not walks[1].broken
        assert not walks[2].broken


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.8, top_k=3, top_p=0.9, min_p=0.1)])
def test_rows_without_a_finite_maximum_break_their_own_walk_only(bad, sampling):
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    broken = rows.clone()
    broken[1] = bad
    tree = Subtree((draw(rows[0], sampling, 7), 3), (-1, 0), (1, 2))
    arguments = ([tree, tree], [sampling, sampling], [7, 7], [None, None])
    found = verify_tree.twin([broken.to(DEVICE), rows.to(DEVICE)], *arguments)
    assert found == verify_tree.reference([broken, rows], *arguments)
    assert (found[0].broken, len(found[0].path)) == (True, 1)
    assert not found[1].broken


def test_equal_scores_go_to_the_first_token():
    rows = torch.zeros(2, 4100)
    rows[1, [4099, 2900, 3100]] = 1.0
    tree = Subtree((0,), (-1,), (1,))
    assert verify_tree.twin([rows.to(DEVICE)], [tree], [Sampling()], [0], [None])[0].tokens == (0, 2900)


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_the_noise_is_the_same(seed):
    positions = (0, 5, 2**32 - 1)
    found = gumbel.twin(seed, positions, 1501, DEVICE).cpu()
    # The words are equal, or the numbers would differ altogether; the logarithms are each device's own.
    torch.testing.assert_close(found, gumbel.reference(seed, positions, 1501), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(2, 3), (5, 128)])
def test_rows_move_as_if_all_at_once(shape, dtype):
    rng = random.Random(0)
    pool = torch.randn(3, 40, *shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    swap, chain, none = ([0, 5], [5, 0]), (list(range(1, 30)), list(range(29))), ([], [])
    twice, mixed = ([2, 2], [0, 4]), (rng.choices(range(40), k=33), rng.sample(range(40), 33))
    for moves in (swap, chain, none, twice, mixed):
        source, target = (torch.tensor(side, dtype=torch.int64, device=DEVICE) for side in moves)
        expected, found = pool.clone(), pool.clone()
        kv_compact.reference(expected, source, target)
        kv_compact.twin(found, source, target)
        assert torch.equal(found, expected)


def test_calls_with_data_on_a_gpu_run_the_twin(monkeypatch):
    if DEVICE.type == "cpu":
        pytest.skip("needs a CUDA device")
    calls = []
    twin = gumbel.twin
    monkeypatch.setattr(gumbel, "twin", lambda *arguments: calls.append(arguments) or twin(*arguments))
    sampling = dataclasses.replace(SAMPLINGS[1])
    assert gumbel(sampling.seed, (3,), 9, DEVICE).is_cuda
    assert len(calls) == 1
