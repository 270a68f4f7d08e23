"""Turns a GGUF file into an ordinary float32 checkpoint: `python -m paceline.cluster.dequantise FILE DIRECTORY`.

A process of its own, because it takes several times the file's size in memory and gives it all back, can be ended at
any point, and keeps the progress bars of the libraries off the user's terminal.  It needs no network.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from paceline.actors.attention import UnsupportedModel, refuse_unsupported
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def dequantise(file: Path, directory: Path) -> None:
    """Write config, safetensors, tokenizer and chat template of a GGUF file to `directory`.

    Raises UnsupportedModel before any weights are read, and whatever transformers raises for a damaged file.
    """
    source: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False, "local_files_only": True}
    config = AutoConfig.from_pretrained(file.parent, **source)
    refuse_unsupported(config)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(file.parent, config=config, dtype=torch.float32, **source)
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        raise ValueError("its weights stayed packed; uninstall the package `kernels` and try again")
    # The weights are plain by now, but save_pretrained goes by these marks, and refuses.
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = _end_ids(file) or model.generation_config.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _end_ids(file: Path) -> list[int]:
    """The ids that end an answer: chat models have more than transformers takes from a GGUF file."""
    fields = gguf.GGUFReader(str(file)).fields
    found = (fields.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    return sorted({int(field.contents()) for field in found if field is not None})


def main() -> None:
    """Exit with the reason, on one line, if the file cannot be converted."""
    # transformers parses the file anew for the config, the tokenizer and the weights, which would take half the time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    try:
        dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
    except UnsupportedModel as error:
        sys.exit(str(error))
    except Exception as error:  # Foreign bytes fail in any way.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
