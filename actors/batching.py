"""Which sessions take part in the verifier's next pass, and with how much: plain functions of plain values.

A pass has a budget of tokens, since its time grows with them, and one of cache blocks.  Whoever decodes comes first,
with one token each, so that a long prompt holds nobody up; prompts get the rest, but always something; guesses are the
first to be left out.  Where there is not enough for all, those served longest ago come first, so that everybody's turn
comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_PREFILL_SHARE = 8


@dataclass(frozen=True, slots=True)
class Budget:
    """What a pass may take.

    tokens: over all sessions, at least 2.  chunk: prompt tokens over all sessions while some session decodes.
    """

    tokens: int
    chunk: int

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"pass_tokens must be at least 2, got {self.tokens}: one to decode, one of a prompt")
        if self.chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {self.chunk}")

    def decoders(self, prefilling: bool) -> int:
        """How many sessions may decode in a pass; prompts, if there are any, must not starve."""
        return self.tokens - max(1, self.tokens // _PREFILL_SHARE) if prefilling else self.tokens

    def alone(self) -> Budget:
        """The same while no session decodes, so that none is held up by a prompt."""
        return replace(self, chunk=self.tokens)


@dataclass(frozen=True, slots=True)
class Want:
    """What a session could use in the next pass.

    uncached: committed tokens that it has to feed; the last one brings a new token.  nodes: guesses to be verified with
    it.  spare: slots left in the blocks that it holds.  served: the number of the last pass that it took part in.
    """

    uncached: int
    nodes: int
    spare: int
    served: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a session gets of a pass: so many uncached tokens, none for no part in it, and so many nodes."""

    tokens: int
    nodes: int


def spread(wanted: Sequence[int], budget: int) -> list[int]:
    """Divide `budget` so that nobody gets less for another one to get more; if there is not one each, in order."""
    given = [0] * len(wanted)
    takers = [i for i, want in enumerate(wanted) if want > 0][:budget]
    for left, i in zip(range(len(takers), 0, -1), sorted(takers, key=lambda i: wanted[i]), strict=True):
        given[i] = min(wanted[i], -(-budget // left))
        budget -= given[i]
    return given


def prefill_shares(wants: Sequence[Want], budget: int) -> list[int]:
    """Prompt tokens for each session, the oldest first: it gets half, so that it is done soon; the others go on."""
    if not wants:
        return []
    given = [0] * len(wants)
    given[0] = min(wants[0].uncached, budget - budget // 2)
    order = sorted(range(len(wants)), key=lambda i: wants[i].served)
    rest = spread([wants[i].uncached - given[i] for i in order], budget - given[0])
    for i, more in zip(order, rest, strict=True):
        given[i] += more
    return given


def share_out(wants: Sequence[Want], budget: Budget, free: int, block_size: int) -> list[Share] | None:
    """Each session's share of a pass; `wants` are in order of age, the oldest first.

    At most `budget.decoders` of them may decode, that is, have one token to feed.
    free: blocks that may be taken.  None: they do not even do for one token of each that should get one.
    """
    decoding = [want.uncached == 1 for want in wants]
    prompts = [want for want, decodes in zip(wants, decoding, strict=True) if not decodes]
    most = budget.decoders(bool(prompts))
    by_turn = sorted(range(len(wants)), key=lambda i: wants[i].served)
    spared = spread([wants[i].nodes * decoding[i] for i in by_turn], most - sum(decoding))
    nodes = dict(zip(by_turn, spared, strict=True))
    left = min(budget.chunk, budget.tokens - sum(decoding) - sum(spared))
    chunks = iter(prefill_shares(prompts, left))
    tokens = [1 if decodes else next(chunks) for decodes in decoding]
    blocks = _Blocks(free, block_size, [want.spare for want in wants])
    if not all(blocks.grow(i, 1) for i, count in enumerate(tokens) if count):
        return None
    tokens = [1 + blocks.grow(i, count - 1) if count else 0 for i, count in enumerate(tokens)]
    return [Share(count, blocks.grow(i, nodes[i])) for i, count in enumerate(tokens)]


class _Blocks:
    """Free blocks, handed out as sessions outgrow those that they hold.  spare: slots that are left in these."""

    def __init__(self, free: int, size: int, spare: list[int]) -> None:
        self._free, self._size, self._spare = free, size, spare

    def grow(self, session: int, slots: int) -> int:
        """As many of `slots` more slots as there is room for."""
        taken = min(max(0, -(-(slots - self._spare[session]) // self._size)), self._free)
        room = self._spare[session] + taken * self._size
        granted = min(slots, room)
        self._free -= taken
        self._spare[session] = room - granted
        return granted


def room_for_more(free: int, owed: Sequence[int], block_size: int) -> int:
    """Blocks that one more session may begin with, so that the next few passes need not pause anybody.

    owed: for each running session, the slots beyond its blocks that the tokens which it has will take.
    """
    return free - 1 - sum(1 + -(-max(0, slots) // block_size) for slots in owed)
