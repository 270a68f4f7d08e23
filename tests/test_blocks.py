"""The block pool against a naive model, and what its own check finds."""

from __future__ import annotations

import random

import pytest
from paceline.actors.blocks import BlockPool, OutOfBlocks, PoolBroken


def free_ids(pool: BlockPool) -> set[int]:
    """What is free, as a user can find out: by taking all of it and giving it back."""
    taken = pool.alloc(pool.free_blocks)
    pool.free(taken)
    return set(taken)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_every_block_with_exactly_one_owner(seed: int):
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 40))
    tables: dict[int, list[int]] = {}
    refused = grown = 0
    for step in range(400):
        owner = rng.choice(list(tables)) if tables and rng.random() < 0.7 else step
        held = tables.get(owner, [])
        if held and rng.random() < 0.5:
            keep = rng.randint(0, len(held))
            pool.free(held[keep:])
            tables[owner] = held[:keep]
        else:
            try:
                taken = pool.alloc(rng.randint(0, 9), after=held[-1] if held else None)
            except OutOfBlocks:
                refused += 1
            else:
                tables[owner] = held + taken
                grown += bool(held and taken)
        tables = {id: blocks for id, blocks in tables.items() if blocks}
        pool.check(tables)
        out = [block for blocks in tables.values() for block in blocks]
        assert len(out) == len(set(out)) == pool.blocks - pool.free_blocks
    assert refused
    assert grown


def test_a_growing_sequence_stays_in_one_piece_while_there_is_room():
    pool = BlockPool(64)
    tables = {owner: pool.alloc(2) for owner in range(4)}
    for _ in range(4):
        for table in tables.values():
            table += pool.alloc(1, after=table[-1])
    for table in tables.values():
        assert table == list(range(table[0], table[0] + len(table)))


def test_scattered_blocks_are_used_when_no_run_is_long_enough():
    pool = BlockPool(8)
    everything = pool.alloc(8)
    pool.free(everything[::2])
    assert sorted(pool.alloc(4)) == everything[::2]


def test_running_out_changes_nothing():
    pool = BlockPool(4)
    held = pool.alloc(3)
    with pytest.raises(OutOfBlocks, match="2 blocks are needed and 1 of 4 are free"):
        pool.alloc(2, after=held[-1])
    pool.check({0: held})
    assert free_ids(pool) == set(range(4)) - set(held)


@pytest.mark.parametrize("wrong", [[9], [-1], [0, 0], [1, 3]])
def test_giving_back_what_is_not_out_changes_nothing(wrong: list[int]):
    pool = BlockPool(4)
    pool.alloc(4)
    pool.free([3])
    with pytest.raises(PoolBroken, match="given back"):
        pool.free(wrong)
    pool.check({0: [0, 1, 2]})
    assert pool.free_blocks == 1


def test_the_check_names_the_blocks_of_a_leak_a_shared_and_a_freed_one():
    pool = BlockPool(6)
    a, b = pool.alloc(2), pool.alloc(1)
    pool.check({0: a, 1: b})
    with pytest.raises(PoolBroken, match=rf"blocks \[{b[0]}\] are out, but no sequence holds them"):
        pool.check({0: a})
    with pytest.raises(PoolBroken, match=f"block {a[0]} is held by sequence 0 and by sequence 1"):
        pool.check({0: a, 1: [*b, a[0]]})
    pool.free(b)
    with pytest.raises(PoolBroken, match=f"block {b[0]} of sequence 1 is marked free"):
        pool.check({0: a, 1: b})


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
