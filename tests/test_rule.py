"""The acceptance rule: exact in law, and the same tokens with and without drafts."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from paceline.actors.rule import BadLogits, draw, perturbed, process, verify, verify_all
from paceline.actors.tree import Subtree
from paceline.actors.values import Sampling
from paceline.kernels import verify_tree as kernel
from paceline.kernels.noise import gumbel, philox

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.6, 0.3, 0.1])


@pytest.fixture(autouse=True, scope="module")
def _remembered_draws():
    """A draw is a function of (row, sampling, position), so the many draws of the same ones may share it."""
    known: dict[tuple[object, ...], int | None] = {}
    make = kernel.draw

    def remembered(row: torch.Tensor, sampling: Sampling, position: int) -> int | None:
        key = (sampling, position, *row.tolist())
        if key not in known:
            known[key] = make(row, sampling, position)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "draw", remembered)
        yield


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, seed, expected):
    assert tuple(int(word) for word in philox(words(*counter), seed)) == expected


def test_noise_depends_on_seed_and_position_alone():
    together = gumbel(7, (3, 4, 5), 11)
    assert torch.equal(gumbel(7, (4,), 11)[0], together[1])
    assert torch.equal(gumbel(7, (4,), 9)[0], together[1, :9])
    assert not torch.equal(gumbel(8, (4,), 11)[0], together[1])
    assert not torch.equal(gumbel(7 + 2**32, (4,), 11)[0], together[1])


def test_noise_is_gumbel():
    noise = gumbel(1, range(64), 4096).flatten().double()
    assert abs(noise.mean() - 0.5772156649) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02


def every_tree(vocab: int, depth: int) -> list[list[tuple[int, ...]]]:
    """Every prefix-closed set of paths over `vocab` tokens, up to `depth` deep."""
    if depth == 0:
        return [[]]
    below = every_tree(vocab, depth - 1)
    options = [[None, *below]] * vocab
    trees = []
    for choice in itertools.product(*options):
        paths = []
        for token, sub in enumerate(choice):
            if sub is not None:
                paths += [(token,), *[(token, *path) for path in sub]]
        trees.append(paths)
    return trees


def subtree(paths: list[tuple[int, ...]]) -> Subtree:
    ordered = sorted(paths, key=len)
    index = {path: i for i, path in enumerate(ordered)}
    parents = tuple(index.get(path[:-1], -1) for path in ordered)
    return Subtree(tuple(path[-1] for path in ordered), parents, tuple(range(1, len(ordered) + 1)))


def markov_rows(tree: Subtree, table: torch.Tensor, last: int) -> torch.Tensor:
    return table[[last, *tree.tokens]]


def test_every_tree_over_a_tiny_vocabulary_gives_the_plain_tokens():
    table = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)) * 2
    trees = [subtree(paths) for paths in every_tree(3, 2)]
    assert len(trees) == 729
    accepted = rejected = 0
    for temperature, seed in itertools.product((0.0, 1.0), range(4)):
        sampling = Sampling(temperature, seed=seed)
        plain = [draw(table[0], sampling, 10)]
        for position in (11, 12):
            plain.append(draw(table[plain[-1]], sampling, position))
        for tree in trees:
            outcome = verify(tree, markov_rows(tree, table, 0), sampling, 10)
            assert list(outcome.tokens) == plain[: len(outcome.tokens)]
            assert [tree.tokens[i] for i in outcome.path] == plain[: len(outcome.path)]
            assert len(outcome.tokens) == len(outcome.path) + 1
            accepted += len(outcome.path)
            rejected += len(tree.tokens) - len(outcome.path)
    assert accepted > 0
    assert rejected > 0


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    expected = law * counts.sum()
    keep = expected > 0
    assert counts[~keep].sum() == 0
    return float((((counts - expected) ** 2)[keep] / expected[keep]).sum())


def limit(degrees: int) -> float:
    """A chi-square value exceeded by chance about once in a million runs (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3


def guess(kind: str, sampling: Sampling, rng: random.Random) -> int:
    """A drafter's single guess at position 5; it may look at the seed, as ours does."""
    if kind == "coupled":
        return int(perturbed(Q.log(), sampling, 5).argmax())
    if kind in ("right", "wrong"):
        return (draw(P.log(), sampling, 5) + (kind == "wrong")) % 3
    return {"random": rng.randrange(3), "out of vocabulary": 99}[kind]


@pytest.mark.parametrize("kind", ["right", "coupled", "random", "wrong", "out of vocabulary"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_law_is_the_targets_whatever_the_drafter_guesses(kind, temperature):
    rng = random.Random(1)
    counts = torch.zeros(9)
    law1 = (P.log() / temperature).softmax(-1)
    accepted = 0
    for seed in range(3000):
        sampling = Sampling(temperature, seed=seed)
        tree = Subtree((guess(kind, sampling, rng),), (-1,), (1,))
        outcome = verify(tree, P.log().expand(2, 3), sampling, 5)
        second = outcome.tokens[1] if outcome.path else draw(P.log(), sampling, 6)
        accepted += len(outcome.path)
        counts[outcome.tokens[0] * 3 + second] += 1
    assert chi_square(counts, torch.outer(law1, law1).flatten()) < limit(8)
    share = accepted / 3000
    assert {"right": share == 1, "wrong": share == 0, "out of vocabulary": share == 0}.get(kind, 0 < share < 1)
    for wrong_rule in ((0.532, 0.332, 0.136), (0.833, 0.0, 0.167)):
        assert (law1 - torch.tensor(wrong_rule)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("fields", "law"),
    [
        ({"top_k": 2}, [0.625, 0.375, 0]),
        ({"top_p": 0.5}, [1, 0, 0]),
        ({"top_p": 0.6}, [0.625, 0.375, 0]),
        ({"min_p": 0.5}, [0.625, 0.375, 0]),
        ({"top_k": 2, "top_p": 0.55}, [1, 0, 0]),
        ({"top_k": 9, "top_p": 0.999}, [0.5, 0.3, 0.2]),
    ],
)
def test_the_processors_cut_what_they_say_and_the_law_follows(fields, law):
    sampling = Sampling(1.0, **fields)
    probabilities = process(P.log(), sampling).softmax(-1)
    assert torch.allclose(probabilities, torch.tensor(law, dtype=torch.float32), atol=1e-6)
    counts = torch.zeros(3)
    for seed in range(2000):
        counts[draw(P.log(), Sampling(1.0, seed=seed, **fields), 3)] += 1
    assert chi_square(counts, torch.tensor(law, dtype=torch.float32)) < limit(2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_maximum_are_refused(bad, temperature):
    with pytest.raises(BadLogits, match="position 9"):
        draw(torch.tensor([0.0, bad, 1.0]), Sampling(temperature, top_p=0.9), 9)


def test_bad_logits_end_their_own_session_only():
    rows = P.log().expand(2, 3)
    broken = torch.stack([P.log(), torch.full((3,), math.nan)])
    samplings = [Sampling(0.8, seed=seed) for seed in range(3)]
    right = [draw(P.log(), sampling, 4) for sampling in samplings]
    trees = [Subtree((token,), (-1,), (1,)) for token in right]
    outcomes = verify_all(trees, [rows, broken, rows], samplings, [4, 4, 4], [None] * 3)
    assert isinstance(outcomes[1].fault, BadLogits)
    assert "position 5" in str(outcomes[1].fault)
    assert outcomes[1].tokens == (right[1],), "what was decided before it stands"
    for i in (0, 2):
        assert outcomes[i] == verify(trees[i], rows, samplings[i], 4)
        assert outcomes[i].path == (0,)


def test_rows_must_match_the_tree():
    with pytest.raises(ValueError, match="2 rows"):
        verify(Subtree((1,), (-1,), (1,)), torch.zeros(1, 3), Sampling(), 0)
