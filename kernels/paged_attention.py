"""Tree attention of a CPU's native library: the twin of `tree_attention`, which also writes the new keys and values.

A token's output is the same to the last bit whether its ancestors are committed or pending, and whatever else is in the
pass: so a path that is verified in one pass has the logits that one token after another would have had.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from paceline.kernels.native import HEAD_LIMIT, TYPES, Attention, Fresh, Kernels, Pass, Workspace
from paceline.kernels.tree_attention import TreeSequence
from torch import Tensor

_WORD = 64
_LOW = (1 << _WORD) - 1


def describe(sequences: Sequence[TreeSequence]) -> array[int]:
    """The sequences of a pass as int64; see Pass in csrc/paceline.h."""
    data = array("Q")
    for s in sequences:
        data.extend((s.new, s.committed, len(s.depths), len(s.blocks)))
        data.extend(s.blocks)
        data.extend(s.depths)
        words = range(0, len(s.depths), _WORD)
        data.extend(bits >> shift & _LOW for bits in s.ancestors for shift in words)
    return data


def refuse_shape(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why heads like these, [1, heads, N, dim], cannot be attended here; None if they can."""
    if query.dtype not in TYPES or len({query.dtype, key.dtype, value.dtype}) > 1:
        return f"its heads are in {query.dtype}"
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1] or query.shape[3] != key.shape[3]:
        return "its heads do not fit together"
    if max(query.shape[3], value.shape[3]) > HEAD_LIMIT:
        return f"its heads have more than {HEAD_LIMIT} elements"
    return None


def _dense(heads: Tensor) -> Tensor:
    """The same with the heads of each token side by side."""
    if heads.stride(1) == heads.shape[3] and heads.stride(3) == 1:
        return heads
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


class PagedAttention:
    """The attention of one layer over its pools.

    keys, values: [rows, key heads, dim], contiguous; the value's dim may differ.  heads: of the query.
    scaling, softcap, window: see tree_attention.
    """

    def __init__(
        self,
        kernels: Kernels,
        workspace: Workspace,
        keys: Tensor,
        values: Tensor,
        heads: int,
        block_size: int,
        *,
        scaling: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> None:
        self._attention, self._workspace, self._pools = kernels.attention, workspace, (keys, values)
        self._heads, self._value_dim = heads, values.shape[2]
        self._struct = Attention(
            keys.data_ptr(),
            values.data_ptr(),
            heads,
            *keys.shape[1:],
            values.shape[2],
            block_size,
            window or 0,
            scaling,
            softcap or 0.0,
            TYPES[keys.dtype],
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sequences: int, described: array[int]) -> Tensor:
        """Write `key` and `value`, then attend.

        query, key, value: [1, heads, N, dim] in the pools' type.
        described: what `describe` made of that many sequences, the new ones of which are these rows.
        Returns float32 [1, N, heads, value dim]; it holds until the workspace is next attended with.
        """
        query, key, value = _dense(query), _dense(key), _dense(value)
        out = self._workspace.take("attended", (1, query.shape[2], self._heads, self._value_dim))
        fresh = Fresh(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), query.stride(2), key.stride(2), value.stride(2)
        )
        description = Pass(sequences, described.buffer_info()[0])
        arguments = [ctypes.byref(part) for part in (self._struct, description, fresh)]
        self._workspace.run("attention", self._attention, *arguments, out.data_ptr())
        return out
