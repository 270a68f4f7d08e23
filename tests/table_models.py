"""Checkpoints whose next-token logits are a table: any Markov chain as a target, any behaviour as a drafter.

They are ordinary one-layer Llama checkpoints.  The embeddings are one-hot and every projection is zero, so what comes
out depends on the last token alone, and its row of the table is what the head makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

EOS = 0
# Even, because rotary embeddings turn pairs; apart from that the heads do nothing here.
_HEAD = 2
_INNER = 2


def write_table_model(directory: Path, table: Tensor, *, eos: int = EOS, context: int = 512) -> Path:
    """Write a checkpoint with logits(next | last) = table[last], and return its directory.

    table: [V, V].  context: positions.  There is no tokenizer: such a model speaks token ids.
    """
    vocab = table.shape[0]
    if table.shape != (vocab, vocab):
        raise ValueError(f"the table must be square, got {tuple(table.shape)}")
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_weights(table.float()), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(vocab, eos, context)))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return directory


def chain_table(chain: Sequence[int], vocab: int, margin: float = 20.0) -> Tensor:
    """Each token of `chain` is followed by the next one, `margin` nats ahead of all others."""
    table = torch.zeros(vocab, vocab)
    table[list(chain[:-1]), list(chain[1:])] = margin
    return table


def random_table(vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    """Normal logits with standard deviation `spread`."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def constant_table(row: Sequence[float], vocab: int) -> Tensor:
    """The same logits after every token: `row`, padded with zeros."""
    return torch.tensor([*row, *[0.0] * (vocab - len(row))]).repeat(vocab, 1)


def always(token: int, vocab: int, margin: float = 20.0) -> Tensor:
    """`token` follows every token; with EOS, the drafter that wants to stop at once."""
    table = torch.zeros(vocab, vocab)
    table[:, token] = margin
    return table


def contrary(table: Tensor) -> Tensor:
    """What likes best what `table` likes least: a drafter that is always wrong."""
    return -table


def blurred(table: Tensor, seed: int, spread: float = 1.0) -> Tensor:
    """`table` with noise on it: a drafter that is right some of the time."""
    return table + random_table(table.shape[0], seed, spread)


def broken(vocab: int) -> Tensor:
    """NaN everywhere."""
    return torch.full((vocab, vocab), float("nan"))


def _weights(table: Tensor) -> dict[str, Tensor]:
    vocab = table.shape[0]
    projections = {
        "self_attn.q_proj": (_HEAD, vocab),
        "self_attn.k_proj": (_HEAD, vocab),
        "self_attn.v_proj": (_HEAD, vocab),
        "self_attn.o_proj": (vocab, _HEAD),
        "mlp.gate_proj": (_INNER, vocab),
        "mlp.up_proj": (_INNER, vocab),
        "mlp.down_proj": (vocab, _INNER),
    }
    weights = {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in projections.items()}
    for name in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        weights[f"{name}.weight"] = torch.ones(vocab)
    weights["model.embed_tokens.weight"] = torch.eye(vocab)
    # The last norm scales a one-hot row to sqrt(V), which the head takes back.
    weights["lm_head.weight"] = (table / vocab**0.5).t().contiguous()
    return weights


def _config(vocab: int, eos: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": vocab,
        "intermediate_size": _INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        # Small against the mean square of a one-hot row, 1 / V.
        "rms_norm_eps": 1e-12,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "dtype": "float32",
    }
