"""What the loops need of a model with a cache: many sequences, one forward, cut back and re-rooted at will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence adds in one pass.

    A sequence holds `length` committed cached positions, then P pending slots, each following another one or the last
    committed position.  The new tokens take slots P, P + 1, and so on.

    parents[i]: the pending slot that tokens[i] follows (one of this Feed's own earlier ones, too), or -1 for the last
    committed position.  A slot's position id is length + its depth; depth is 0 under parent -1.
    rows: indices into tokens whose logits are wanted, in the order wanted.
    """

    sequence: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    rows: tuple[int, ...]


class Engine(Protocol):
    """A model with a cache.  Every error leaves all sequences as they were."""

    vocab_size: int
    context_length: int

    def open(self) -> int:
        """A new, empty sequence.  Ids are never used again."""
        ...

    def step(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """One batched forward; per feed, float32 [len(rows), vocab_size].

        Raises ValueError for a Feed that cannot be run, and OutOfBlocks when the pool is empty.
        """
        ...

    def commit(self, sequence: int, path: Sequence[int]) -> dict[int, int]:
        """Make a chain of pending slots, from the last committed position on, committed.

        Slots below the path's end stay pending, renumbered from 0 in their old order; all others are dropped.
        Returns {old slot: new slot} of those that stay.  Raises ValueError for an empty or broken path.
        """
        ...

    def truncate(self, sequence: int, length: int) -> None:
        """Drop all pending slots, and committed positions from `length` on."""
        ...

    def close(self, sequence: int) -> None:
        """Free a sequence.  Closing it again does nothing."""
        ...

    def length(self, sequence: int) -> int:
        """Committed positions."""
        ...

    def pending(self, sequence: int) -> int:
        """Pending slots."""
        ...

    def fits(self, lengths: Sequence[int]) -> bool:
        """Could the pool hold sequences of so many committed and pending positions, and nothing else, at once?"""
        ...
