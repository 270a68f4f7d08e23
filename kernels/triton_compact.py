"""The Triton twin of kv_compact.py: one launch for all planes of a pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 512


# A launch would be compiled anew for one move, and for a multiple of 16.
@triton.jit(do_not_specialize=["moves"])
def _move(pool, source, target, aside, moves, rows, size, ELEMENTS: tl.constexpr):
    """Move a stretch of ELEMENTS of each row of one plane.  aside: [planes, moves, size], to hold what is moved."""
    plane = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = element < size
    pool += plane * rows * size
    aside += plane * moves * size
    for i in range(moves):
        value = tl.load(pool + tl.load(source + i) * size + element, mask=real)
        tl.store(aside + i * size + element, value, mask=real)
    # Every row has been read before the first is overwritten; no other program touches this stretch.
    tl.debug_barrier()
    for i in range(moves):
        value = tl.load(aside + i * size + element, mask=real)
        tl.store(pool + tl.load(target + i) * size + element, value, mask=real)


def kv_compact(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """See kv_compact.kv_compact.  The pool must be contiguous."""
    planes, rows, heads, dim = pool.shape
    moves, size = len(source), heads * dim
    if moves == 0:
        return
    aside = torch.empty((planes, moves, size), dtype=pool.dtype, device=pool.device)
    _move[(planes, triton.cdiv(size, _ELEMENTS))](pool, source, target, aside, moves, rows, size, ELEMENTS=_ELEMENTS)
