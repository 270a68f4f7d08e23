"""The device functions by themselves, as a CPU computes them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from paceline.actors.values import Sampling
from paceline.kernels import native, noise
from paceline.kernels.kv_compact import kv_compact
from paceline.kernels.noise import HIGHEST, LOWEST, contenders, gumbel
from paceline.kernels.verify_tree import draw, process
from torch import Tensor

VOCAB = 5003


@pytest.mark.parametrize(
    ("source", "target"),
    [([4, 5], [0, 1]), ([1, 2, 3], [0, 1, 2]), ([0, 1, 2], [1, 2, 3]), ([0, 5], [5, 0]), ([2, 2], [0, 4]), ([], [])],
)
def test_rows_move_as_if_all_at_once_in_every_plane(source: list[int], target: list[int]):
    pool = torch.randn(4, 6, 2, 3, generator=torch.Generator().manual_seed(0))
    expected = pool.clone()
    for old, new in zip(source, target, strict=True):
        expected[:, new] = pool[:, old]
    kv_compact(pool, torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    assert torch.equal(pool, expected)


@pytest.fixture(params=[-1, *range(len(native.levels()))])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """PyTorch (-1), or the native library for each instruction set that is here."""
    level: int = request.param
    chosen = None if level < 0 else native.levels()[level]
    monkeypatch.setattr(noise, "kernels", lambda: chosen)
    return level


def in_torch(monkeypatch: pytest.MonkeyPatch, seed: int, positions: tuple[int, ...], vocab: int) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(noise, "kernels", lambda: None)
        return gumbel(seed, positions, vocab)


@pytest.mark.parametrize("vocab", [1, 3, 4, 127, 128, 129, VOCAB])
def test_all_ways_to_make_noise_make_the_same(implementation: int, monkeypatch: pytest.MonkeyPatch, vocab: int):
    for seed in (0, 2**63 + 77, 2**64 - 1):
        assert torch.equal(gumbel(seed, (3, 2**32 - 1), vocab), in_torch(monkeypatch, seed, (3, 2**32 - 1), vocab))


def test_noise_stays_within_its_bounds():
    words = torch.tensor([0.0, 2.0**32 - 1], dtype=torch.float64)
    lowest, highest = noise._from_uniforms((words + 0.5) * 2.0**-32).tolist()
    assert LOWEST < lowest < -3.12
    assert 22.87 < highest < HIGHEST


def every_token_nearly_wins(numbers: Tensor) -> Tensor:
    return 7.0 - numbers


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": torch.zeros_like,
    "random": lambda g: torch.randn(g.shape, generator=torch.Generator().manual_seed(1)) * 4,
    "wide": lambda g: torch.randn(g.shape, generator=torch.Generator().manual_seed(2)) * 30,
    "every token nearly wins": every_token_nearly_wins,
    "of large numbers, which swallow noise": lambda g: 3e8 + every_token_nearly_wins(g),
    "of huge numbers, which swallow all noise": lambda g: torch.full_like(g, -2e30),
    "one possible token": lambda g: torch.full_like(g, -torch.inf).index_fill_(0, torch.tensor(4321), 2.0),
    "cut": lambda g: torch.where(torch.arange(len(g)) % 97 == 5, 1.0, -torch.inf),
    "the last token far ahead": lambda g: torch.arange(len(g)) * 0.05,
}


@pytest.mark.parametrize("kind", ROWS)
def test_noise_is_left_out_only_where_it_cannot_win(implementation: int, monkeypatch: pytest.MonkeyPatch, kind: str):
    fewest = VOCAB
    for position in range(40):
        numbers = in_torch(monkeypatch, 2**63 + 1, (position,), VOCAB)[0]
        scores = ROWS[kind](numbers)
        total = scores + numbers
        tokens, some = contenders(scores, float(scores.max()), 2**63 + 1, position)
        assert torch.equal(some, numbers[tokens])
        assert (tokens.diff() > 0).all()
        assert int(tokens[(scores[tokens] + some).argmax()]) == int(total.argmax())
        fewest = min(fewest, len(tokens))
    # All tokens can win in some rows; in the ones that a model writes, most cannot.
    assert fewest < VOCAB / 4 or not kind.startswith(("wide", "cut", "one"))


def plainly_cut(scores: Tensor, top_p: float) -> list[int]:
    """The tokens that top-p keeps, by its definition: one after another, the likeliest first."""
    probabilities = scores.softmax(-1).tolist()
    kept, mass = [], 0.0
    for token in sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token)):
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += probabilities[token]
    return sorted(kept)


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_top_p_keeps_what_its_definition_keeps(top_p: float, spread: float):
    make = torch.Generator().manual_seed(int(spread * 10))
    for _ in range(5):
        # Rounded, so that many are equal.
        logits = (torch.randn(700, generator=make) * spread * 8).round() / 8
        found = process(logits, Sampling(1.0, top_p=top_p))
        kept = found.isfinite().nonzero()[:, 0]
        assert kept.tolist() == plainly_cut(logits, top_p)
        assert torch.equal(found[kept], logits[kept])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_row_without_a_finite_maximum_has_no_token(bad: float, cut: dict[str, float]):
    row = torch.full((9,), bad)
    row[:4] = bad if bad < 0 else 1.0
    for temperature in (0.0, 0.8):
        assert draw(row, Sampling(temperature, **cut), 3) is None  # type: ignore[arg-type]


def test_the_device_chooses_between_reference_and_twin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("paceline.kernels.dispatch._has_triton", lambda: True)
    monkeypatch.setattr(gumbel, "twin", lambda *arguments, **options: "twin")
    assert gumbel(1, (2,), 8, torch.device("cuda")) == "twin"
    assert gumbel(1, (2,), 8, device=torch.device("cuda", 1)) == "twin"
    assert gumbel(1, (2,), 8).shape == (1, 8)
    assert gumbel(1, (2,), 8, torch.device("cpu")).shape == (1, 8)
    monkeypatch.setattr("paceline.kernels.dispatch._has_triton", lambda: False)
    monkeypatch.setattr(gumbel, "reference", lambda *arguments: "reference")
    assert gumbel(1, (2,), 8, torch.device("cuda")) == "reference"


def test_who_has_no_gpu_imports_no_triton_kernel():
    code = """
import sys, torch
from paceline.actors.rule import draw
from paceline.actors.values import Sampling
draw(torch.zeros(9), Sampling(0.8), 1)
assert not [name for name in sys.modules if name.startswith("paceline.kernels.triton")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
