"""A loaded Hugging Face model made fast on one core: its layers replaced by ones that the native library computes.

A pass over few tokens then costs little more than the weights' way from memory, and its rows come out the same to the
last bit however many tokens are in it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
from paceline.actors.anatomy import (
    Anatomy,
    Norm,
    decoder_layers,
    dissect,
    is_plain_linear,
    read_norm,
    replace,
    trace,
)
from paceline.actors.attention import Context, UnsupportedModel
from paceline.kernels import native
from paceline.kernels.linear import Packed, Plain, Product, join, pack, quantise
from paceline.kernels.native import HEAD_LIMIT, TYPES, Kernels, Layer, Workspace, kernels
from torch import Tensor, nn

log = logging.getLogger(__name__)

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def speed_up(model: Any, int8: bool = False) -> Kernels | None:
    """Replace a loaded model's layers by the fastest there are for its device, which is chosen here.

    Returns the native library's kernels where they compute it from now on, None where PyTorch does.
    """
    if model.device.type != "cpu":
        return None
    library = kernels()
    if library is None:
        log.warning("the native library was not built, so PyTorch computes %s, and slower", type(model).__name__)
    else:
        pack_model(model, library, int8)
    return library


def pack_model(model: Any, library: Kernels, int8: bool = False) -> None:
    """Replace in place whatever the native library computes as well as the model itself.  Its weights are not kept.

    model: on the CPU, in float32 or bfloat16, with our attention.  Its forward then needs the context of a pass.
    int8: hold the weights of linear layers in int8, which no longer computes the same.
    """
    packer = _Packer(model, library, int8)
    packer.pack_layers()
    packer.pack_rest()
    log.info("packed %d layers, %d linear layers and %d norms beside them", *packer.counts)


def products(model: Any) -> list[Product]:
    """The packed layers of a model, in the order of their use: all that a pass reads of its packed weights."""
    return [one for module in model.modules() if isinstance(module, Block | PackedLinear) for one in module.products]


class _Packer:
    def __init__(self, model: Any, kernels: Kernels, int8: bool) -> None:
        self._model, self._kernels, self._int8 = model, kernels, int8
        self._trace = trace(model)
        self._workspace = Workspace()
        self._splits: dict[tuple[int, ...], _Split] = {}
        self._blocks = self._linears = self._norms = 0

    @property
    def counts(self) -> tuple[int, int, int]:
        return self._blocks, self._linears, self._norms

    def pack_layers(self) -> None:
        for name, layer in list(decoder_layers(self._model)):
            anatomy = dissect(layer, self._trace)
            if anatomy is None or max(anatomy.dim, anatomy.value_dim) > HEAD_LIMIT:
                continue
            call = self._trace.calls[layer]
            if not call.adds_the_same(layer, anatomy):
                log.debug("%s computes otherwise than its parts suggest", name)
                continue
            block = Block(anatomy, self._pack(_plains(anatomy)), self._workspace, self._split(anatomy))
            if call.agrees(block, self._dtype):
                replace(self._model, name, block)
                self._blocks += 1
            else:
                log.debug("%s computes otherwise once it is packed", name)

    def pack_rest(self) -> None:
        """The linear layers and norms outside of packed layers, the head among them."""
        for name, module in list(self._model.named_modules()):
            call = self._trace.calls.get(module)
            if call is None:
                continue
            if is_plain_linear(module):
                self._pack_linear(name, module)
            elif (norm := read_norm(module)) is not None:
                replacement = PackedNorm(module.weight, norm, self._kernels)
                if call.agrees(replacement, self._model.dtype):
                    replace(self._model, name, replacement)
                    self._norms += 1

    def _pack_linear(self, name: str, module: Any) -> None:
        is_head = module is self._model.get_output_embeddings()
        (packed,) = self._pack([_plain(module)])
        replacement = PackedLinear(packed, self._workspace, torch.float32 if is_head else module.weight.dtype)
        if not self._trace.calls[module].agrees(replacement, self._dtype):
            return
        table = self._model.get_input_embeddings()
        if is_head and getattr(table, "weight", None) is module.weight:
            self._pack_table(packed)
        replace(self._model, name, replacement)
        self._linears += 1

    def _pack_table(self, packed: Packed) -> None:
        """Let a tied input table read the head's rows, so that they are not held twice."""
        table = self._model.get_input_embeddings()
        name = next(name for name, module in self._model.named_modules() if module is table)
        call = self._trace.calls.get(table)
        scale = getattr(table, "embed_scale", None)
        replacement = PackedTable(packed, table.num_embeddings, scale)
        # Exactly: its int8 rows would do for the head, but not for what everything is computed from.
        if call is not None and torch.equal(replacement(*call.args, **call.kwargs), call.output):
            replace(self._model, name, replacement)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int8 if self._int8 else self._model.dtype

    def _split(self, anatomy: Anatomy) -> _Split:
        shape = (*anatomy.heads, anatomy.dim, anatomy.value_dim)
        return self._splits.setdefault(shape, _Split(*shape))

    def _pack(self, plains: list[Plain]) -> list[Packed]:
        return pack(self._kernels, [quantise(plain) for plain in plains] if self._int8 else plains)


