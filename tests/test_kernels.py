"""The device functions by themselves."""

from __future__ import annotations

import pytest
import torch
from paceline.kernels.kv_compact import kv_compact


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
