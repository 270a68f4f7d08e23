"""Attention of draft-tree tokens over a paged key/value pool.

Every query sees the committed prefix of its own sequence, its ancestors among the pending slots, and itself.  That is
the tree attention of SpecInfer (Miao et al., ASPLOS 2024) and Medusa (Cai et al., 2024), over the paged cache of vLLM
(Kwon et al., SOSP 2023).  This is the plain PyTorch reference; a device kernel takes the same arguments.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from paceline.kernels.dispatch import kernel
from torch import Tensor

# Padding sequences to a common shape saves kernel launches and wastes arithmetic; this much waste is let through.
_PADDING_ALLOWED = 1.25


@dataclass(frozen=True, slots=True)
class TreeSequence:
    """One sequence of a pass, after the pass's own tokens have been given their slots.

    blocks: the pool's blocks that hold its cached positions, in order.
    committed: positions that every query sees.
    depths: depth of each pending slot, so its position is committed + depth; the pass's own tokens are the last ones.
    ancestors: one integer per new token; bit p says that it sees pending slot p.  Its own bit is set.
    """

    blocks: tuple[int, ...]
    committed: int
    depths: tuple[int, ...]
    ancestors: tuple[int, ...]

    @property
    def new(self) -> int:
        """Tokens that this pass adds."""
        return len(self.ancestors)

    @property
    def total(self) -> int:
        """Cached positions, the new ones included."""
        return self.committed + len(self.depths)

    @property
    def positions(self) -> tuple[int, ...]:
        """Position id of each new token."""
        return tuple(self.committed + depth for depth in self.depths[-self.new :])

    def slots(self, block_size: int, first: int, last: int) -> list[int]:
        """Rows of the pool that hold cached positions first to last - 1."""
        return [self.blocks[i // block_size] * block_size + i % block_size for i in range(first, last)]

    def is_contiguous(self) -> bool:
        """Whether its blocks lie side by side, so that the pool can be read as a view."""
        return all(right == left + 1 for left, right in zip(self.blocks, self.blocks[1:], strict=False))


def flatten(sequences: Sequence[TreeSequence], block_size: int) -> tuple[list[int], list[int]]:
    """The position and the pool row of each new token of a pass."""
    positions = [position for one in sequences for position in one.positions]
    slots = [slot for one in sequences for slot in one.slots(block_size, one.total - one.new, one.total)]
    return positions, slots


class Tables(NamedTuple):
    """What a device kernel knows of a batch, int64.

    facts: [S, 6], of each sequence its first query, new tokens, committed positions, pending slots, and where in
    `lists` its blocks and its slots' depths begin.  A sequence without new tokens is passed over.
    bits: [N, words], of each query the pending slots that it sees, 64 to a word, the lowest bit first.
    """

    facts: Tensor
    bits: Tensor
    lists: Tensor

    @staticmethod
    def cut(data: Tensor, sequences: int, queries: int, words: int) -> Tables:
        """The tables that lie one after another in `data`, which may be longer than they are."""
        facts, bits = 6 * sequences, queries * words
        return Tables(data[:facts].view(-1, 6), data[facts : facts + bits].view(-1, words), data[facts + bits :])


def words_for(sequences: Sequence[TreeSequence]) -> int:
    """Words of 64 bits that one query's pending slots take up."""
    return (max(len(one.depths) for one in sequences) + 63) // 64


def pack_tables(sequences: Sequence[TreeSequence], room: int, words: int) -> array[int]:
    """The tables of a batch, one after another.  room: sequences in `facts`, empty ones at its end."""
    facts, lists = array("q"), array("q")
    query = 0
    for one in sequences:
        depths = len(lists) + len(one.blocks)
        facts.extend((query, one.new, one.committed, len(one.depths), len(lists), depths))
        lists.extend(one.blocks)
        lists.extend(one.depths)
        query += one.new
    facts.frombytes(bytes(8 * 6 * (room - len(sequences))))
    for one in sequences:
        facts.frombytes(b"".join(bits.to_bytes(8 * words, "little") for bits in one.ancestors))
    return facts + lists


class TreeBatch:
    """What the queries of one pass look at.  Made once per pass; everything derived is shared by all its layers.

    Queries lie flat, in the order of `sequences`.  Sequences of similar shape should stand next to each other, since
    only neighbours are padded to one shape.
    """

    def __init__(self, sequences: Sequence[TreeSequence], block_size: int, device: torch.device) -> None:
        self.sequences = tuple(sequences)
        self.block_size = block_size
        self.device = device

    @cached_property
    def groups(self) -> tuple[_Group, ...]:
        """Runs of sequences that are attended in one call."""
        groups, start = [], 0
        for members in _similar_runs(self.sequences):
            groups.append(_Group(members, start, self.block_size, self.device))
            start += sum(member.new for member in members)
        return tuple(groups)

    @property
    def longest(self) -> int:
        """Most new tokens of one sequence."""
        return max(one.new for one in self.sequences)

    @cached_property
    def tables(self) -> Tables:
        """The batch as a device kernel reads it, sent to the device in one piece."""
        count, words = len(self.sequences), words_for(self.sequences)
        packed = torch.frombuffer(pack_tables(self.sequences, count, words), dtype=torch.int64)
        return Tables.cut(packed.to(self.device), count, sum(one.new for one in self.sequences), words)


