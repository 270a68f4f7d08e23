"""Paceline's attention inside Hugging Face models, and which models it can run.

The models call attention through transformers' AttentionInterface and hand it any keyword argument that their forward
was given.  So the pass's context travels as an argument, and engines that share a process share no state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

# No mask function goes with this name, and then transformers builds no mask: the context has its own.
ATTENTION = "paceline"
PROBE = "paceline_probe"

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_ADVICE = "A decoder with full or sliding-window softmax attention works, such as Llama, Qwen, Mistral or Gemma."


class UnsupportedModel(ValueError):
    """The engine would compute something else than this model; the message says why and what would work."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. {_ADVICE}")


class Context(Protocol):
    """What attention needs to know of the pass that it is part of."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """query, key, value: [1, heads, N, dim].  Returns [1, N, heads, value dim], contiguous."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    paceline: Context | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if paceline is None:
        raise UnsupportedModel(f"{type(module).__name__} does not get the arguments that its model was called with")
    # The native library attends in float32, and what follows need not take that.
    return paceline.attend(module, query, key, value, attention_mask, options).to(query.dtype), None


def _describe_mask(*, mask_function: Callable[..., Tensor], config: Any, device: torch.device, **_: Any) -> Tensor:
    """Instead of a mask, the window that its rule describes: [1, 1, 1, 1], 0 for no window, -1 for another rule."""
    reach = config.get_text_config(decoder=True).max_position_embeddings
    windows = {_window_at(mask_function, position, device) for position in (reach, reach + 1)}
    # A rule by distance reaches equally far back from every position; chunks do not.
    described = windows.pop() if len(windows) == 1 else -1
    return torch.full((1, 1, 1, 1), described, device=device)


def _window_at(mask_function: Callable[..., Tensor], position: int, device: torch.device) -> int:
    zero = torch.zeros((), dtype=torch.int64, device=device)
    others = torch.arange(position + 2, device=device)
    visible = mask_function(zero, zero, zero + position, others)
    window = int(visible.sum())
    if not torch.equal(visible, (others <= position) & (others > position - window)):
        return -1
    return 0 if window == position + 1 else window


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _describe_mask)


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer as the model itself uses it.  window: None for full attention."""

    key_shape: tuple[int, int]  # (key heads, dim)
    value_shape: tuple[int, int]
    window: int | None


@dataclass(slots=True)
class _Probe:
    """A context that attends to nothing and notes what each layer asks for."""

    layers: dict[int, Layer] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if index is None or index in self.layers:
            raise UnsupportedModel(f"{type(module).__name__} does not attend exactly once per numbered layer")
        if mask is None or mask.numel() != 1 or int(mask) < 0:
            raise UnsupportedModel(f"layer {index} uses an attention mask that is neither causal nor a sliding window")
        for option, what in (("s_aux", "attention sinks"), ("position_bias", "a position bias on its scores")):
            if options.get(option) is not None:
                raise UnsupportedModel(f"layer {index} uses {what}")
        window = int(mask) or None
        self.layers[index] = Layer(_row_shape(key), _row_shape(value), window)
        repeat = query.shape[1] // value.shape[1]
        return value.repeat_interleave(repeat, dim=1).transpose(1, 2).contiguous()


def _row_shape(states: Tensor) -> tuple[int, int]:
    return states.shape[1], states.shape[3]


def probe_layers(model: Any) -> list[Layer]:
    """Run one token through a model to see what its attention layers need; leaves our attention in place.

    Raises UnsupportedModel when a layer asks for something the engine does not do.
    """
    probe = _Probe()
    model.set_attn_implementation(PROBE)
    try:
        with torch.inference_mode():
            token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
            model(input_ids=token, position_ids=token, use_cache=False, paceline=probe)
    finally:
        model.set_attn_implementation(ATTENTION)
    if sorted(probe.layers) != list(range(model.config.get_text_config(decoder=True).num_hidden_layers)):
        found = f"only layers {sorted(probe.layers)}" if probe.layers else "no layer"
        raise UnsupportedModel(f"{found} of {type(model).__name__} can have its attention replaced")
    return [probe.layers[index] for index in range(len(probe.layers))]


def refuse_unsupported(config: Any) -> None:
    """Raise UnsupportedModel for a transformers config whose model the engine cannot run exactly.

    Needs no weights.  What a config does not tell is found by `probe_layers`.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder, and only a decoder has a prefix to extend")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"transformers has no causal language model for {name}")
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(f"{name} keeps a running state, which cannot be rewound after a rejected draft")
    _refuse_layers(config.get_text_config(decoder=True), name)
    if not model_class._supports_attention_backend or not model_class._can_set_attn_implementation():
        raise UnsupportedModel(f"{name} does not let its attention be replaced")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModel(f"{name} cannot compute logits for chosen positions only")


def _refuse_layers(config: Any, name: str) -> None:
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        listed = ", ".join(sorted(others))
        raise UnsupportedModel(f"{name} has layers of type {listed}, which the engine does not have")
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise UnsupportedModel(f"{name} is set to look at later tokens")
    ropes = _rope_types(getattr(config, "rope_parameters", None) or {}) & _LENGTH_DEPENDENT_ROPE
    if ropes:
        raise UnsupportedModel(f"{name} has {ropes.pop()} RoPE, whose cached keys would change as the sequence grows")
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise UnsupportedModel(f"{name} does not say how long its context is (max_position_embeddings)")


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    # One set of parameters, or one per layer type.
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    return {str(part.get("rope_type", "default")) for part in [parameters, *nested]}
