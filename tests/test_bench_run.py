"""Who answers what, when, and what comes of it: the benchmark on a scripted cell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paceline.actors.formulas import Costs
from paceline.actors.trace import Span
from paceline.actors.values import Delta, Request, Speculation
from paceline.cluster import bench_peers, bench_prompts
from paceline.cluster.bench_peer import LLAMA_CPP, PeerSpec, llama_answer
from paceline.cluster.bench_report import Report, as_text, write_json
from paceline.cluster.bench_run import Ask, MeasurementFailed, PeerFailed, Plan, measure
from paceline.cluster.bench_stats import Answer, Case, Group
from paceline.cluster.bench_theory import PassRecord, draft_step
from paceline.cluster.config import CellConfig
from scripted import MODEL, ByteCodec, ScriptedBackend, finish

FIELDS = {
    *("system", "schedule", "drafter", "batch", "temperature", "tokens_per_s", "tokens_per_s_per_device"),
    *("acceptance_length", "hit_rate", "overlap", "measured_over_formula"),
}
COSTS = {"verify_base": 0.01, "verify_node": 0.001, "draft": 0.001, "latency": 0.0, "acceptance": (0.5,), "second": 0.3}
ORACLE = "oracle:alpha=0.8,cost=0.1"


async def pieces(request: Request) -> AsyncIterator[Delta]:
    """Six tokens that depend on the seed; plain brings them one by one, everybody else in threes."""
    size = 1 if request.speculation.schedule == "plain" else 3
    tokens = tuple(request.sampling.seed + i for i in range(6))
    for i in range(0, 6, size):
        await asyncio.sleep(0)
        yield Delta(tokens[i : i + size], "", finish(request, 6) if i + size == 6 else None)


class FakeCell:
    """taught: (prompt, continuation, seconds), and how many requests had been made by then."""

    def __init__(self, script: Any = pieces) -> None:
        self.backend, self.codec = ScriptedBackend(script, replace(MODEL, dtype="float32")), ByteCodec()
        self.taught: list[tuple[Sequence[int], Sequence[int], float, int]] = []

    def status(self) -> dict[str, Any]:
        return {"verifier": {"costs": {"drafter-0": COSTS}}}

    def trace(self) -> list[Span]:
        at = 2.0 * len(self.backend.requests)
        work = {"sessions": 1, "nodes": 4, "prompt": 0}
        return [Span("verifier", "verify", at, at + 1, work), Span("drafter-0", "draft", at + 0.5, at + 1)]

    def teach(self, prompt: Sequence[int], continuation: Sequence[int], step_seconds: float) -> None:
        self.taught.append((prompt, continuation, step_seconds, len(self.backend.requests)))

    @property
    def measured(self) -> list[Request]:
        """Without the warm-up, which asks for fewer tokens."""
        return [request for request in self.backend.requests if request.max_tokens == 64]


def plan(prompts: int = 3, schedules: Sequence[str] = ("sync",), **more: Any) -> Plan:
    return Plan(tuple(bench_prompts.load(prompts)), Speculation(), tuple(schedules), **more)


def run(cell: FakeCell, wanted: Plan, drafters: Sequence[str] = ("ngram",), peers: Sequence[Any] = ()) -> Report:
    report = Report({"settings": {}})
    measure(wanted, cell, drafters, peers, report, lambda _: None)
    return report


def test_every_schedule_answers_each_prompt_before_the_next_and_each_comes_first_in_turn():
    cell = FakeCell()
    report = run(cell, plan(3, ("sync", "amusd"), ks=(2, 4)))
    variants = [(r.sampling.seed, r.speculation.schedule, r.speculation.k) for r in cell.measured]
    order = [("plain", 2), ("sync", 2), ("sync", 4), ("amusd", 2), ("amusd", 4)]
    assert variants == [(i, *order[(i + j) % 5]) for i in range(3) for j in range(5)]
    assert [row.label for row in report.rows] == ["plain", "sync k=2", "sync k=4", "amusd k=2", "amusd k=4"]
    assert {row.prompts for row in report.rows} == {3}


def test_everything_is_warmed_up_unmeasured():
    cell = FakeCell()
    run(cell, plan(2))
    warm = [request for request in cell.backend.requests if request.max_tokens == 16]
    assert [request.speculation.schedule for request in warm] == ["plain", "sync"]
    assert cell.backend.requests[:2] == warm


def test_rows_have_the_promised_fields_and_numbers():
    row = run(FakeCell(), plan()).as_object()["rows"][1]
    assert row.keys() >= FIELDS
    assert (row["system"], row["schedule"], row["drafter"], row["batch"]) == ("paceline", "sync", "ngram", 1)
    assert (row["temperature"], row["k"], row["acceptance_length"], row["hit_rate"]) == (0.0, 4, 2.0, 1 / 3)
    assert row["tokens_per_s"] == row["tokens_per_s_per_device"] > 0
    assert (row["overlap"], row["differing"], row["acceptance_by_position"]) == (0.5, 0, (0.4, 0.0))
    # v = 1 and k c = 2 by the spans, for the tokens of four guesses that are right 0.4 and then never.
    assert row["formula_tokens_per_s"] == pytest.approx(1.4 / 3)
    assert row["measured_over_formula"] == pytest.approx(row["decode_tokens_per_s"] * 3 / 1.4)


def test_formulas_are_held_to_what_passes_took_over_the_whole_run():
    latest = Costs(verify_base=9.0, verify_node=9.0, draft=9.0, latency=0.25, acceptance=(0.5,))
    record = PassRecord()
    record.add([Span("v", "verify", 0.0, 8.0, {"sessions": 1, "nodes": 0, "prompt": 5}), Span("v", "hit", 8.0, 8.0)])
    assert record.applied(latest) == latest
    for rows in (5, 1):
        record.add([Span("v", "verify", 0.0, rows, {"sessions": 1, "nodes": rows - 1, "prompt": 0})] * 3000)
    # A slow end of the run is only its end, and one pass of a size says nothing.
    record.add([Span("v", "verify", 0.0, 7.0, {"sessions": 1, "nodes": 0, "prompt": 0})] * 2000)
    record.add([Span("v", "verify", 0.0, 50.0, {"sessions": 1, "nodes": 2, "prompt": 0})])
    assert record.applied(latest) == replace(latest, verify_base=0, verify_node=1, passes=((1, 1), (5, 5)))


def test_a_lookup_beside_a_model_drafter_does_not_make_its_steps_shorter():
    lookups = [Span("drafter-1", "draft", 1.0, 1.001)] * 5
    assert draft_step([Span("drafter-0", "draft", 1.0, 1.5), *lookups, Span("v", "verify", 0.0, 9.0)]) == 0.5
    assert draft_step(lookups) == pytest.approx(0.001)
    assert draft_step([]) is None


def test_auto_has_no_formula_and_nobody_has_one_without_costs():
    cell = FakeCell()
    assert run(cell, plan(1, ("auto",))).rows[1].measured_over_formula is None
    cell.status = lambda: {"verifier": None}  # type: ignore[method-assign]
    assert [row.measured_over_formula for row in run(cell, plan(1)).rows] == [None, None]


def test_an_oracle_is_taught_what_plain_said_before_the_others_are_asked():
    cell = FakeCell()
    report = run(cell, plan(2, ("sync", "amusd")), (ORACLE,))
    assert [request.speculation.schedule for request in cell.measured] == [
        "plain",
        "sync",
        "amusd",
        "plain",
        "amusd",
        "sync",
    ]
    last = cell.taught[-2:]
    asked = [cell.measured[i].prompt for i in (0, 3)]
    assert [(prompt, continuation) for prompt, continuation, _, _ in last] == [
        (asked[i], tuple(range(i, i + 6))) for i in range(2)
    ]
    assert all(seconds > 0 for _, _, seconds, _ in last)
    # After three requests of warm-up and plain's own, then after the three of the first prompt.
    assert [count for *_, count in last] == [4, 7]
    assert all(row.synthetic for row in report.rows)
    assert "synthetic" in as_text(report)


def test_a_batch_is_kept_full_until_the_prompts_run_out():
    running = most = 0

    async def counted(request: Request) -> AsyncIterator[Delta]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        async for delta in pieces(request):
            await asyncio.sleep(0.001 * (request.sampling.seed % 3))
            yield delta
        running -= 1

    report = run(FakeCell(counted), plan(12, batches=(4,)))
    assert most == 4
    assert [row.prompts for row in report.rows] == [12, 12]
    assert all(2 < row.streams <= 4 for row in report.rows)


def test_other_tokens_than_plains_are_counted():
    async def wrong(request: Request) -> AsyncIterator[Delta]:
        async for delta in pieces(request):
            odd = request.speculation.schedule == "sync" and request.sampling.seed == 1
            yield replace(delta, token_ids=delta.token_ids[::-1]) if odd else delta

    assert [row.differing for row in run(FakeCell(wrong), plan()).rows] == [0, 1]


@pytest.mark.parametrize(("drafters", "devices"), [(("ngram",), 1), (("int8",), 2), (("int8", "ngram"), 2), ((), 1)])
def test_devices_are_the_target_and_what_computes_drafts(drafters: tuple[str, ...], devices: int):
    plain, sync = run(FakeCell(), plan(1), drafters).rows
    assert (plain.devices, sync.devices) == (1, devices)
    assert sync.drafter == ("+".join(drafters) or "none")


def test_temperature_and_batch_have_rows_of_their_own():
    cell = FakeCell()
    report = run(cell, plan(4, batches=(1, 2), temperatures=(0.0, 0.8)))
    assert [(row.batch, row.temperature) for row in report.rows[::2]] == [(1, 0.0), (1, 0.8), (2, 0.0), (2, 0.8)]
    assert {request.sampling.temperature for request in cell.measured} == {0.0, 0.8}


def test_a_batch_needs_as_many_prompts():
    with pytest.raises(ValueError, match="a batch of 8 needs as many prompts, and there are 3"):
        plan(3, batches=(8,))


# Interrupted, or failed


def test_what_was_complete_when_it_was_interrupted_is_kept(tmp_path: Path):
    async def until_the_second_prompt(request: Request) -> AsyncIterator[Delta]:
        if request.sampling.seed == 1 and request.speculation.schedule == "plain":
            raise KeyboardInterrupt
        async for delta in pieces(request):
            yield delta

    path = tmp_path / "rows.json"
    report = Report({}, lambda report: write_json(path, report))
    with pytest.raises(KeyboardInterrupt):
        measure(plan(), FakeCell(until_the_second_prompt), ("ngram",), (), report, lambda _: None)
    saved = json.loads(path.read_text())
    # Sync has answered the second prompt already; that is not counted, since plain has not.
    assert [(row["schedule"], row["prompts"]) for row in saved["rows"]] == [("plain", 1), ("sync", 1)]
    assert saved["complete"] is False
    assert "cut short" in saved["remarks"][0]


def test_a_failed_request_ends_it_with_its_reason():
    async def failing(request: Request) -> AsyncIterator[Delta]:
        yield Delta((1,), "", finish(request, 1, "error", error="out of blocks", code="exhausted"))

    with pytest.raises(MeasurementFailed, match="out of blocks"):
        run(FakeCell(failing), plan())


# Peers


class FakePeer:
    """Answers as plain does, and fails at its `fails`-th group."""

    def __init__(self, fails: int = 100) -> None:
        self.case = Case("transformers", "generate", "none", "ngram", 1, 0.0, devices=2, dtype="float32")
        self.groups, self._fails = 0, fails

    def run(self, asks: Sequence[Ask]) -> Group:
        self.groups += 1
        if self.groups == self._fails:
            raise PeerFailed("out of memory")
        seeds = [ask.sampling.seed for ask in asks]
        answers = [Answer(tuple(range(s, s + 6)), tuple((0.1 * i, 1) for i in range(1, 7)), 0.6) for s in seeds]
        return Group(tuple(answers), 0.6 * len(answers))


def test_a_peer_answers_the_same_prompts_one_at_a_time_and_greedily_only():
    peer = FakePeer()
    report = run(FakeCell(), plan(batches=(1, 2), temperatures=(0.0, 0.8)), peers=[peer])
    (row,) = [row for row in report.rows if row.system == "transformers"]
    assert (row.batch, row.temperature, row.label) == (1, 0.0, "transformers generate x2")
    assert (row.prompts, row.differing, row.devices) == (3, 0, 2)
    assert row.tokens_per_s == pytest.approx(10)
    assert row.tokens_per_s_per_device == pytest.approx(5)
    assert peer.groups == 4  # a warm-up, and three prompts


@pytest.mark.parametrize("fails", [1, 3])
def test_a_peer_that_fails_is_left_out_and_said_to_be(fails: int):
    report = run(FakeCell(), plan(), peers=[FakePeer(fails)])
    assert [(row.system, row.prompts) for row in report.rows] == [("paceline", 3), ("paceline", 3)]
    assert "transformers generate x2 is left out: out of memory" in report.remarks


def test_a_peer_that_cannot_load_is_left_out(tmp_path: Path):
    spec = PeerSpec(LLAMA_CPP, str(tmp_path / "nowhere.gguf"), "Q4_1", "cpu", 1)
    case = Case("llama.cpp", "Q4_1", "none", "ngram", 1, 0.0, devices=1, dtype="Q4_1")
    notes: list[str] = []
    with bench_peers.running([(spec, case)], notes.append, lambda _: None) as ready:
        assert ready == []
    assert len(notes) == 1
    assert notes[0].startswith("llama.cpp Q4_1 x1 is left out: ")


def test_where_llama_cpp_is_not_installed_that_is_said_and_no_row_is_made_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(bench_peers, "resolve", lambda source, progress: type("Files", (), {"directory": tmp_path}))
    report = Report({})
    wanted = bench_peers.wanted(CellConfig(target="x", device="cpu"), "float32", None, report, lambda _: None)
    assert {spec.system for spec, _ in wanted} == {"transformers"}
    assert {case.schedule for _, case in wanted} == {"generate", "prompt lookup"}
    assert report.notes == ["llama.cpp is left out: xllamacpp is not installed (pip install 'paceline[bench]')"]
    report.put(run(FakeCell(), plan(1)).rows)
    later = bench_peers.wanted(
        CellConfig(target="x", drafters=("int8",), device="cpu"), "float32", None, report, lambda _: None
    )
    assert later == []


def test_a_drafter_on_disk_assists_transformers_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(
        bench_peers, "resolve", lambda source, progress: type("Files", (), {"directory": tmp_path / source})
    )
    report = Report({})
    report.put(run(FakeCell(), plan(1)).rows)
    config = CellConfig(target="x", drafters=("ngram", "small"), device="cpu")
    wanted = bench_peers.wanted(config, "float32", None, report, lambda _: None)
    assert {(spec.assistant, case.schedule, case.drafter) for spec, case in wanted} == {
        (str(tmp_path / "small"), "assisted", "ngram+small")
    }


def test_llama_cpps_stream_is_read_to_the_last_token():
    def event(text: str, **more: Any) -> dict[str, Any]:
        return {"choices": [{"text": text}], **more}

    # The third and the fourth token make one character.
    stream = [
        (0.5, event("a")),
        (0.6, event("b")),
        (0.9, event("é")),
        (0.91, event("", usage={"completion_tokens": 4})),
    ]
    answer = llama_answer(stream)
    assert (answer.arrivals, answer.seconds, answer.tokens) == (((0.5, 1), (0.6, 1), (0.9, 2)), 0.91, ())
    with pytest.raises(RuntimeError, match="too long"):
        llama_answer([(0.1, {"error": {"message": "too long"}})])


# Prompts


def test_there_are_enough_prompts_of_each_class_and_none_twice():
    prompts = bench_prompts.load()
    kinds = [prompt.kind for prompt in prompts]
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 80
    assert {kind: kinds.count(kind) for kind in kinds[:6]} == dict.fromkeys(
        ["chat", "code", "summarising", "maths", "translation", "retrieval"], 14
    )
    for prompt in prompts:
        if prompt.kind in ("summarising", "retrieval"):
            assert 100 < len(prompt.text.split()) < 260


def test_a_few_prompts_are_of_all_classes():
    assert len({prompt.kind for prompt in bench_prompts.load(6)}) == 6
    with pytest.raises(ValueError, match="from 1 to 84"):
        bench_prompts.load(85)
