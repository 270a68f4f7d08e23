"""Counter-based Gumbel noise: the same (seed, position, token) gives the same number on any device, in any batch.

Philox 4x32-10, from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).  The key is the request's
64-bit seed; the counter is (token // 4, position, 0, 0), and one call yields the words of four neighbouring tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from paceline.kernels.dispatch import kernel
from paceline.kernels.native import kernels
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CPU = torch.device("cpu")

LOWEST, HIGHEST = -3.2, 23.0
"""No noise lies outside these: a word of 32 bits gives -log(-log(u)) between -3.13 and 22.88."""


def _mulhilo(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # int64 wraps on overflow, but its low 64 bits are those of the true product, and the mask undoes the sign.
    product = a * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 of four int64 tensors that broadcast and hold 32-bit words; returns four such tensors.

    seed: unsigned 64 bits, the key.
    """
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        hi0, lo0 = _mulhilo(c0, _MULTIPLIERS[0])
        hi1, lo1 = _mulhilo(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ key0, lo1, hi0 ^ c3 ^ key1, lo0
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


@kernel("triton_noise")
def gumbel(seed: int, positions: Sequence[int], vocab_size: int, device: torch.device = _CPU) -> Tensor:
    """Standard Gumbel noise, float32 [len(positions), vocab_size].

    Row i depends on (seed, positions[i]) only, so every pass that visits an output position draws the same token there.
    A position is the index of the token in the whole sequence, prompt included, below 2**32.
    """
    native = kernels() if device.type == "cpu" else None
    if native is not None:
        uniforms = torch.empty((len(positions), vocab_size), dtype=torch.float64)
        at = torch.tensor(positions, dtype=torch.int64)
        native.uniforms(seed, at.data_ptr(), len(positions), vocab_size, uniforms.data_ptr())
        return _from_uniforms(uniforms)
    blocks = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=device)
    at = torch.tensor(positions, dtype=torch.int64, device=device)[:, None]
    return _from_uniforms(_uniforms(seed, at, blocks).flatten(1)[:, :vocab_size])


def contenders(scores: Tensor, best: float, seed: int, position: int) -> tuple[Tensor, Tensor]:
    """(tokens int64 [n], noise float32 [n]): the tokens that may have the highest score plus noise, ascending.

    scores: float32 [V].  best: their finite maximum.  All others are proven to stay below what the best score's token
    reaches at least, so their noise, which costs more than everything else about a draw, is not made.
    """
    # Float addition never reverses an order, so these bounds hold for the rounded sums as well.
    floor = best + LOWEST
    native = kernels() if scores.device.type == "cpu" else None
    if native is None:
        return _contending_blocks(scores, floor, seed, position)
    scores, size = scores.contiguous(), scores.numel()
    tokens, uniforms = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.float64)
    count = native.contenders(seed, position, scores.data_ptr(), size, floor, tokens.data_ptr(), uniforms.data_ptr())
    return tokens[:count], _from_uniforms(uniforms[:count])


def _contending_blocks(scores: Tensor, floor: float, seed: int, position: int) -> tuple[Tensor, Tensor]:
    """All tokens of every block of four that has one whose score could still be lifted to `floor`."""
    possible = scores + HIGHEST >= floor
    blocks = F.pad(possible, (0, -len(possible) % 4)).view(-1, 4).any(-1).nonzero()[:, 0]
    at = torch.tensor(position, dtype=torch.int64, device=scores.device)
    noise = _from_uniforms(_uniforms(seed, at, blocks).flatten())
    tokens = (blocks[:, None] * 4 + torch.arange(4, device=scores.device)).flatten()
    real = tokens < scores.numel()
    return tokens[real], noise[real]


def _uniforms(seed: int, positions: Tensor, blocks: Tensor) -> Tensor:
    """Numbers in (0, 1), float64 [..., 4], of the four tokens of each of these blocks."""
    zero = torch.zeros((), dtype=torch.int64, device=blocks.device)
    words = torch.stack(philox((blocks, positions, zero, zero), seed), dim=-1)
    # The midpoint keeps them off 0 and 1; float64 keeps the upper tail, which float32 would cut at about 17.
    return (words.double() + 0.5) * 2.0**-32


def _from_uniforms(uniforms: Tensor) -> Tensor:
    return -torch.log(-torch.log(uniforms)).float()
