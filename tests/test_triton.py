"""The Triton kernels: what they compute, here under Triton's interpreter, and that they compile for GPUs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def run_twins(interpret: bool, timeout: float) -> None:
    """Run triton_twins.py in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", f"timeout={timeout}"]
    done = subprocess.run(
        [*command, "tests/triton_twins.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 20


@pytest.mark.timeout(260)
def test_the_kernels_equal_their_references_under_the_interpreter():
    run_twins(interpret=True, timeout=240)


@pytest.mark.gpu
@pytest.mark.timeout(640)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_equal_their_references_on_a_gpu():
    run_twins(interpret=False, timeout=600)


INTS = {"moves", "rows", "size", "vocab_size", "parts", "stride", "words", "block_size"}
FLOATS = {"scores", "best", "values", "noise"}
ATTENTION = {"SOFTCAP": 0.0, "WINDOW": 0, "REPEAT": 4, "ROWS": 16, "POSITIONS": 64}
COMPILED: list[tuple[str, str, dict[str, Any], str]] = [
    ("triton_noise", "_gumbel", {"BLOCKS": 256}, "fp32"),
    ("triton_verify", "_draw", {"LOWEST": -3.2, "HIGHEST": 23.0, "BLOCKS": 512}, "fp32"),
    ("triton_verify", "_walk", {"PARTS": 32, "NODES": 16}, "fp32"),
    ("triton_compact", "_move", {"ELEMENTS": 512}, "bf16"),
    ("triton_attention", "_attend", {**ATTENTION, **dict.fromkeys(("DIM", "VALUE_DIM"), 128)}, "bf16"),
    ("triton_attention", "_attend", {**ATTENTION, **dict.fromkeys(("DIM", "VALUE_DIM"), 64)}, "fp32"),
]


def parameter_type(name: str, constants: dict[str, Any], data: str) -> str:
    """Triton's name for the type of one of our kernels' parameters."""
    if name in constants:
        return "constexpr"
    if name == "scaling":
        return "fp32"
    if name in INTS or name.endswith("_stride"):
        return "i32"
    if name in ("query", "keys", "output", "pool", "aside", "values") and data == "bf16":
        return "*bf16"
    return "*fp32" if name in FLOATS or (data == "fp32" and name in ("query", "keys", "output")) else "*i64"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module, name, constants, data in COMPILED:
        function = getattr(importlib.import_module(f"paceline.kernels.{module}"), name)
        if "DIM" in constants:
            constants = {**constants, "KEY_BLOCK": constants["DIM"], "VALUE_BLOCK": constants["VALUE_DIM"]}
        signature = {argument: parameter_type(argument, constants, data) for argument in function.arg_names}
        places = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
        source = ASTSource(fn=function, signature=signature, constexprs=places)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert len(compiled.asm["cubin"]) > 1000
        # What every GPU of that kind grants to one block of threads.
        assert compiled.metadata.shared < 99 * 1024, name
