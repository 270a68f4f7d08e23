"""Who holds which block of the key/value pool, and which blocks can be found again by what they hold."""

from __future__ import annotations

import hashlib
import re
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

_FREE_RUN = re.compile(rb"\x01+")
_DIGEST = 32  # bytes; nobody finds two texts with one key


class OutOfBlocks(RuntimeError):
    """The pool cannot hold what was asked for.  Nothing was changed."""


class PoolBroken(RuntimeError):
    """The pool's books do not add up; the message names the blocks."""


def block_keys(tokens: Sequence[int], block_size: int, salt: bytes, above: bytes | None = None) -> Iterator[bytes]:
    """The key of each whole block of a sequence: a digest of `salt` and of all tokens up to the block's end.

    above: the key of the block before `tokens`; None if a sequence begins with them.
    """
    key = hashlib.blake2b(salt, digest_size=_DIGEST, person=b"root").digest() if above is None else above
    for end in range(block_size, len(tokens) + 1, block_size):
        packed = struct.pack(f"<{block_size}I", *tokens[end - block_size : end])
        key = hashlib.blake2b(key + packed, digest_size=_DIGEST).digest()
        yield key


class BlockPool:
    """Hands out fixed-size blocks, side by side where it can, so that a sequence can be read as one view.

    A block may have several holders.  One that was published under a key can be found by it, and is remembered when its
    last holder has given it back, until its room is needed: the longest unused go first.  It must not change meanwhile.

    blocks: how many there are; their ids are 0 to blocks - 1.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {blocks}")
        self.blocks = blocks
        # Blocks are forgotten a few at a time, so that a new sequence finds some side by side.
        self._spare = blocks // 16
        self._empty = blocks
        self._is_empty = bytearray(b"\x01" * blocks)
        self._holders = [0] * blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # remembered and without a holder, the longest unused first
        self._keys: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """How many can be had: the empty ones, and those that are only remembered."""
        return self._empty + len(self._idle)

    def alloc(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, if possible the ones next to block `after`.

        Raises OutOfBlocks, with nothing taken, when fewer are free.
        """
        if count > self.free_blocks:
            raise OutOfBlocks(f"{count} blocks are needed and {self.free_blocks} of {self.blocks} are free")
        if count > self._empty:
            self._forget(count - self._empty + self._spare)
        taken: list[int] = []
        cursor = self.blocks if after is None else after + 1
        while len(taken) < count:
            if cursor >= self.blocks or not self._is_empty[cursor]:
                cursor = self._roomiest(count - len(taken))
            self._is_empty[cursor] = 0
            self._holders[cursor] = 1
            taken.append(cursor)
            cursor += 1
        self._empty -= count
        return taken

    def _forget(self, count: int) -> None:
        for _ in range(min(count, len(self._idle))):
            block, _ = self._idle.popitem(last=False)
            self.retract(block)
            self._is_empty[block] = 1
            self._empty += 1

    def _roomiest(self, count: int) -> int:
        """Where a new run of blocks should begin: it and its left neighbour should both have room to grow."""
        run = max(_FREE_RUN.finditer(self._is_empty), key=lambda found: found.end() - found.start())
        if run.start() == 0:
            return 0
        return run.start() + max(0, run.end() - run.start() - count) // 2

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each.  Raises PoolBroken, with nothing changed, for a block that is not out.

        Later ones are forgotten before earlier ones, since a block is only found through those before it.
        """
        wrong = [b for b in blocks if not 0 <= b < self.blocks or not self._holders[b]]
        if wrong or len(set(blocks)) != len(blocks):
            raise PoolBroken(f"blocks {wrong or list(blocks)} were given back without being out, or twice")
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._keys:
                self._idle[block] = None
            else:
                self._is_empty[block] = 1
                self._empty += 1

    # Blocks that are found by what they hold

    def publish(self, block: int, key: bytes) -> None:
        """Let a block that is out be found by `key`, unless another one is already."""
        if key not in self._published:
            self._published[key] = block
            self._keys[block] = key

    def retract(self, block: int) -> None:
        """Let a block be found no more."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._published[key]

    def adopt(self, keys: Iterable[bytes]) -> list[int]:
        """Take a hold on the blocks of these keys, up to the first that is not to be found."""
        blocks = self._find(keys)
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)
        return blocks

    def in_use(self, keys: Iterable[bytes]) -> int:
        """How many of the blocks that `adopt` would find have a holder already, so that adopting them takes no room."""
        return sum(self._holders[block] > 0 for block in self._find(keys))

    def _find(self, keys: Iterable[bytes]) -> list[int]:
        found: list[int] = []
        for key in keys:
            block = self._published.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def holders(self, block: int) -> int:
        """How many hold this block."""
        return self._holders[block]

    def key(self, block: int) -> bytes | None:
        """The key that it can be found by."""
        return self._keys.get(block)

    # The books

    def check(self, tables: Mapping[int, Sequence[int]] | None = None) -> None:
        """Raise PoolBroken, naming the blocks, unless the books add up.

        tables: the blocks of every sequence, by its id; every hold on a block must be in one of them.
        """
        counted = self._is_empty.count(1)
        if counted != self._empty:
            raise PoolBroken(f"{counted} blocks are marked free, but the count says {self._empty}")
        if {key: block for block, key in self._keys.items()} != self._published:
            raise PoolBroken(f"keys and published blocks differ: {self._keys} against {self._published}")
        for block in range(self.blocks):
            self._check_state(block)
        if tables is not None:
            self._check_holders(tables)

    def _check_state(self, block: int) -> None:
        states = (bool(self._is_empty[block]), self._holders[block] > 0, block in self._idle)
        if sum(states) != 1:
            raise PoolBroken(f"block {block} is (free, held, only remembered) = {states}")
        if (block in self._keys and states[0]) or (block not in self._keys and states[2]):
            raise PoolBroken(f"block {block} is (free, held, only remembered) = {states} with key {self.key(block)!r}")

    def _check_holders(self, tables: Mapping[int, Sequence[int]]) -> None:
        found: dict[int, list[int]] = {}
        for sequence, blocks in tables.items():
            for block in blocks:
                if not self._holders[block]:
                    raise PoolBroken(f"block {block} of sequence {sequence} is marked free")
                found.setdefault(block, []).append(sequence)
        for block, sequences in found.items():
            if len(sequences) != self._holders[block]:
                held = " and by ".join(f"sequence {sequence}" for sequence in sequences)
                raise PoolBroken(f"block {block} is held by {held}, but {self._holders[block]} are counted")
        leaked = [block for block in range(self.blocks) if self._holders[block] and block not in found]
        if leaked:
            raise PoolBroken(f"blocks {leaked} are out, but no sequence holds them")
