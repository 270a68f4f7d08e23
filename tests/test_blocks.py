"""The block pool against naive models, and what its own check finds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from paceline.actors.blocks import BlockPool, OutOfBlocks, PoolBroken, block_keys


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


# Blocks that are found by what they hold


def keys(text: str, salt: bytes = b"") -> list[bytes]:
    """The keys of blocks of one token each."""
    return list(block_keys([ord(letter) for letter in text], 1, salt))


def published(pool: BlockPool, text: str, salt: bytes = b"") -> list[int]:
    """Blocks that hold `text`, one token each."""
    blocks = pool.alloc(len(text))
    for block, key in zip(blocks, keys(text, salt), strict=True):
        pool.publish(block, key)
    return blocks


def test_a_key_stands_for_all_tokens_up_to_its_block_and_for_the_salt() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7]
    whole = list(block_keys(tokens, 3, b"a"))
    assert len(whole) == 2
    assert list(block_keys(tokens[3:], 3, b"a", whole[0])) == whole[1:]
    assert next(block_keys([1, 2, 3, 4, 5, 9], 3, b"a")) == whole[0]
    others = [
        list(block_keys(tokens, 3, b"b")),
        list(block_keys([9, *tokens[1:]], 3, b"a")),
        list(block_keys([*tokens[3:6], *tokens[3:6]], 3, b"a")),
        # Digits that run together, and a byte that moves from one number to the next.
        list(block_keys([12, 3, 4, 1, 23, 4], 3, b"a")),
        list(block_keys([256, 1, 0, 1, 256, 0], 3, b"a")),
    ]
    found = {key for other in others for key in other} | set(whole)
    assert len(found) == 12


def test_blocks_are_found_again_while_they_are_held_and_afterwards() -> None:
    pool = BlockPool(8)
    first = published(pool, "abc")
    assert pool.adopt(keys("abx")) == first[:2]
    pool.check({0: first, 1: first[:2]})
    assert (pool.free_blocks, pool.in_use(keys("abcd"))) == (5, 3)
    pool.free(first)
    pool.check({1: first[:2]})
    assert (pool.free_blocks, pool.in_use(keys("abc"))) == (6, 2)
    pool.free(first[:2])
    assert (pool.free_blocks, pool.in_use(keys("abc"))) == (8, 0)
    assert pool.adopt(keys("abc")) == first
    assert pool.adopt(keys("abc", b"another tenant")) == []
    pool.check({2: first})


def test_what_was_unused_longest_is_forgotten_first_and_from_its_end() -> None:
    pool = BlockPool(6)
    old, new = published(pool, "abc"), published(pool, "xyz")
    pool.free(old)
    pool.free(new)
    pool.alloc(1)
    assert pool.adopt(keys("abc")) == old[:2]
    pool.free(old[:2])
    pool.alloc(2)
    assert pool.adopt(keys("xyz")) == new[:1]
    assert pool.adopt(keys("abc")) == old[:2]


def test_one_of_two_equal_blocks_is_found_and_the_other_is_just_freed() -> None:
    pool = BlockPool(4)
    one, two = published(pool, "a"), published(pool, "a")
    pool.check({0: one, 1: two})
    pool.free(two)
    assert pool.adopt(keys("a")) == one
    pool.check({0: one, 1: one})


def test_a_retracted_block_is_not_found_and_not_remembered() -> None:
    pool = BlockPool(4)
    held = published(pool, "ab")
    pool.retract(held[0])
    assert pool.adopt(keys("ab")) == []
    pool.free(held)
    pool.check({})
    assert len(pool.alloc(4)) == 4


@dataclass
class Naive:
    """Blocks by what they hold, as a user sees them."""

    tables: dict[int, list[int]] = field(default_factory=dict)
    contents: dict[int, str] = field(default_factory=dict)  # block -> the text up to and with it, as written last


def open_one(pool: BlockPool, naive: Naive, rng: random.Random, id: int) -> str:
    text = "".join(rng.choices("abc", k=rng.randint(1, 7)))
    found = pool.adopt(keys(text))
    assert [naive.contents[block] for block in found] == [text[: i + 1] for i in range(len(found))]
    try:
        taken = pool.alloc(len(text) - len(found), after=found[-1] if found else None)
    except OutOfBlocks:
        pool.free(found)
        return "out of blocks"
    held = {block for table in naive.tables.values() for block in table}
    assert not held & set(taken), "taken from somebody"
    naive.tables[id] = [*found, *taken]
    for i, block in enumerate(taken, start=len(found)):
        naive.contents[block] = text[: i + 1]
        pool.publish(block, keys(text)[i])
    return "found" if found else "new"


def use_at_random(pool: BlockPool, naive: Naive, rng: random.Random, id: int) -> str:
    """One thing that an engine may do, checked against the naive model."""
    kind = rng.choice(["open", "open", "close", "cut"]) if naive.tables else "open"
    if kind == "open":
        return open_one(pool, naive, rng, id)
    id = rng.choice(list(naive.tables))
    keep = 0 if kind == "close" else rng.randint(0, len(naive.tables[id]))
    pool.free(naive.tables[id][keep:])
    naive.tables[id] = naive.tables[id][:keep]
    if not keep:
        del naive.tables[id]
    return kind


@pytest.mark.parametrize("seed", range(6))
def test_random_sharing_finds_only_what_was_written_and_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    pool, naive = BlockPool(rng.randint(6, 40)), Naive()
    done: Counter[str] = Counter()
    for step in range(400):
        done[use_at_random(pool, naive, rng, step)] += 1
        pool.check(naive.tables)
        out = {block for table in naive.tables.values() for block in table}
        assert pool.free_blocks == pool.blocks - len(out)
        done["shared"] += any(pool.holders(block) > 1 for block in out)
    assert not [kind for kind in ("found", "close", "cut", "shared", "out of blocks") if done[kind] < 5], done
