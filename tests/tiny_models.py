"""Tiny random models of the architectures that the engine must compute exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 61
WINDOW = 6

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Larger than the default, so that attention decides the logits and a wrong mask shows.
    "initializer_range": 0.35,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SMALL, tie_word_embeddings=False),
    "llama_tied": lambda: LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SMALL),
    "qwen3": lambda: Qwen3Config(**_SMALL),
    "gemma2": lambda: Gemma2Config(
        **_SMALL,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        query_pre_attn_scalar=8,
        # Tight caps, so that leaving one out shows.
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(**_SMALL, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=8),
    "mistral": lambda: MistralConfig(**_SMALL, sliding_window=WINDOW),
}


def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of one of CONFIGS, in eval mode.  changes: config fields to set before it is built."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms start at constants, which would hide a mistake in them.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval().requires_grad_(False)
