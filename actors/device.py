"""The one place that knows about devices: which one, in which dtype, over which backend, on which core."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# As Linux names them: on x86, and on Arm.
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class Device:
    """Where one actor computes.  index: the GPU's number among the visible ones, or the core's among the allowed."""

    kind: Literal["cpu", "cuda"]
    index: int = 0

    @classmethod
    def resolve(cls, name: str, index: int = 0) -> Device:
        """The device that "cpu", "cuda" or "auto" (CUDA where there is one) stands for.

        Raises ValueError for another name, a negative index, a GPU where there is none, and a GPU that does not exist.
        """
        if name not in ("auto", "cpu", "cuda"):
            raise ValueError(f'device must be "auto", "cpu" or "cuda", got "{name}"')
        if index < 0:
            raise ValueError(f"index must not be negative, got {index}")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if name == "cpu" or (name == "auto" and not gpus):
            return cls("cpu", index)
        if not gpus:
            raise ValueError('device is "cuda", but this machine shows no CUDA device; use "cpu" or "auto"')
        if index >= gpus:
            raise ValueError(f"CUDA device {index} was asked for, but only {gpus} are visible")
        return cls("cuda", index)

    @property
    def torch(self) -> torch.device:
        """The same as a torch.device."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.index)

    @property
    def process_group_backend(self) -> str:
        """The torch.distributed backend that moves tensors between two of these without copies through the host."""
        return "gloo" if self.kind == "cpu" else "nccl"

    @property
    def best_dtype(self) -> str:
        """bfloat16 where the device computes in it; a CPU that only emulates it is faster in float32."""
        return "bfloat16" if self.kind == "cuda" or _cpu_flags() & _BFLOAT16_FLAGS else "float32"

    def dtype(self, name: str) -> str:
        """The name of a dtype, or the best one for "auto"."""
        return self.best_dtype if name == "auto" else name

    @property
    def link_frames(self) -> Literal["host", "device"]:
        """Where the frames of a link lie: in the device's memory if it has its own."""
        return "host" if self.kind == "cpu" else "device"

    @property
    def pass_tokens(self) -> int:
        """How many tokens one pass may take: about as many as it takes to keep the device busy with its arithmetic."""
        return 2048 if self.kind == "cuda" else 128

    @property
    def prefill_chunk(self) -> int:
        """How many tokens of prompts a pass may take beside others that decode, and that wait for it."""
        return 512 if self.kind == "cuda" else 32

    def claim(self) -> None:
        """Settle this process on the device: on its core with one torch thread, or on its GPU."""
        if self.kind == "cpu":
            pin_process(self.index)
        else:
            torch.cuda.set_device(self.index)

    def synchronise(self) -> None:
        """Wait until everything that was begun on it is done."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called "float32" or "bfloat16".  Raises ValueError for any other name."""
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]


def pin_process(index: int) -> int:
    """Keep all threads of this process on its index-th allowed core, wrapping round, with one torch thread.

    Two processes whose OpenMP threads spin on shared cores are about ten times slower than one thread each.
    Returns the core.  Where the system cannot pin (it is not Linux), only the thread count is set and -1 is returned.
    """
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity"):
        return -1
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[index % len(allowed)]
    # Affinity belongs to a thread; those that already run would otherwise stay where they are.
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), {core})
        except ProcessLookupError:  # the thread ended meanwhile
            continue
    return core
