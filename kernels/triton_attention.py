"""The Triton twin of tree_attention.py: one launch for all sequences, the scores never leave the chip.

Online softmax as in FlashAttention-2 (Dao, 2023), over the paged pool: first the committed positions, then the pending
slots with their ancestor bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from paceline.kernels.tree_attention import TreeBatch
from torch import Tensor

_ROWS = {2: 64, 4: 32}
"""Most rows of a tile by bytes per element, a row being one head of one token, unless a single token has more."""

_TURN_BYTES = 16384
"""Keys, and values, that are looked at in one turn."""


@triton.jit
def _look(
    query, top, total, mixed, keys, values, row, real, visible, key_stride, value_stride, scaling,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr
):  # fmt: skip
    """One turn of the online softmax: look at the pool's rows `row`, as far as they are real and visible."""
    d, e = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    key = tl.load(keys + row[:, None] * key_stride + d, mask=real[:, None] & (d < DIM), other=0.0)
    value = tl.load(values + row[:, None] * value_stride + e, mask=real[:, None] & (e < VALUE_DIM), other=0.0)
    # Whole float32 products: the default would round the factors to 10 bits.
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        score = SOFTCAP - 2 * SOFTCAP / (tl.exp(score * (2 / SOFTCAP)) + 1)
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1))
    # A row that has seen nothing yet must not subtract infinities.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(score - base[:, None])
    fade = tl.exp(top - base)
    total = total * fade + tl.sum(weight, axis=1)
    mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return higher, total, mixed


@triton.jit(do_not_specialize=["words"])
def _attend(
    query, keys, values, output, facts, bits, lists,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    words, block_size, scaling,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, POSITIONS: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr
):  # fmt: skip
    """One key head and a tile of one sequence's tokens, all heads that share it: ROWS rows, POSITIONS keys a turn.

    WINDOW, SOFTCAP: 0 for none.
    """
    TOKENS: tl.constexpr = ROWS // REPEAT
    key_head = tl.program_id(2)
    facts += tl.program_id(0) * 6
    first, new, committed = tl.load(facts), tl.load(facts + 1), tl.load(facts + 2)
    pending = tl.load(facts + 3)
    blocks = lists + tl.load(facts + 4)
    depths = lists + tl.load(facts + 5)
    if tl.program_id(1) * TOKENS >= new:
        return
    r, n, d, e = tl.arange(0, ROWS), tl.arange(0, POSITIONS), tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    token = tl.program_id(1) * TOKENS + r // REPEAT
    head = key_head * REPEAT + r % REPEAT
    live = (r < TOKENS * REPEAT) & (token < new)
    position = committed + tl.load(depths + pending - new + token, mask=live, other=0)
    flat = first + token
    at = query + flat[:, None] * query_stride + head[:, None] * query_head_stride + d
    q = tl.load(at, mask=live[:, None] & (d < DIM), other=0.0)
    keys += key_head * key_head_stride
    values += key_head * value_head_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)

    begin = committed * 0
    if WINDOW > 0:
        # What has left every row's window is not even read.
        begin = tl.maximum(tl.min(tl.where(live, position, committed + pending), axis=0) - WINDOW + 1, 0)
    for start in range(begin, committed, POSITIONS):
        where = start + n
        real = where < committed
        visible = real[None, :] & live[:, None]
        if WINDOW > 0:
            visible = visible & (position[:, None] - where[None, :] < WINDOW)
        row = tl.load(blocks + where // block_size, mask=real, other=0) * block_size + where % block_size
        top, total, mixed = _look(
            q, top, total, mixed, keys, values, row, real, visible, key_stride, value_stride, scaling,
            SOFTCAP, DIM, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK,
        )  # fmt: skip
    for start in range(0, pending, POSITIONS):
        slot = start + n
        where = committed + slot
        real = slot < pending
        word = tl.load(
            bits + flat[:, None] * words + (slot // 64)[None, :], mask=live[:, None] & real[None, :], other=0
        )
        visible = ((word >> (slot % 64)[None, :]) & 1) != 0
        if WINDOW > 0:
            depth = tl.load(depths + slot, mask=real, other=0)
            visible = visible & (position[:, None] - (committed + depth)[None, :] < WINDOW)
        row = tl.load(blocks + where // block_size, mask=real, other=0) * block_size + where % block_size
        top, total, mixed = _look(
            q, top, total, mixed, keys, values, row, real, visible, key_stride, value_stride, scaling,
            SOFTCAP, DIM, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK,
        )  # fmt: skip

    # Every token sees itself, so a live row's total is positive.
    mixed = mixed / tl.where(live, total, 1.0)[:, None]
    heads = tl.num_programs(2) * REPEAT
    to = output + (flat[:, None] * heads + head[:, None]) * VALUE_DIM + e
    tl.store(to, mixed.to(output.dtype.element_ty), mask=live[:, None] & (e < VALUE_DIM))


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
    """See tree_attention.tree_attention.  The last dimension of all three tensors must be dense."""
    heads, key_heads = query.shape[1], key_pool.shape[1]
    dim, value_dim = key_pool.shape[2], value_pool.shape[2]
    repeat = heads // key_heads
    longest, size = batch.longest, query.element_size()
    rows = max(16, triton.next_power_of_2(max(repeat, min(_ROWS[size], repeat * longest))))
    key_block, value_block = (max(16, triton.next_power_of_2(width)) for width in (dim, value_dim))
    output = torch.empty((len(query), heads, value_dim), dtype=query.dtype, device=query.device)
    facts, bits, lists = batch.tables
    grid = (len(facts), triton.cdiv(longest, rows // repeat), key_heads)
    _attend[grid](
        query, key_pool, value_pool, output, facts, bits, lists,
        query.stride(0), query.stride(1), key_pool.stride(0), key_pool.stride(1),
        value_pool.stride(0), value_pool.stride(1), bits.shape[1], batch.block_size, scaling,
        SOFTCAP=softcap or 0.0, WINDOW=window or 0, REPEAT=repeat, DIM=dim, VALUE_DIM=value_dim,
        ROWS=rows, POSITIONS=min(64, max(16, _TURN_BYTES // (size * max(key_block, value_block)))),
        KEY_BLOCK=key_block, VALUE_BLOCK=value_block,
    )  # fmt: skip
    return output
