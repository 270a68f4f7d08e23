"""Several drafters in one cell, one drafter for several verifiers, and what all of it costs while nothing happens.

The models are tables, so that starting them takes longer than running them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import table_models as tables
from paceline.actors.trace import overlap
from paceline.actors.values import Finish, Request, Sampling, Speculation
from paceline.cluster.commands import _watch_drafters
from real_cell import answer, until
from torch import Tensor

pytestmark = pytest.mark.slow

VOCAB = 24
PROMPT = (1, 2, 3)
LENGTH = 60
IDLE_SHARE = 0.05
MODEL, NGRAM, ORACLE = DRAFTERS = ("drafter-0", "drafter-1", "drafter-2")


def _table() -> Tensor:
    table = tables.random_table(VOCAB, seed=7)
    table[:, tables.EOS] = -50.0
    return table


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tables.write_table_model(tmp_path_factory.mktemp("target") / "table", _table())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that is right some of the time."""
    return tables.write_table_model(tmp_path_factory.mktemp("small") / "blurred", tables.blurred(_table(), seed=3))


@pytest.fixture(scope="module")
def cell(target: Path, small: Path) -> Iterator[Any]:
    from paceline.cluster.cell import Cell
    from paceline.cluster.config import CellConfig

    config = CellConfig(
        target=str(target),
        drafters=(str(small), "ngram", "oracle:alpha=1,cost=0.1"),
        drafters_per_session=2,
        dtype="float32",
        kv_tokens=4096,
        link_deadline=2.0,
    )
    with Cell.start(config) as cell:
        yield cell


def _request(name: str, schedule: str = "amusd", temperature: float = 0.0, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(name, prompt, Sampling(temperature, seed=5), LENGTH, speculation=Speculation(schedule))


def _ask(cell: Any, request: Request) -> tuple[tuple[int, ...], Finish]:
    return asyncio.run(answer(cell, request))


def _counters(cell: Any) -> dict[str, dict[str, int]]:
    return {name: status["counters"] for name, status in cell.status()["drafters"].items()}


def _all_there(cell: Any) -> bool:
    return sorted(cell.status()["verifier"]["drafters"]) == list(DRAFTERS)


def test_a_cell_is_up_with_all_its_drafters(cell: Any, small: Path) -> None:
    titles = (small.name, "ngram", "oracle:alpha=1,cost=0.1")
    assert cell.backend.model.drafters == titles
    assert _all_there(cell)
    named = [f"{name} ({title})" for name, title in zip(DRAFTERS, titles, strict=True)]
    assert asyncio.run(anext(cell.watch_drafters())) == set(named)


def test_only_a_model_takes_a_device_and_the_others_share_its_core(cell: Any) -> None:
    import ray

    cores = {name: os.sched_getaffinity(status["pid"]) for name, status in cell.status()["drafters"].items()}
    assert cores[MODEL] == cores[NGRAM] == cores[ORACLE]
    assert len(cores[MODEL]) == 1
    if len(os.sched_getaffinity(0)) > 1:
        assert os.sched_getaffinity(cell.status()["verifier"]["pid"]) != cores[MODEL]
    taken = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
    assert taken == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["sync", "pearl", "amusd", "saguaro", "swiftspec", "auto"])
def test_drafters_that_draft_together_change_no_token(cell: Any, schedule: str, temperature: float) -> None:
    plain, _ = _ask(cell, _request("plain", "plain", temperature))
    before = _counters(cell)

    def all_took_part() -> bool:
        # Passes of so small a model may be over before a drafter on a busy core has even begun.
        drafted, finish = _ask(cell, _request("drafted", schedule, temperature))
        assert drafted == plain
        after = _counters(cell)
        stepped = all(after[name].get("draft_steps", 0) > before[name].get("draft_steps", 0) for name in DRAFTERS)
        return stepped and finish.stats.accepted > 0

    until(all_took_part, "all drafters take part, and some guess is right")


def test_an_oracle_that_was_taught_knows_the_answer(cell: Any) -> None:
    prompt = (9, 4, 1)
    plain, _ = _ask(cell, _request("plain", "plain", 1.0, prompt))
    cell.teach(prompt, plain, 0.001)
    grown = _counters(cell)[ORACLE].get("grown_nodes", 0)
    drafted, finish = _ask(cell, _request("taught", "sync", 1.0, prompt))
    assert drafted == plain
    assert finish.acceptance_length > 2
    assert _counters(cell)[ORACLE]["grown_nodes"] > grown


def test_the_timeline_has_a_lane_for_everyone_and_is_given_out_once(cell: Any) -> None:
    cell.trace()
    _, finish = _ask(cell, _request("traced"))
    spans = cell.trace()
    assert {span.lane for span in spans} == {"verifier", *DRAFTERS}
    assert [span.start for span in spans] == sorted(span.start for span in spans)
    passes = [span for span in spans if span.name == "verify"]
    assert len(passes) == finish.stats.verify_passes
    assert sum(int(span.args["accepted"]) for span in passes) == finish.stats.accepted
    assert sum(int(span.args["tokens"]) for span in passes) == finish.completion_tokens
    # The root of its first pass is its prompt's last token.
    assert [span.args["prompt"] for span in passes] == [finish.prompt_tokens - 1, *[0] * (len(passes) - 1)]
    assert sum(span.name == "hit" for span in spans) == finish.stats.hits
    sent = {(span.args["to"], span.args["base_len"]) for span in spans if span.name == "verdict" and "to" in span.args}
    heard = {(span.lane, span.args["base_len"]) for span in spans if span.name == "verdict" and "of" in span.args}
    # The last ones may be on their way still.
    assert len(heard) > 3
    assert heard <= sent
    assert 0 < overlap(spans) <= 1  # type: ignore[operator]
    assert not [span for span in cell.trace() if span.name == "verify"]


