"""Choosing devices, and keeping a process on its core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from paceline.actors import device
from paceline.actors.device import Device, torch_dtype


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch, 2)
    assert Device.resolve("auto", 1) == Device("cuda", 1)
    assert Device.resolve("cpu", 1) == Device("cpu", 1)
    pretend_gpus(monkeypatch, 0)
    assert Device.resolve("auto", 1) == Device("cpu", 1)


@pytest.mark.parametrize(
    ("gpus", "name", "index", "message"),
    [
        (0, "tpu", 0, 'must be "auto", "cpu" or "cuda", got "tpu"'),
        (0, "cuda", 0, 'no CUDA device; use "cpu" or "auto"'),
        (2, "cuda", 2, "CUDA device 2 was asked for, but only 2 are visible"),
        (2, "auto", 5, "CUDA device 5"),
        (2, "cuda", -1, "index must not be negative, got -1"),
        (0, "cpu", -1, "index must not be negative, got -1"),
    ],
)
def test_a_device_that_cannot_be_had_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, gpus: int, name: str, index: int, message: str
):
    pretend_gpus(monkeypatch, gpus)
    with pytest.raises(ValueError, match=message):
        Device.resolve(name, index)


def test_what_torch_is_told():
    assert (Device("cpu", 3).torch, Device("cpu", 3).process_group_backend) == (torch.device("cpu"), "gloo")
    assert (Device("cuda", 3).torch, Device("cuda", 3).process_group_backend) == (torch.device("cuda", 3), "nccl")
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got float16"):
        torch_dtype("float16")


PIN = """
import os, threading
import torch
from pathlib import Path
from paceline.actors.device import Device, pin_process

torch.set_num_threads(2)
allowed = sorted(os.sched_getaffinity(0))
leave = threading.Event()
thread = threading.Thread(target=leave.wait)
thread.start()
Device("cpu", {index}).claim()
tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
cores = [os.sched_getaffinity(task) for task in tasks]
assert len(tasks) > 1
assert all(core == {{allowed[{index} % len(allowed)]}} for core in cores), (allowed, cores)
assert torch.get_num_threads() == 1
assert pin_process(7) == allowed[{index} % len(allowed)], "only one core is allowed by now"
leave.set()
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process")
@pytest.mark.parametrize("index", [1, 1000])
def test_claiming_a_core_moves_every_thread_there(index: int):
    done = subprocess.run(
        [sys.executable, "-c", PIN.format(index=index)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "dtype"), [({"avx2"}, "float32"), ({"avx2", "avx512_bf16"}, "bfloat16"), ({"asimd", "bf16"}, "bfloat16")]
)
def test_the_best_dtype_is_one_that_the_cpu_computes_in(
    flags: set[str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_cpu_flags", lambda: flags)
    assert device.Device("cpu").best_dtype == dtype
    assert device.Device("cuda").best_dtype == "bfloat16"
