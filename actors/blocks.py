"""Who holds which block of the key/value pool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_FREE_RUN = re.compile(rb"\x01+")


class OutOfBlocks(RuntimeError):
    """The pool cannot hold what was asked for.  Nothing was changed."""


class PoolBroken(RuntimeError):
    """The pool's books do not add up; the message names the blocks."""


class BlockPool:
    """Hands out fixed-size blocks, side by side where it can, so that a sequence can be read as one view.

    blocks: how many there are; their ids are 0 to blocks - 1.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {blocks}")
        self.blocks = blocks
        self.free_blocks = blocks
        self._is_free = bytearray(b"\x01" * blocks)

    def alloc(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, if possible the ones next to block `after`.

        Raises OutOfBlocks, with nothing taken, when fewer are free.
        """
        if count > self.free_blocks:
            raise OutOfBlocks(f"{count} blocks are needed and {self.free_blocks} of {self.blocks} are free")
        taken: list[int] = []
        cursor = self.blocks if after is None else after + 1
        while len(taken) < count:
            if cursor >= self.blocks or not self._is_free[cursor]:
                cursor = self._roomiest(count - len(taken))
            self._is_free[cursor] = 0
            taken.append(cursor)
            cursor += 1
        self.free_blocks -= count
        return taken

    def _roomiest(self, count: int) -> int:
        """Where a new run of blocks should begin: it and its left neighbour should both have room to grow."""
        run = max(_FREE_RUN.finditer(self._is_free), key=lambda found: found.end() - found.start())
        if run.start() == 0:
            return 0
        return run.start() + max(0, run.end() - run.start() - count) // 2

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back.  Raises PoolBroken, with nothing changed, for a block that is not out."""
        wrong = [b for b in blocks if not 0 <= b < self.blocks or self._is_free[b]]
        if wrong or len(set(blocks)) != len(blocks):
            raise PoolBroken(f"blocks {wrong or list(blocks)} were given back without being out, or twice")
        for block in blocks:
            self._is_free[block] = 1
        self.free_blocks += len(blocks)

    def check(self, tables: Mapping[int, Sequence[int]] | None = None) -> None:
        """Raise PoolBroken, naming the blocks, unless the books add up.

        tables: the blocks of every sequence, by its id; each block that is out must be in exactly one of them.
        """
        counted = self._is_free.count(1)
        if counted != self.free_blocks:
            raise PoolBroken(f"{counted} blocks are marked free, but the count says {self.free_blocks}")
        if tables is None:
            return
        holder: dict[int, int] = {}
        for sequence, blocks in tables.items():
            for block in blocks:
                if block in holder:
                    raise PoolBroken(f"block {block} is held by sequence {holder[block]} and by sequence {sequence}")
                if self._is_free[block]:
                    raise PoolBroken(f"block {block} of sequence {sequence} is marked free")
                holder[block] = sequence
        leaked = [b for b in range(self.blocks) if not self._is_free[b] and b not in holder]
        if leaked:
            raise PoolBroken(f"blocks {leaked} are out, but no sequence holds them")
