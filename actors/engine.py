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
    block_size: int
    """Positions per block, the unit of the cache."""

    @property
    def free_blocks(self) -> int:
        """Blocks that sequences can still take."""
        ...

    def open(self, tokens: Sequence[int] = (), salt: bytes | None = None) -> int:
        """A new sequence that will begin with `tokens`.  Ids are never used again.

        The longest run of whole blocks of `tokens` that is still cached is committed in it already, see `length`, but
        never all of `tokens`.  Only blocks of committed tokens of sequences with the same salt are found.
        salt: None neither finds any nor leaves any to be found.
        """
        ...

    def cost(self, tokens: Sequence[int], salt: bytes | None = None) -> int:
        """Free blocks that a sequence would have taken once it had opened with `tokens` and held all of them."""
        ...

    def step(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """One batched forward; per feed, float32 [len(rows), vocab_size], or a column per token of a trimmed head.

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

    def forget(self, sequence: int) -> None:
        """Let nothing that it holds be found by `open` any more; for when something is wrong with it."""
        ...

    def length(self, sequence: int) -> int:
        """Committed positions."""
        ...

    def pending(self, sequence: int) -> int:
        """Pending slots."""
        ...

    def spare(self, sequence: int) -> int:
        """Slots that it can still add without another block."""
        ...

    def fits(self, lengths: Sequence[int]) -> bool:
        """Could the pool hold sequences of so many committed and pending positions, and nothing else, at once?"""
        ...
