"""Passes padded to fixed shapes, with a recorder that calls the function again instead of a device's."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from paceline.actors import graphs
from paceline.actors.graphs import MAX_TOKENS, Graphs, Shape
from paceline.kernels.tree_attention import StaticBatch, TreeBatch, TreeSequence, flatten
from torch import Tensor

BLOCK = 4
SPARE = 1000
CPU = torch.device("cpu")


def describe(inputs: Tensor, rows: Tensor, batch: TreeBatch) -> Tensor:
    """Of each wanted row: its token, position and pool row, its sequence's length, and what it sees."""
    facts, bits, lists = batch.tables
    seen = {}
    for first, new, committed, pending, blocks, depths in facts.tolist():
        assert new <= batch.longest
        for query in range(first, first + new):
            slots = [slot for slot in range(pending) if bits[query, slot // 64] >> slot % 64 & 1]
            where = [committed + slot for slot in slots]
            pool = [int(lists[blocks + at // BLOCK]) * BLOCK + at % BLOCK for at in where]
            seen[query] = [*inputs[:, query].tolist(), committed, sum(pool), int(lists[depths + slots[-1]])]
    return torch.tensor([seen[row] for row in rows.tolist()], dtype=torch.float32)


class Recorder:
    """Calls the function again where a device would launch a graph, and counts what it was given to record."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        return run


def make(
    compute: Callable[[Tensor, Tensor, TreeBatch], Tensor] = describe, capture: graphs.Capture | None = None
) -> Graphs:
    return Graphs(compute, capture or Recorder(), CPU, BLOCK, SPARE)


def chain(committed: int, pending: int, new: int, first: int = 0) -> TreeSequence:
    """A chain of `pending` slots in blocks from `first` on."""
    blocks = tuple(range(first, first + -(-(committed + pending) // BLOCK)))
    ancestors = tuple((1 << slot + 1) - 1 for slot in range(pending - new, pending))
    return TreeSequence(blocks, committed, tuple(range(pending)), ancestors)


def expected(tokens: Sequence[int], rows: Sequence[int], sequences: Sequence[TreeSequence]) -> Tensor:
    inputs = torch.tensor([tokens, *flatten(sequences, BLOCK)])
    return describe(inputs, torch.tensor(rows), TreeBatch(sequences, BLOCK, CPU))


def random_pass(rng: random.Random) -> tuple[list[int], list[int], list[TreeSequence]]:
    shapes = [(rng.randrange(9), rng.randint(1, 70)) for _ in range(rng.randint(1, 5))]
    sequences = [
        chain(committed, pending, rng.randint(1, pending), 50 * i) for i, (committed, pending) in enumerate(shapes)
    ]
    count = sum(one.new for one in sequences)
    rows = rng.sample(range(count), rng.randint(0, min(count, 5)))
    return [rng.randrange(100) for _ in range(count)], rows, sequences


def test_a_padded_pass_is_the_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "_SIGHTINGS", 1)
    rng = random.Random(0)
    recorded, some = make(), 0
    for _ in range(60):
        one = random_pass(rng)
        found = recorded.run(*one)
        if len(one[0]) <= MAX_TOKENS:
            assert found is not None
            assert torch.equal(found.view(-1, 6), expected(*one).view(-1, 6))
            some += 1
        else:
            assert found is None
    assert some > 30


def test_a_shape_is_recorded_when_it_comes_again_and_again():
    recorder = Recorder()
    made = make(capture=recorder)
    for turn in range(1, 6):
        one = ([7] * 5, [0, 4], [chain(turn, 5, 5)])
        found = made.run(*one)
        assert (found is not None) == (turn >= 3)
        if found is not None:
            assert torch.equal(found, expected(*one))
    assert recorder.recorded == 1


def test_few_shapes_hold_all_passes_and_little_of_them_is_padding():
    shapes = set()
    for count in range(1, MAX_TOKENS + 1):
        shape = Shape.of([chain(3, count, count)])
        assert shape is not None
        assert count <= shape.tokens <= max(8, count * 1.5)
        assert shape.longest >= max(count, shape.tokens - count)
        assert 64 * shape.words >= count
        shapes.add(shape.tokens)
    assert len(shapes) < 16
    assert Shape.of([chain(0, MAX_TOKENS + 1, MAX_TOKENS + 1)]) is None


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_a_device_that_cannot_record_is_not_asked_again(fault: str, caplog: pytest.LogCaptureFixture):
    asked: list[int] = []

    def broken(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        asked.append(1)
        if fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: run() + 1000

    made = make(capture=broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            assert made.run([1, 2], [0], [chain(0, 2, 2)]) is None
    assert len(asked) == 1
    assert [record.message.startswith("CUDA graphs stay off") for record in caplog.records] == [True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_request_that_breaks_the_model_breaks_no_graphs(bad: float):
    def compute(inputs: Tensor, rows: Tensor, batch: TreeBatch) -> Tensor:
        logits = describe(inputs, rows, batch)
        return torch.where(inputs[0, rows, None] == 13, bad, logits)

    made = make(compute)
    found = [made.run([13, 2], [0, 1], [chain(0, 2, 2)]) for _ in range(4)][-1]
    assert found is not None
    assert not found[0].isfinite().any()
    assert torch.equal(found[1:], expected([13, 2], [1], [chain(0, 2, 2)]))


def test_only_so_many_are_remembered_and_a_forgotten_one_is_recorded_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "_GRAPHS", 2)
    monkeypatch.setattr(graphs, "_SIGHTINGS", 1)
    recorder = Recorder()

    def compute(inputs: Tensor, rows: Tensor, batch: TreeBatch) -> Tensor:
        assert isinstance(batch, StaticBatch)
        return describe(inputs, rows, batch)

    made = make(compute, recorder)
    for length in (1, 2, 1, 4, 1, 2):
        assert made.run([5] * length, [0], [chain(0, length, length)]) is not None
    assert recorder.recorded == 4


def test_more_blocks_than_there_is_memory_for_go_the_other_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "_LISTS", 100)
    monkeypatch.setattr(graphs, "MAX_TOKENS", 4)
    made = make()
    long = chain(BLOCK * 400, 1, 1)
    assert [made.run([1], [0], [long]) for _ in range(5)] == [None] * 5
    # Nothing is wrong with the shape: a shorter one still goes this way.
    assert made.run([1], [0], [chain(4, 1, 1)]) is not None
