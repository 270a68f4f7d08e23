"""The Triton twin of noise.py: the same integers, and the logarithms of float64 as there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 1024


@triton.jit
def noise_of(seed, position, block, BLOCKS: tl.constexpr):
    """float32 [4 * BLOCKS]: the noise of the tokens from 4 * block on.

    seed: int64, its bits are the key.  position: int64.  BLOCKS: how many blocks of four tokens.
    """
    counter = (block + tl.arange(0, BLOCKS)).to(tl.uint32)
    at = position.to(tl.uint32)
    zero = tl.zeros_like(counter)
    # Triton's own Philox 4x32-10 has the same constants and the same order of words as ours.
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + at, zero, zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = (words.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _gumbel(noise, facts, vocab_size, BLOCKS: tl.constexpr):
    """facts: int64, the seed, then the position of each row; in memory, as launches compile anew for some numbers."""
    row = tl.program_id(0)
    token = tl.program_id(1) * 4 * BLOCKS + tl.arange(0, 4 * BLOCKS)
    values = noise_of(tl.load(facts), tl.load(facts + 1 + row), tl.program_id(1) * BLOCKS, BLOCKS)
    tl.store(noise + row.to(tl.int64) * vocab_size + token, values, mask=token < vocab_size)


def signed(seed: int) -> int:
    """The int64 of the same 64 bits, since a tensor takes nothing else."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def gumbel(seed: int, positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """See noise.gumbel."""
    facts = torch.tensor([signed(seed), *positions], dtype=torch.int64, device=device)
    noise = torch.empty((len(positions), vocab_size), device=device)
    grid = (len(positions), triton.cdiv(vocab_size, _TOKENS))
    _gumbel[grid](noise, facts, vocab_size, BLOCKS=_TOKENS // 4)
    return noise