class StaticBatch(TreeBatch):
    """A batch that a device kernel reads from where it is told to, as often as it is told to: for CUDA graphs.

    tables: the pass that lies in them at the time.  Those of `longest` new tokens at most may be put there.
    """

    def __init__(self, tables: Tables, longest: int, block_size: int) -> None:
        super().__init__((), block_size, tables.facts.device)
        self.tables = tables
        self._longest = longest

    @property
    def longest(self) -> int:
        return self._longest


@dataclass(frozen=True, slots=True)
class _Keys:
    """The cached rows that a group looks at under one window, and what each query may see of them.

    start: first pool row, when they are `count` rows in a line; else rows: int64 [B, S].
    mask: additive [B, 1, G * T, S], or None when every query sees every row.
    """

    start: int
    count: int
    rows: Tensor | None
    mask: Tensor | None


class _Group:
    """Sequences attended together: B of them, padded to T queries and S cached positions."""

    def __init__(self, members: Sequence[TreeSequence], start: int, block_size: int, device: torch.device) -> None:
        self.members = members
        self.start = start
        self.stop = start + sum(member.new for member in members)
        self.queries = max(member.new for member in members)
        self._block_size = block_size
        self._device = device
        self._keys: dict[tuple[int | None, int, torch.dtype], _Keys] = {}

    @cached_property
    def padding(self) -> tuple[Tensor, Tensor] | None:
        """(flat query of each padded place [B * T], padded place of each flat query); None when nothing is padded."""
        if all(member.new == self.queries for member in self.members):
            return None
        gather: list[int] = []
        scatter: list[int] = []
        flat = 0
        for i, member in enumerate(self.members):
            # A padded place repeats the sequence's own last query: its row is finite, and nobody reads it.
            gather += [flat + min(t, member.new - 1) for t in range(self.queries)]
            scatter += range(i * self.queries, i * self.queries + member.new)
            flat += member.new
        return self._tensor(gather), self._tensor(scatter)

    def keys(self, window: int | None, repeat: int, dtype: torch.dtype) -> _Keys:
        """Rows and mask for layers with this window, `repeat` query heads per key head, and this dtype."""
        key = (window, repeat, dtype)
        if key not in self._keys:
            self._keys[key] = self._make_keys(window, repeat, dtype)
        return self._keys[key]

    def _make_keys(self, window: int | None, repeat: int, dtype: torch.dtype) -> _Keys:
        # Rows that have left every query's window are not even read.  A slot's number is never below its depth, so no
        # pending slot within the window comes before the first such position.
        firsts = [max(0, min(m.positions) - window + 1) if window else 0 for m in self.members]
        count = max(m.total - first for m, first in zip(self.members, firsts, strict=True))
        mask = self._mask(firsts, count, window, repeat, dtype)
        if len(self.members) == 1 and self.members[0].is_contiguous():
            return _Keys(self.members[0].blocks[0] * self._block_size + firsts[0], count, None, mask)
        rows = []
        for member, first in zip(self.members, firsts, strict=True):
            slots = member.slots(self._block_size, first, member.total)
            # Padding points at a row of the same sequence, so that no neighbour's NaN can leak in through 0 * NaN.
            rows.append(slots + slots[-1:] * (count - len(slots)))
        return _Keys(0, count, self._tensor(rows), mask)

    def _sees_everything(self, firsts: Sequence[int], count: int) -> bool:
        """Whether each member is one token at the end of a chain, which has all of its `count` rows in its window."""
        for member, first in zip(self.members, firsts, strict=True):
            everything = (1 << len(member.depths)) - 1
            if member.total - first != count or any(bits != everything for bits in member.ancestors):
                return False
        return True

    def _mask(
        self, firsts: Sequence[int], count: int, window: int | None, repeat: int, dtype: torch.dtype
    ) -> Tensor | None:
        if self._sees_everything(firsts, count):
            return None
        visible = self._visible(self._tensor(firsts), count, window)
        mask = torch.zeros(visible.shape, dtype=dtype, device=self._device).masked_fill_(~visible, float("-inf"))
        batch, queries = visible.shape[:2]
        return mask[:, None].expand(batch, repeat, queries, count).reshape(batch, 1, repeat * queries, count)

    def _visible(self, firsts: Tensor, count: int, window: int | None) -> Tensor:
        """bool [B, T, S]: which of the cached positions firsts[b] + s each query may see."""
        committed = self._tensor([member.committed for member in self.members])[:, None]
        logical = firsts[:, None] + torch.arange(count, device=self._device)
        pending = logical - committed  # negative for committed positions
        bits, depths = self._pending
        slot = pending.clamp(0, depths.shape[1] - 1)
        seen = bits.gather(2, slot[:, None, :].expand(-1, self.queries, -1))
        # Beyond a sequence's own slots its bits are zero, so padding is never seen.
        visible = seen | (pending < 0)[:, None, :]
        if window is not None:
            key_positions = torch.where(pending < 0, logical, committed + depths.gather(1, slot))
            visible &= self._query_positions[:, :, None] - key_positions[:, None, :] < window
        return visible

    @cached_property
    def _query_positions(self) -> Tensor:
        """int64 [B, T]"""
        rows = [m.positions + m.positions[-1:] * (self.queries - m.new) for m in self.members]
        return self._tensor(rows)

    @cached_property
    def _pending(self) -> tuple[Tensor, Tensor]:
        """(bool [B, T, P + 1] which pending slots each query sees, int64 [B, P + 1] their depths).

        The spare last slot is nobody's: reads beyond a sequence's slots land there.
        """
        width = max(len(member.depths) for member in self.members) + 1
        size = (width + 7) // 8
        packed = bytearray()
        for member in self.members:
            rows = member.ancestors + member.ancestors[-1:] * (self.queries - member.new)
            packed += b"".join(bits.to_bytes(size, "little") for bits in rows)
        data = torch.frombuffer(packed, dtype=torch.uint8).to(self._device).view(len(self.members), self.queries, size)
        shifts = torch.arange(8, dtype=torch.uint8, device=self._device)
        bits = (data[..., None] >> shifts & 1).flatten(2)[..., :width].bool()
        depths = self._tensor([member.depths + (0,) * (width - len(member.depths)) for member in self.members])
        return bits, depths

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _similar_runs(sequences: Sequence[TreeSequence]) -> list[list[TreeSequence]]:
    """Cut a list of sequences into runs whose padded work stays near their real work."""
    runs: list[list[TreeSequence]] = []
    work = queries = keys = 0
    for sequence in sequences:
        work += sequence.new * sequence.total
        queries, keys = max(queries, sequence.new), max(keys, sequence.total)
        if runs and (len(runs[-1]) + 1) * queries * keys <= _PADDING_ALLOWED * work:
            runs[-1].append(sequence)
        else:
            runs.append([sequence])
            work, queries, keys = sequence.new * sequence.total, sequence.new, sequence.total
    return runs


