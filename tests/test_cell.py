"""The real thing: SmolLM2 on a Ray cluster, a verifier and a drafter in processes of their own, over a gloo link."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from real_cell import answer, answers, requests, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cell() -> Iterator[Any]:
    from paceline.cluster.cell import Cell
    from paceline.cluster.config import CellConfig

    # float32, where equal means equal.
    with Cell.start(CellConfig(dtype="float32", link_deadline=1.5)) as cell:
        yield cell


@pytest.fixture(scope="module")
def plain(cell: Any) -> list[Any]:
    return [ids for ids, _ in asyncio.run(answers(cell, requests(cell, "plain")))]


def _drafted_again(cell: Any) -> bool:
    return cell.status()["verifier"]["drafters"] == ("drafter-0",)


def _drafter_pid(cell: Any) -> int:
    until(lambda: cell.status()["drafters"]["drafter-0"] is not None, "an answer of the drafter")
    pid: int = cell.status()["drafters"]["drafter-0"]["pid"]
    return pid


@pytest.mark.parametrize("schedule", ["sync", "amusd"])
def test_drafts_change_no_token_of_three_requests_at_once(cell: Any, plain: list[Any], schedule: str) -> None:
    got = asyncio.run(answers(cell, requests(cell, schedule)))
    assert [ids for ids, _ in got] == plain
    assert sum(finish.stats.accepted for _, finish in got) > 10
    assert all(finish.reason == "length" for _, finish in got)


def test_the_seed_fixes_the_tokens_at_temperature_one(cell: Any) -> None:
    expected = [ids for ids, _ in asyncio.run(answers(cell, requests(cell, "plain", 24, 1.0)))]
    assert [ids for ids, _ in asyncio.run(answers(cell, requests(cell, "amusd", 24, 1.0)))] == expected
    assert len(set(expected)) == len(expected)


def test_a_killed_drafter_costs_no_token_and_comes_back(
    cell: Any, plain: list[Any], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pid = _drafter_pid(cell)

    def kill(count: int) -> None:
        if count >= 8:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    ids, _ = asyncio.run(answer(cell, requests(cell, "amusd", tag="-kill")[0], kill))
    assert ids == plain[0]
    until(lambda: _drafted_again(cell), "a new drafter")
    assert _drafter_pid(cell) != pid
    again, finish = asyncio.run(answer(cell, requests(cell, "amusd", tag="-after")[0]))
    assert again == plain[0]
    assert finish.stats.accepted > 0
    # Ray's own words about it are logged; they do not get between those of an answer.
    until(lambda: "Ray says: A worker died" in caplog.text, "Ray's message")
    assert capfd.readouterr().out == ""


def test_a_hung_drafter_costs_no_token_and_is_heard_again(cell: Any, plain: list[Any]) -> None:
    until(lambda: _drafted_again(cell), "a drafter")
    pid = _drafter_pid(cell)

    def stop(count: int) -> None:
        if 8 <= count < 12:
            os.kill(pid, signal.SIGSTOP)

    try:
        ids, _ = asyncio.run(answer(cell, requests(cell, "sync", tag="-hang")[0], stop))
        assert ids == plain[0]
        until(lambda: cell.status()["verifier"]["drafters"] == (), "the loss of the hung drafter")
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: _drafted_again(cell), "the drafter's return")
    again, finish = asyncio.run(answer(cell, requests(cell, "amusd", tag="-after-hang")[0]))
    assert again == plain[0]
    assert finish.stats.accepted > 0


def test_a_closed_stream_frees_its_session_within_a_pass(cell: Any) -> None:
    async def leave_early() -> None:
        stream = cell.backend.generate(requests(cell, "amusd", 4000, tag="-leave")[2])
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave_early())
    until(lambda: cell.status()["verifier"]["sessions"] == 0, "the end of the session", 5.0)
    until(lambda: cell.status()["drafters"]["drafter-0"]["sessions"] == 0, "the end of its draft", 5.0)
