"""Fixtures that several test files share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from table_models import write_table_model
from torch import Tensor

# A shell without job control starts what it runs in the background with SIGINT ignored, and that is handed down; but
# tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run.
settings.register_profile("seeded", derandomize=True)
settings.load_profile("seeded")

TableModel = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, fetched and converted once per machine.  For slow tests."""
    from paceline.cluster.models import resolve

    return resolve("smollm2-135m").directory


@pytest.fixture
def table_model(tmp_path: Path) -> TableModel:
    """Writes table models: table_model(table, eos=0, context=512) is a new checkpoint directory."""
    written = iter(range(1_000))

    def write(table: Tensor, **options: int) -> Path:
        return write_table_model(tmp_path / f"table{next(written)}", table, **options)

    return write
