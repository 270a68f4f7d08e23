"""What the layers of a loaded Hugging Face model consist of, and what they compute: so that others can replace them.

Nothing is believed of a layer because of its name.  One traced pass notes what every module gets and gives; a
replacement is put in only if it gives the same.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from paceline.actors.attention import ATTENTION
from torch import Tensor, nn
from torch.func import functional_call

log = logging.getLogger(__name__)

_TRACED_TOKENS = 5
# Largest |difference| / |what the module gave| that rounding explains.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.int8: 1e-1}
# Of what a layer adds, and of what it gives: in float32.
_ADDED_TOLERANCE, _ROUNDING = 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Call:
    """How a module was called, and what it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def agrees(self, replacement: Callable[..., Any], dtype: torch.dtype) -> bool:
        """Whether a replacement whose weights have this type gives the same, but for rounding."""
        with torch.inference_mode():
            output = replacement(*self.args, **self.kwargs)
        return _close(output, self.output, _TOLERANCE[dtype])

    def adds_the_same(self, layer: nn.Module, anatomy: Anatomy) -> bool:
        """Whether this layer, which was called so, adds to every row of its argument what its anatomy says.

        Both compute in float32: what a layer adds may be less than rounding, and far less than what it is added to.
        """
        (x,), kwargs = _widened(self.args), _widened(self.kwargs)
        with torch.inference_mode():
            states = _widened(dict(itertools.chain(layer.named_parameters(), layer.named_buffers())))
            theirs = functional_call(layer, states, (x,), kwargs)
            if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
                return False
            ours = anatomy.compute(x, kwargs["position_embeddings"])
            errors, added, large = ((a - b).norm(dim=-1) for a, b in ((ours, theirs), (theirs, x), (theirs, 0)))
            return bool((errors <= _ADDED_TOLERANCE * added + _ROUNDING * large).all())


def _widened(value: Any) -> Any:
    """The same with all floating-point tensors in float32."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, dict):
        return {key: _widened(item) for key, item in value.items()}
    return tuple(map(_widened, value)) if isinstance(value, tuple) else value


def _close(ours: Any, theirs: Any, tolerance: float) -> bool:
    if not isinstance(theirs, Tensor) or ours.shape != theirs.shape:
        return False
    return bool((ours.float() - theirs.float()).norm() <= tolerance * theirs.float().norm())


@dataclass(slots=True)
class Causal:
    """A context that attends as a plain decoder over the tokens of one pass, and notes each layer's options."""

    options: dict[int, dict[str, Any]] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """See attention.Context."""
        layer: Any = module.layer_idx
        self.options[layer] = options
        return _attend(query, key, value, options)


def _attend(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    attended = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options.get("scaling"), enable_gqa=grouped
    )
    return attended.transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class Trace:
    """One pass of a model.  calls: by module, but for what was called twice.  options: of each layer's attention."""

    calls: dict[nn.Module, Call]
    options: dict[int, dict[str, Any]]


def trace(model: Any) -> Trace:
    """Run a few tokens through a model, which has our attention."""
    calls: dict[nn.Module, Call] = {}
    repeated: set[nn.Module] = set()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module in calls:
            repeated.add(module)
        calls[module] = Call(args, kwargs, output)

    context = Causal()
    count = min(_TRACED_TOKENS, model.config.get_text_config(decoder=True).max_position_embeddings)
    with _hooked(model, note), torch.inference_mode():
        tokens = torch.randint(model.get_input_embeddings().num_embeddings, (1, count), generator=_generator())
        positions = torch.arange(count)[None]
        model.set_attn_implementation(ATTENTION)
        model(
            input_ids=tokens.to(model.device),
            position_ids=positions.to(model.device),
            use_cache=False,
            paceline=context,
        )
    for module in repeated:
        del calls[module]
    return Trace(calls, context.options)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@contextmanager
def _hooked(model: nn.Module, note: Callable[..., None]) -> Iterator[None]:
    # A module that has hooks of somebody else's does more than its forward says.
    plain = [m for m in model.modules() if not (m._forward_hooks or m._forward_pre_hooks)]
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in plain]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm: x * weight / sqrt(mean(x**2) + epsilon).  weight: float32."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


