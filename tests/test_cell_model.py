"""A cell whose drafter is a model, and the death of its verifier."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paceline.actors.grammar import from_json_schema
from paceline.actors.values import Constraints
from paceline.cluster.backend import BackendError
from real_cell import answer, requests

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cell(smollm2_dir: Path) -> Iterator[Any]:
    """The target as its own drafter: nearly every guess is right."""
    from paceline.cluster.cell import Cell
    from paceline.cluster.config import CellConfig

    name = str(smollm2_dir)
    with Cell.start(CellConfig(target=name, drafters=(name,), dtype="float32", kv_tokens=1024)) as cell:
        yield cell


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_drafts_for_the_verifier(cell: Any, temperature: float) -> None:
    """At temperature 1 as well, since both draw with the same noise."""
    (plain, _), (drafted, finish) = (
        asyncio.run(answer(cell, requests(cell, schedule, 40, temperature)[2])) for schedule in ("plain", "sync")
    )
    assert drafted == plain
    assert finish.stats.accepted >= 0.8 * finish.stats.drafted > 0
    # The first passes come before the drafter has read the prompt.
    assert finish.acceptance_length > 3


SCHEMA = """{"type": "object", "required": ["name", "km"], "additionalProperties": false, "properties": {
    "name": {"type": "string", "maxLength": 20}, "km": {"type": "integer"}}}"""


def test_json_by_a_schema_is_the_same_with_and_without_drafts(cell: Any) -> None:
    """At temperature 1, with log-probabilities and a penalty, over the real link."""
    grammar = from_json_schema(SCHEMA)
    constraints = Constraints(grammar=grammar, frequency_penalty=0.2)
    texts: dict[str, str] = {}
    accepted = 0
    for schedule in ("plain", "sync", "saguaro", "swiftspec"):
        (request, *_) = requests(cell, schedule, 60, 1.0)
        tokens, finish = asyncio.run(answer(cell, replace(request, constraints=constraints, top_logprobs=2)))
        texts[schedule] = cell.codec.decode(tokens)
        assert finish.reason == "stop"
        accepted += finish.stats.accepted
    assert sorted(json.loads(texts["plain"])) == ["km", "name"]
    assert set(texts.values()) == {texts["plain"]}
    assert accepted > 0


def test_what_the_cache_cannot_hold_is_not_promised(cell: Any) -> None:
    assert cell.backend.model.context_length < 1024


def test_a_dead_verifier_is_said_to_be_dead(cell: Any) -> None:
    """The last test of this file: the cell is of no use afterwards."""
    pid = cell.status()["verifier"]["pid"]

    def kill(count: int) -> None:
        if count == 3:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(BackendError, match="verifier is gone"):
        asyncio.run(answer(cell, requests(cell, "plain", 300)[0], kill))
    assert cell.status()["verifier"] is None
