"""Counter-based Gumbel noise: the same (seed, position, token) gives the same number on any device, in any batch.

Philox 4x32-10, from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).  The key is the request's
64-bit seed; the counter is (token // 4, position, 0, 0), and one call yields the words of four neighbouring tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


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


def gumbel(seed: int, positions: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise, float32 [len(positions), vocab_size].

    Row i depends on (seed, positions[i]) only, so every pass that visits an output position draws the same token there.
    A position is the index of the token in the whole sequence, prompt included, below 2**32.
    """
    block = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=device)[None, :]
    position = torch.tensor(positions, dtype=torch.int64, device=device)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    shape = (len(positions), block.shape[1])
    words = torch.stack([word.expand(shape) for word in philox((block, position, zero, zero), seed)], dim=-1)
    # The midpoint keeps u off 0 and 1; float64 keeps the upper tail, which float32 would cut at about 17.
    u = (words.reshape(len(positions), -1)[:, :vocab_size].double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(u)).float()