def test_an_idle_cell_sleeps(cell: Any) -> None:
    """Verifier, two drafters and the driver together, while `paceline up` watches them."""
    until(lambda: not any(status["sessions"] for status in cell.status()["drafters"].values()), "the end of all drafts")
    status = cell.status()
    pids = [os.getpid(), status["verifier"]["pid"], *(status["drafters"][name]["pid"] for name in (MODEL, NGRAM))]
    shares: list[float] = []
    # What else runs on this machine makes every wake-up dearer, but not always.
    while len(shares) < 3 and min(shares, default=1.0) >= IDLE_SHARE:
        seconds, started = _cpu_seconds(pids), time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(_watch_drafters(cell), 10.0))
        shares.append((_cpu_seconds(pids) - seconds) / (time.monotonic() - started))
    assert min(shares) < IDLE_SHARE


def _cpu_seconds(pids: list[int]) -> float:
    """What processes have computed so far, in user mode and for them in the kernel."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def test_a_killed_drafter_is_missed_by_nobody_and_comes_back(cell: Any) -> None:
    plain, _ = _ask(cell, _request("plain", "plain", 1.0))
    os.kill(cell.status()["drafters"][MODEL]["pid"], signal.SIGKILL)
    until(lambda: MODEL not in cell.status()["verifier"]["drafters"], "the loss of the drafter")
    drafted, finish = _ask(cell, _request("without", "amusd", 1.0))
    assert drafted == plain
    assert finish.stats.accepted > 0
    until(lambda: _all_there(cell), "the drafter's return")
    steps = _counters(cell)[MODEL].get("draft_steps", 0)
    assert _ask(cell, _request("again", "amusd", 1.0))[0] == plain
    assert _counters(cell)[MODEL]["draft_steps"] > steps


# One drafter for two verifiers


class Pair:
    """Two verifiers and the drafter that they share."""

    def __init__(self, target: Path, small: Path) -> None:
        import ray
        from paceline.actors.link import LinkSettings
        from paceline.actors.ray_actors import (
            DrafterActor,
            DrafterSpec,
            LinkSpec,
            ModelSpec,
            Place,
            VerifierActor,
            VerifierSpec,
        )
        from paceline.actors.verifier import VerifierSettings
        from paceline.cluster.cell import Cluster

        self.cluster = Cluster()
        self.cluster.start(cpus=2)
        names, link = ("verifier-0", "verifier-1"), LinkSettings()
        links = (LinkSpec("shared", link),)
        actor = ray.remote(num_cpus=0)(VerifierActor)
        model, settings = ModelSpec(str(target), "float32", 4096), VerifierSettings()
        self.verifiers = [actor.remote(VerifierSpec(name, model, Place("cpu", 0), links, settings)) for name in names]
        stores = zip(names, ray.get([verifier.store.remote() for verifier in self.verifiers], timeout=60), strict=True)
        source = ModelSpec(str(small), "float32", 4096)
        spec = DrafterSpec("shared", source, Place("cpu", 1), link, tuple(stores))
        self.drafter = ray.remote(num_cpus=0)(DrafterActor).options(max_restarts=-1).remote(spec)
        ray.get([actor.ready.remote() for actor in self.actors], timeout=120)
        until(lambda: self.linked() == [("shared",)] * 2, "both links")

    @property
    def actors(self) -> list[Any]:
        return [*self.verifiers, self.drafter]

    def linked(self) -> list[tuple[str, ...]]:
        import ray

        return [ray.get(verifier.status.remote(), timeout=30)["drafters"] for verifier in self.verifiers]

    def drafter_status(self) -> dict[str, Any]:
        import ray

        status: dict[str, Any] = ray.get(self.drafter.status.remote(), timeout=60)
        return status

    async def answers(self, schedule: str) -> list[tuple[tuple[int, ...], Finish]]:
        """Of both at once."""
        return await asyncio.gather(
            *(answer(_Backend(verifier), _request("same", schedule)) for verifier in self.verifiers)
        )

    def stop(self) -> None:
        import ray

        try:
            ray.get([actor.stop.remote() for actor in self.actors], timeout=30)
        finally:
            self.cluster.stop()


class _Backend:
    """As much of a cell as `answer` needs."""

    def __init__(self, verifier: Any) -> None:
        self.backend, self._verifier = self, verifier

    async def generate(self, request: Request) -> AsyncIterator[Any]:
        async for ref in self._verifier.generate.options(num_returns="streaming").remote(request, request.id):
            yield await ref


@pytest.fixture
def pair(target: Path, small: Path) -> Iterator[Pair]:
    pair = Pair(target, small)
    try:
        yield pair
    finally:
        pair.stop()


def test_one_drafter_serves_two_verifiers_even_after_it_was_killed(pair: Pair) -> None:
    (plain, _), _ = asyncio.run(pair.answers("plain"))
    for ids, finish in asyncio.run(pair.answers("sync")):
        assert ids == plain
        assert finish.stats.accepted > 0
    os.kill(pair.drafter_status()["pid"], signal.SIGKILL)
    until(lambda: pair.linked() == [(), ()], "the loss of the drafter")
    until(lambda: pair.linked() == [("shared",)] * 2, "its return to both")
    for ids, finish in asyncio.run(pair.answers("sync")):
        assert ids == plain
        assert finish.stats.accepted > 0
