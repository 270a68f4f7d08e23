"""The native library: skinny products, attention and what lies between them, for CPUs.  Its sources are in `csrc/`.

It is built along with the package where there is a C compiler, and called through ctypes, which lets go of the
interpreter lock meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import mmap
import sys
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1}
HEAD_LIMIT = 1024
"""Most elements of one attention head."""

_LEVELS = 5
_PAGE = mmap.PAGESIZE


class Weight(Structure):
    """See paceline.h."""

    _fields_ = (
        ("words", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("group", c_int64),
    )


class Norm(Structure):
    """See paceline.h."""

    _fields_ = (("weight", c_void_p), ("epsilon", c_float))


class Layer(Structure):
    """See paceline.h."""

    _fields_ = (
        *(
            (name, Norm)
            for name in ("input_norm", "attention_norm", "mlp_norm", "output_norm", "query_norm", "key_norm")
        ),
        *((name, POINTER(Weight)) for name in ("qkv", "out", "gated", "down")),
        *((name, c_int64) for name in ("activation", "columns", "hidden", "inner", "heads", "key_heads")),
        *((name, c_int64) for name in ("dim", "value_dim", "rotated", "type")),
    )


class Fresh(Structure):
    """See paceline.h."""

    _fields_ = (
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
    )


class Attention(Structure):
    """See paceline.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("block_size", c_int64),
        ("window", c_int64),
        ("scaling", c_float),
        ("softcap", c_float),
        ("type", c_int64),
    )


class Pass(Structure):
    """See paceline.h."""

    _fields_ = (("sequences", c_int64), ("data", c_void_p))


class _Table(Structure):
    """See InstructionSet in paceline.h."""

    _fields_ = (
        ("panel", c_int64),
        ("linear", CFUNCTYPE(None, POINTER(Weight), c_void_p, c_int64, c_void_p, c_void_p)),
        ("norm", CFUNCTYPE(None, POINTER(Norm), c_void_p, c_int64, c_int64, c_int64, c_void_p)),
        (
            "before",
            CFUNCTYPE(c_int64, POINTER(Layer), c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        ),
        (
            "after",
            CFUNCTYPE(c_int64, POINTER(Layer), c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        ),
        (
            "attention",
            CFUNCTYPE(c_int64, POINTER(Attention), POINTER(Pass), POINTER(Fresh), c_void_p, c_void_p, c_int64),
        ),
        ("uniforms", CFUNCTYPE(None, c_uint64, c_void_p, c_int64, c_int64, c_void_p)),
        (
            "contenders",
            CFUNCTYPE(c_int64, c_uint64, c_int64, c_void_p, c_int64, c_float, c_void_p, c_void_p),
        ),
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions for one instruction set; see paceline.h for arguments.  panel: rows of a weight side by side."""

    panel: int
    linear: Callable[..., None]
    norm: Callable[..., None]
    before: Callable[..., int]
    after: Callable[..., int]
    attention: Callable[..., int]
    uniforms: Callable[..., None]
    contenders: Callable[..., int]


class Workspace:
    """Buffers that live from call to call, by name.  What is taken under a name holds until it is taken again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous tensor of this shape, on the CPU.  The same object as long as the shape is the same."""
        view = self._views.get(name)
        if view is None or view.shape != shape or view.dtype != dtype:
            size = math.prod(shape)
            buffer = self._buffers.get(name)
            if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
                buffer = self._buffers[name] = torch.empty(size, dtype=dtype)
            view = self._views[name] = buffer[:size].view(shape)
        return view

    def floats(self, name: str, size: int) -> int:
        """The address of at least `size` floats."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size)
        return buffer.data_ptr()

    def run(self, name: str, function: Callable[..., int], *arguments: Any) -> None:
        """Call a function whose last arguments are scratch and its size in floats.

        If that is too little, it does nothing, and returns how much it needs.
        """
        scratch = self._buffers.get(name)
        if scratch is None:
            scratch = torch.empty(0)
        while needed := function(*arguments, scratch.data_ptr(), scratch.numel()):
            scratch = self._buffers[name] = torch.empty(needed)


@functools.cache
def _library() -> ctypes.CDLL | None:
    folder = Path(__file__).parent
    found = [path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_native{suffix}").is_file()]
    # Tensors are packed as little-endian words.
    if not found or sys.byteorder != "little":
        return None
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        log.warning("the native library does not load: %s", error)
        return None
    library.paceline_kernels.argtypes, library.paceline_kernels.restype = [c_int], POINTER(_Table)
    library.paceline_advise.argtypes, library.paceline_advise.restype = [c_void_p, c_size_t], None
    return library


@functools.cache
def levels() -> tuple[Kernels, ...]:
    """The kernels for each instruction set that this processor has, the best one last; none without the library."""
    library = _library()
    tables = [library.paceline_kernels(level) for level in range(_LEVELS)] if library is not None else []
    # A structure makes a new function at each look.
    return tuple(Kernels(*(getattr(table.contents, name) for name, _ in _Table._fields_)) for table in tables if table)


def kernels() -> Kernels | None:
    """The best kernels that this processor can run, or None where the library was not built."""
    return levels()[-1] if levels() else None


def advise(storage: Tensor) -> None:
    """Ask the system for large pages behind a tensor that has not been written yet."""
    library = _library()
    if library is not None:
        pages = -(-storage.data_ptr() // _PAGE) * _PAGE
        library.paceline_advise(pages, max(0, storage.data_ptr() + storage.nbytes - pages) // _PAGE * _PAGE)