@kernel("triton_attention")
def tree_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    batch: TreeBatch,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend the new tokens of a pass to what their sequences have cached, themselves included.

    query: [N, heads, dim], the new tokens of all sequences, flat.
    key_pool, value_pool: [rows, key heads, dim] (the value's dim may differ), the new tokens already written.
    scaling: factor on the scores.  softcap: scores become softcap * tanh(score / softcap), as in Gemma 2.
    window: a query sees only positions less than this far behind its own, by depth in the tree and not by slot.
    Returns [N, heads, value dim], contiguous.
    """
    outputs = [
        _attend(query[group.start : group.stop], key_pool, value_pool, group, scaling, softcap, window)
        for group in batch.groups
    ]
    return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    group: _Group,
    scaling: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    batch, queries = len(group.members), group.queries
    heads, key_heads = query.shape[1], key_pool.shape[1]
    repeat = heads // key_heads
    keys = group.keys(window, repeat, query.dtype)
    if group.padding is not None:
        query = query.index_select(0, group.padding[0])
    # The heads that share a key head are stacked as more queries: one larger product instead of copies of the keys.
    packed = query.reshape(batch, queries, key_heads, repeat, -1).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, key_heads, repeat * queries, -1)
    key, value = _read(key_pool, keys), _read(value_pool, keys)
    if softcap is None:
        output = F.scaled_dot_product_attention(packed, key, value, attn_mask=keys.mask, scale=scaling)
    else:
        output = _softcapped(packed, key, value, keys.mask, scaling, softcap)
    output = output.reshape(batch, heads, queries, -1).transpose(1, 2).flatten(0, 1)
    return output if group.padding is None else output.index_select(0, group.padding[1])


def _read(pool: Tensor, keys: _Keys) -> Tensor:
    """[B, key heads, S, dim]: a view where the rows lie in a line, else a copy."""
    if keys.rows is None:
        return pool[keys.start : keys.start + keys.count].transpose(0, 1)[None]
    rows = pool.index_select(0, keys.rows.flatten())
    return rows.view(*keys.rows.shape, *pool.shape[1:]).transpose(1, 2)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    # PyTorch's fused attention has no soft cap, so the scores are written out; in float32, as fused kernels have them,
    # and since a processor without bfloat16 arithmetic takes ten times as long over bfloat16 products.
    scores = torch.tanh(query.float() @ key.float().transpose(2, 3) * (scaling / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    return (torch.softmax(scores, dim=-1) @ value.float()).to(query.dtype)