def _plain(module: Any) -> Plain:
    return Plain(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _plains(anatomy: Anatomy) -> list[Plain]:
    """The linear layers in the order in which they are computed."""
    qkv, gated = join([_plain(part) for part in anatomy.qkv]), join([_plain(anatomy.gate), _plain(anatomy.up)])
    return [qkv, _plain(anatomy.out), gated, _plain(anatomy.down)]


class PackedLinear(nn.Module):
    """A linear layer.  dtype: of its output, whatever that of its input."""

    def __init__(self, packed: Packed, workspace: Workspace, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.columns, packed.rows
        self.products, self._dtype = (Product(packed, workspace),), dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        flat = x.reshape(-1, self.in_features).float().contiguous()
        # Made outside of inference mode: the logits, which are large, can then be handed out as they are.
        with torch.inference_mode(False):
            out = torch.empty(*x.shape[:-1], self.out_features)
        if len(flat):
            self.products[0](flat.data_ptr(), len(flat), out.data_ptr())
        return out.to(self._dtype)


class PackedTable(nn.Module):
    """An input table that reads the rows of a packed head."""

    def __init__(self, packed: Packed, size: int, scale: Tensor | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = size, packed.columns
        self._packed, self._scale = packed, scale

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., embedding_dim]"""
        rows = self._packed.table(ids)
        return rows if self._scale is None else rows * self._scale.to(rows.dtype)


def _native(norm: Norm | None) -> native.Norm:
    """As the library takes it.  The address does not keep the weight."""
    return native.Norm(None, 0.0) if norm is None else native.Norm(norm.weight.data_ptr(), norm.epsilon)


class PackedNorm(nn.Module):
    """A root-mean-square norm.  The module's weight stays, by which others learn the model's type and device."""

    def __init__(self, weight: Tensor, norm: Norm, kernels: Kernels) -> None:
        super().__init__()
        # Not the loaded tensor itself, which would keep the whole file that it lies in mapped.
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
        self._norm, self._function = norm, kernels.norm
        self._struct = ctypes.byref(_native(norm))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        x = x.contiguous()
        out, size = torch.empty(x.shape), x.shape[-1]
        self._function(self._struct, x.data_ptr(), TYPES[x.dtype], x.numel() // size, size, out.data_ptr())
        return out.to(x.dtype)


class _Split:
    """Query, key and value of a pass, [1, heads, N, dim] each: views of the buffer [1, N, all heads] that holds them.

    All layers of a shape share one, so that a pass makes them once.
    """

    def __init__(self, heads: int, key_heads: int, dim: int, value_dim: int) -> None:
        self._shapes = ((heads, dim), (key_heads, dim), (key_heads, value_dim))
        self._buffer: Tensor | None = None
        self._views: tuple[Tensor, Tensor, Tensor]

    def __call__(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if buffer is not self._buffer:
            parts = torch.split(buffer, [heads * dim for heads, dim in self._shapes], dim=2)
            query, key, value = (p.view(1, -1, *s).transpose(1, 2) for p, s in zip(parts, self._shapes, strict=True))
            self._buffer, self._views = buffer, (query, key, value)
        return self._views


class Block(nn.Module):
    """A decoder layer of an Anatomy's kind.

    Between its input and its output everything is float32, in buffers that all the model's layers share: no layer's
    output outlives the next layer.
    """

    def __init__(self, anatomy: Anatomy, packed: Sequence[Packed], workspace: Workspace, split: _Split) -> None:
        super().__init__()
        self._kernels = packed[0].kernels
        self.layer_idx = anatomy.index
        self._workspace, self._split, self._options = workspace, split, anatomy.options
        # The structures alone would not keep what they point to.  An anatomy would keep the loaded weights.
        self.products, self._norms = tuple(Product(one, workspace) for one in packed), anatomy.norms
        self._width, hidden, inner = packed[0].rows, packed[0].columns, packed[3].columns
        self._sizes = (_ACTIVATIONS[anatomy.activation], max(p.columns for p in packed), hidden, inner)
        self._heads = (*anatomy.heads, anatomy.dim, anatomy.value_dim)
        self._layers: dict[tuple[int, int], Any] = {}

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        paceline: Context | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, N, hidden] -> [1, N, hidden]; position_embeddings: cosines and sines, each [1, N, rotated]."""
        if paceline is None or len(hidden_states) != 1:
            raise UnsupportedModel("a packed layer computes one pass at a time, and needs its context")
        x, (cos, sin) = hidden_states.contiguous(), position_embeddings
        if cos.dtype != x.dtype:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        layer, count = self._layer(TYPES[x.dtype], cos.shape[-1]), x.shape[1]
        heads = self._workspace.take("heads", (1, count, self._width), x.dtype)
        angles = (cos.data_ptr(), sin.data_ptr())
        self._workspace.run("layer", self._kernels.before, layer, x.data_ptr(), *angles, count, heads.data_ptr())
        query, key, value = self._split(heads)
        attended = paceline.attend(self, query, key, value, attention_mask, self._options)
        if attended.dtype != torch.float32:
            attended = attended.float()
        # The output may lie where the input did, which has had its last reader.
        out = self._workspace.take("stream", x.shape, x.dtype)
        rows = (x.data_ptr(), attended.data_ptr(), count, out.data_ptr())
        self._workspace.run("layer", self._kernels.after, layer, *rows)
        return out

    def _layer(self, type: int, rotated: int) -> Any:
        layer = self._layers.get((type, rotated))
        if layer is None:
            layer = self._layers[type, rotated] = ctypes.byref(self._structure(type, rotated))
        return layer

    def _structure(self, type: int, rotated: int) -> Layer:
        weights = (ctypes.pointer(one.packed.struct) for one in self.products)
        return Layer(*map(_native, self._norms), *weights, *self._sizes, *self._heads, rotated, type)