def read_norm(module: nn.Module) -> Norm | None:
    """What a module computes if that is such a norm, else None."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    # Some scale by the weight, others by one more than that.
    candidates = [Norm(weight.detach().float() + offset, epsilon) for offset in (0.0, 1.0)]
    return next((norm for norm in candidates if _norms_alike(norm, module, weight)), None)


def _norms_alike(norm: Norm, module: nn.Module, weight: Tensor) -> bool:
    direction = torch.randn(3, len(weight), generator=_generator())
    # Small enough in one case for epsilon to matter.
    with torch.inference_mode():
        inputs = [(direction * size).to(weight) for size in (1.0, norm.epsilon**0.5)]
        return all(_close(norm(x), module(x), _TOLERANCE.get(weight.dtype, 0.0)) for x in inputs)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a decoder layer:

    x += attention_norm(out(attention(heads(qkv(input_norm(x))))));  x += output_norm(down(act(gate(y)) * up(y)))
    with y = mlp_norm(x).  The two norms on the way back into x may be missing, and so may the heads' own.
    activation: "silu" or "gelu_tanh".  options: what its attention is called with.
    """

    input_norm: Norm
    attention_norm: Norm | None
    mlp_norm: Norm
    output_norm: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    out: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    activation: str
    index: int
    dim: int
    value_dim: int
    options: dict[str, Any]

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        """All of them, in the order of their fields."""
        return (
            self.input_norm,
            self.attention_norm,
            self.mlp_norm,
            self.output_norm,
            self.query_norm,
            self.key_norm,
        )

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads, and heads of keys and of values."""
        return self.qkv[0].out_features // self.dim, self.qkv[1].out_features // self.dim

    def compute(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """What the layer gives for x, float32 [1, N, hidden], where it attends as Causal does.

        angles: cosines and sines, each float32 [1, N, rotated].
        """
        y, sizes = self.input_norm(x), (self.dim, self.dim, self.value_dim)
        heads = [_multiply(p, y).view(1, len(x[0]), -1, size) for p, size in zip(self.qkv, sizes, strict=True)]
        query, key = _turn(_apply(self.query_norm, heads[0]), angles), _turn(_apply(self.key_norm, heads[1]), angles)
        attended = _attend(query.transpose(1, 2), key.transpose(1, 2), heads[2].transpose(1, 2), self.options)
        x = x + _apply(self.attention_norm, _multiply(self.out, attended.flatten(2)))
        y = self.mlp_norm(x)
        gated = _ACTIVATIONS[self.activation](_multiply(self.gate, y)) * _multiply(self.up, y)
        return x + _apply(self.output_norm, _multiply(self.down, gated))


def _multiply(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.float(), None if layer.bias is None else layer.bias.float())


def _apply(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _turn(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """[1, N, heads, dim], the first elements of which are rotated."""
    cos, sin = (one[:, :, None] for one in angles)
    turned, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


class _Strange(Exception):
    """The layer is built otherwise."""


def dissect(layer: nn.Module, traced: Trace) -> Anatomy | None:
    """The anatomy of a decoder layer, or None if it has other parts.  Whether it fits them together so is not known."""
    try:
        return _dissect(layer, traced)
    except _Strange as why:
        log.debug("%s stays as it is: %s", type(layer).__name__, why)
        return None


def _dissect(layer: nn.Module, traced: Trace) -> Anatomy:
    call = traced.calls.get(layer)
    if call is None or len(call.args) != 1 or not isinstance(call.kwargs.get("position_embeddings"), tuple):
        raise _Strange("it is not called once, with its input and a rotation")
    attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
    index, dim = getattr(attention, "layer_idx", None), getattr(attention, "head_dim", None)
    if not isinstance(index, int) or not isinstance(dim, int) or index not in traced.options:
        raise _Strange("its attention does not say which layer it is, or how large its heads are")
    qkv = (
        _linear(attention, "q_proj", traced),
        _linear(attention, "k_proj", traced),
        _linear(attention, "v_proj", traced),
    )
    if any(part.out_features % dim for part in qkv) or qkv[0].out_features % qkv[1].out_features:
        raise _Strange("its queries and keys are no heads")
    # Where a norm stands before the MLP by that name, the one that is called after the attention is just that.
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    after = _norm(layer, "post_attention_layernorm")
    return Anatomy(
        input_norm=_norm(layer, "input_layernorm"),
        attention_norm=after if sandwich else None,
        mlp_norm=_norm(layer, "pre_feedforward_layernorm") if sandwich else after,
        output_norm=_norm(layer, "post_feedforward_layernorm") if sandwich else None,
        query_norm=_norm(attention, "q_norm") if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention, "k_norm") if hasattr(attention, "k_norm") else None,
        qkv=qkv,
        out=_linear(attention, "o_proj", traced),
        gate=_linear(mlp, "gate_proj", traced),
        up=_linear(mlp, "up_proj", traced),
        down=_linear(mlp, "down_proj", traced),
        activation=_activation(getattr(mlp, "act_fn", None)),
        index=index,
        dim=dim,
        value_dim=qkv[2].out_features // (qkv[1].out_features // dim),
        options=traced.options[index],
    )


def _part(module: nn.Module, name: str) -> nn.Module:
    part = getattr(module, name, None)
    if not isinstance(part, nn.Module):
        raise _Strange(f"it has no {name}")
    return part


def _linear(module: nn.Module, name: str, traced: Trace) -> nn.Linear:
    part = _part(module, name)
    if not is_plain_linear(part) or part not in traced.calls:
        raise _Strange(f"{name} is no plain linear layer")
    assert isinstance(part, nn.Linear)
    return part


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing more, in a type that can be packed."""
    # A subclass may compute anything, and so may what has hooks or a parametrisation.
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and not hooks and module.weight.dtype in (torch.float32, torch.bfloat16)


def _norm(module: nn.Module, name: str) -> Norm:
    norm = read_norm(_part(module, name))
    if norm is None:
        raise _Strange(f"{name} is no root-mean-square norm")
    return norm


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _activation(function: Any) -> str:
    x = torch.linspace(-6, 6, 97)
    if callable(function):
        for name, known in _ACTIVATIONS.items():
            if _close(function(x), known(x), 1e-5):
                return name
    raise _Strange("its MLP has another activation")


def decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with an attention of its own, and its name."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "self_attn", None), nn.Module):
            yield name, module


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module where another is, with what its parent may want to know of it."""
    parent, _, child = name.rpartition(".")
    old = model.get_submodule(name)
    for attribute in ("attention_type", "layer_type", "layer_idx"):
        if hasattr(old, attribute) and not hasattr(module, attribute):
            setattr(module, attribute, getattr(old, attribute))
    setattr(model.get_submodule(parent), child, module)
