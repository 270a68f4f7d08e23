"""The one place that chooses between a device function's PyTorch reference and its Triton twin."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """A device function.  Called, it runs its Triton twin where its data lies on a CUDA device, else the reference.

    reference: the plain PyTorch function.  It runs on any device.
    """

    def __init__(self, reference: Callable[P, R], module: str) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._module = module

    @functools.cached_property
    def twin(self) -> Callable[P, R]:
        """The Triton function of the same signature.  Importing it needs Triton, so only who runs it does."""
        twin: Callable[P, R] = getattr(importlib.import_module(self._module), self.reference.__name__)
        return twin

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        device = next(filter(None, map(_device, (*args, *kwargs.values()))), None)
        chosen = self.twin if device is not None and self.has_twin_on(device) else self.reference
        return chosen(*args, **kwargs)

    def has_twin_on(self, device: torch.device) -> bool:
        """Whether calls with data on this device run the twin."""
        # PyTorch's builds for CUDA bring Triton along on Linux, and on no other system.
        return device.type == "cuda" and _has_triton()


def kernel(module: str) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a reference a Kernel, whose twin is the function of the same name in `paceline.kernels.<module>`.

    Its device is that of its first argument which has one: a tensor, tensors, or the device itself.
    """
    return lambda reference: Kernel(reference, f"paceline.kernels.{module}")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _device(value: Any) -> torch.device | None:
    if isinstance(value, Sequence) and value:
        value = value[0]
    if isinstance(value, Tensor):
        return value.device
    return value if isinstance(value, torch.device) else None
