"""Moving cached rows within a key/value pool when a draft tree is re-rooted."""

from __future__ import annotations

from paceline.kernels.dispatch import kernel
from torch import Tensor


@kernel("triton_compact")
def kv_compact(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy rows source[i] to target[i] in every plane of a pool, in place and as if all at once.

    pool: [planes, rows, heads, dim], a plane for each layer's keys and each layer's values.
    source, target: int64 [n], on the pool's device, contiguous.  They may overlap each other; targets are distinct.
    """
    # index_select makes a copy, so a row may be read here and overwritten below.
    pool.index_copy_(1, target, pool.index_select(1, source))
