"""Linear layers over few rows, bound by the weights' way from memory: packed weights and their product.

A row's result does not depend on how many rows are computed along with it: every sum has one float32 accumulator, and
runs in the order of the columns.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from paceline.kernels.native import Kernels, Weight, Workspace, advise
from torch import Tensor

# Columns that share a 32-bit word.
_GROUPS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Plain:
    """What a linear layer computes: y = (x W^T) * scale + bias.

    weight: [rows, columns], float32, bfloat16 or int8.  scale: float32 [rows], with int8 only.  bias: float32 [rows].
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


def quantise(plain: Plain) -> Plain:
    """The same layer in int8, each row scaled by its largest magnitude."""
    weight = plain.weight.float()
    scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return Plain((weight / scale[:, None]).round().to(torch.int8), plain.bias, scale)


def join(plains: Sequence[Plain]) -> Plain:
    """One layer whose output is that of these, side by side.  They have the same type, and none has a scale."""
    biases = [p.bias if p.bias is not None else torch.zeros(len(p.weight)) for p in plains]
    bias = torch.cat(biases) if any(p.bias is not None for p in plains) else None
    return Plain(torch.cat([p.weight for p in plains]), bias)


@dataclass(frozen=True, slots=True)
class Packed:
    """A layer in the kernels' order: see Weight in csrc/paceline.h.  words: int32 [panels, steps, panel]."""

    kernels: Kernels
    words: Tensor
    scale: Tensor | None
    bias: Tensor | None
    rows: int
    columns: int
    dtype: torch.dtype
    struct: Weight

    def table(self, ids: Tensor) -> Tensor:
        """Rows `ids` of the weight: [*ids.shape, columns].  int64 ids."""
        panel = self.kernels.panel
        words = self.words[ids.div(panel, rounding_mode="floor"), :, ids % panel]
        return words.view(self.dtype)[..., : self.columns]


def pack(kernels: Kernels, plains: Sequence[Plain]) -> list[Packed]:
    """Pack layers of one type into one storage, in the order of their use.  ValueError for other types."""
    sizes = [_words(kernels, plain) for plain in plains]
    aligned = [-(-math.prod(size) // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    storage = torch.empty(sum(aligned) + _ALIGNMENT, dtype=torch.int32)
    advise(storage)
    at = -storage.data_ptr() % _ALIGNMENT // storage.element_size()
    packed = []
    for plain, size, length in zip(plains, sizes, aligned, strict=True):
        packed.append(_pack_into(kernels, plain, storage[at : at + math.prod(size)].view(size)))
        at += length
    return packed


def _words(kernels: Kernels, plain: Plain) -> tuple[int, int, int]:
    if plain.weight.dtype not in _GROUPS:
        raise ValueError(f"weights must be float32, bfloat16 or int8, got {plain.weight.dtype}")
    rows, columns = plain.weight.shape
    return -(-rows // kernels.panel), -(-columns // _GROUPS[plain.weight.dtype]), kernels.panel


def _pack_into(kernels: Kernels, plain: Plain, words: Tensor) -> Packed:
    (rows, columns), dtype = plain.weight.shape, plain.weight.dtype
    group = _GROUPS[dtype]
    panels, steps, panel = words.shape
    padded = F.pad(plain.weight, (0, steps * group - columns, 0, panels * panel - rows))
    words.view(dtype).view(panels, steps, panel, group).copy_(padded.view(panels, panel, steps, group).transpose(1, 2))
    bias, scale = (t.float().contiguous() if t is not None else None for t in (plain.bias, plain.scale))
    struct = Weight(words.data_ptr(), _address(scale), _address(bias), rows, columns, group)
    return Packed(kernels, words, scale, bias, rows, columns, dtype, struct)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Product:
    """A packed layer, ready to be called with addresses: nothing is allocated, nothing checked."""

    __slots__ = ("_linear", "_struct", "_workspace", "packed")

    def __init__(self, packed: Packed, workspace: Workspace) -> None:
        self.packed = packed
        self._workspace = workspace
        self._linear, self._struct = packed.kernels.linear, ctypes.byref(packed.struct)

    def __call__(self, x: int, count: int, y: int) -> None:
        """x: `count` rows of float32 [columns].  y: as many of float32 [rows]."""
        self._linear(self._struct, x, count, y, self._workspace.floats("rows", count * (self.packed.columns + 64)))


def linear(x: Tensor, packed: Packed) -> Tensor:
    """The layer's output, float32 [..., rows], for x [..., columns]; as F.linear computes it in float32."""
    flat = x.reshape(-1, packed.columns).float().contiguous()
    out = torch.empty(len(flat), packed.rows)
    if len(flat):
        Product(packed, Workspace())(flat.data_ptr(), len(flat), out.data_ptr())
    return out.view(*x.shape[:-1], packed.rows)
