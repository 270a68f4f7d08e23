"""The engine on a GPU, with passes recorded as CUDA graphs and without."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from paceline.actors.engine import Feed
from paceline.actors.torch_engine import TorchEngine, load_engine
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def decode(engine: TorchEngine, steps: int) -> list[Tensor]:
    """Logits of greedy decoding with a chain of guesses at each step."""
    sequence, token, rows = engine.open(), 11, []
    for _ in range(steps):
        guesses = (token, *range(20, 27))
        (logits,) = engine.step([Feed(sequence, guesses, tuple(range(-1, 7)), tuple(range(8)))])
        rows.append(logits[0].cpu())
        token = int(rows[-1].argmax())
        engine.commit(sequence, [0])
        engine.truncate(sequence, engine.length(sequence))
    engine.close(sequence)
    return rows


@pytest.mark.slow
def test_recorded_passes_are_the_same(smollm2_dir: Path, caplog: pytest.LogCaptureFixture):
    device = torch.device("cuda")
    eager = decode(load_engine(smollm2_dir, device, torch.float32, 4096, graphs=False), 100)
    engine = load_engine(smollm2_dir, device, torch.float32, 4096)
    with caplog.at_level(logging.DEBUG):
        recorded = decode(engine, 100)
    engine.check()
    assert "recorded Shape(tokens=8" in caplog.text
    for one, other in zip(recorded, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
