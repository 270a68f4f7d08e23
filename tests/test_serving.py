"""Both loops together: whatever happens to drafts, the tokens are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import table_models as tables
from conftest import TableModel
from local_cell import Answer, LocalCell, engine_of
from paceline.actors.drafters import RUN_AHEAD, Drafter, ModelDrafter, NgramDrafter
from paceline.actors.engine import Feed
from paceline.actors.memory_link import Chaos
from paceline.actors.messages import Close, Open, decode, encode
from paceline.actors.schedules import plan_of
from paceline.actors.values import Delta, Request, Sampling, Speculation
from paceline.actors.verifier import Cancel, Submit, VerifierSettings
from torch import Tensor

VOCAB = 24
LENGTH = 28
GREEDY, WARM = Sampling(), Sampling(temperature=0.9, top_k=12, top_p=0.95, seed=2**63 + 5)


def _table() -> Tensor:
    """A random chain that never ends by itself."""
    table = tables.random_table(VOCAB, seed=1, spread=2.0)
    table[:, tables.EOS] = -1e4
    return table


@pytest.fixture
def target(table_model: TableModel) -> Path:
    return table_model(_table())


def _requests(sampling: Sampling, schedule: str, k: int = 4, length: int = LENGTH, **options: object) -> list[Request]:
    """Three at once, of different prompts and lengths, and of different seeds."""
    return [
        Request(
            f"r{i}",
            tuple((7 * i + j) % VOCAB or 1 for j in range(1 + 9 * i)),
            Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, (sampling.seed + i) % 2**64),
            length + 3 * i,
            speculation=Speculation(schedule, k),
            **options,  # type: ignore[arg-type]
        )
        for i in range(3)
    ]


def _plain(target: Path, sampling: Sampling, **options: object) -> list[tuple[int, ...]]:
    cell = LocalCell(target, NgramDrafter())
    answers = cell.run(_requests(sampling, "plain", **options))  # type: ignore[arg-type]
    assert all(a.stats.drafted == 0 and a.stats.verify_passes == len(a.tokens) for a in answers)
    cell.settle()
    return [a.tokens for a in answers]


def _total(answers: list[Answer], field: str) -> int:
    return sum(getattr(answer.stats, field) for answer in answers)


DRAFTERS = {
    "right": lambda t: t,
    "blurred": lambda t: tables.blurred(t, seed=2),
    "wrong": tables.contrary,
    "ends at once": lambda t: tables.always(tables.EOS, VOCAB),
    "outside the vocabulary": lambda t: tables.always(VOCAB + 5, VOCAB + 8),
    "NaN": lambda t: tables.broken(VOCAB),
}


# schedule, k, turns of the drafter per turn of the verifier
RUNS = (
    ("sync", 4, 3.0),
    ("amusd", 7, 2.0),
    ("saguaro", 3, 6.0),
    ("sync", 1, 1.0),
    ("amusd", 4, 0.5),
    ("pearl", 5, 2.0),
    ("pearl", 1, 3.0),
    ("saguaro", 1, 1.0),
    ("swiftspec", 4, 3.0),
)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", [*DRAFTERS, "ngram"])
def test_no_drafter_changes_a_token(name: str, sampling: Sampling, target: Path, table_model: TableModel) -> None:
    expected = _plain(target, sampling)
    for schedule, k, speed in RUNS if name == "blurred" else RUNS[:3]:
        drafter: Drafter = NgramDrafter()
        if name != "ngram":
            drafter = ModelDrafter(engine_of(table_model(DRAFTERS[name](_table()))))
        cell = LocalCell(target, drafter, speed=speed, seed=k)
        answers = cell.run(_requests(sampling, schedule, k))
        assert [a.tokens for a in answers] == expected, (schedule, k)
        assert all(a.finish.reason == "length" for a in answers)
        cell.settle()
        _check_counts(name, sampling, cell, answers)


def _check_counts(name: str, sampling: Sampling, cell: LocalCell, answers: list[Answer]) -> None:
    """The path that the case is about was really taken."""
    drafted, accepted, passes = (_total(answers, field) for field in ("drafted", "accepted", "verify_passes"))
    assert passes + accepted == sum(len(a.tokens) for a in answers)
    if name == "right":
        assert accepted >= 0.9 * drafted > 0
    elif name in ("wrong", "ends at once") and sampling is GREEDY:
        assert drafted > 0
        assert accepted == 0
    elif name == "outside the vocabulary":
        assert cell.verifier.counters["out_of_vocabulary_nodes"] > 0
    elif name == "NaN":
        assert drafted == 0
    elif name == "blurred":
        assert 0 < accepted < drafted


@pytest.mark.parametrize("seed", range(12))
def test_no_numbers_of_a_plan_change_a_token(seed: int, target: Path, table_model: TableModel) -> None:
    """Any schedule, k, F, w and B, any speed of the drafter, greedy and warm, while they also differ within a batch."""
    rng = random.Random(seed)
    sampling = (GREEDY, WARM)[seed % 2]
    expected = _plain(target, sampling)
    requests = []
    for request in _requests(sampling, "plain"):
        numbers = (rng.randint(1, 9), rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 20))
        chosen = Speculation(rng.choice(("sync", "pearl", "amusd", "saguaro", "swiftspec", "auto")), *numbers)
        requests.append(replace(request, speculation=chosen))
    drafter = ModelDrafter(engine_of(table_model(tables.blurred(_table(), seed=seed)), kv_tokens=4096))
    cell = LocalCell(target, drafter, speed=rng.choice((0.5, 2.0, 8.0)), seed=seed)
    answers = cell.run(requests)
    assert [a.tokens for a in answers] == expected
    assert _total(answers, "accepted") > 0
    cell.settle()


def test_sync_accepts_k_and_the_bonus_token_of_a_right_drafter(target: Path) -> None:
    cell = LocalCell(target, ModelDrafter(engine_of(target)), speed=20.0)
    (answer,) = cell.run(_requests(GREEDY, "sync", k=4, length=51)[:1])
    # The first pass may come before the first draft does.
    assert answer.stats.verify_passes <= 51 / 5 + 2
    assert answer.finish.acceptance_length > 4


def test_a_model_drafter_computes_no_node_twice(target: Path, table_model: TableModel) -> None:
    engine = engine_of(target)
    fed = 0
    step = engine.step

    def counting(feeds: list[Feed]) -> list[Tensor]:
        nonlocal fed
        fed += sum(len(feed.tokens) for feed in feeds)
        return step(feeds)

    engine.step = counting  # type: ignore[method-assign, assignment]
    cell = LocalCell(target, ModelDrafter(engine), speed=3.0)
    request = _requests(GREEDY, "amusd", k=4, length=60)[1]
    (answer,) = cell.run([request])
    assert answer.stats.accepted > 30
    # A right drafter's chain is never dropped: prompt, answer and what it ran ahead, each once.
    assert fed <= len(request.prompt) + len(answer.tokens) + 2 * 4 + 1


@pytest.mark.parametrize("seed", range(6))
def test_chaos_on_the_wire_changes_no_token(seed: int, target: Path, table_model: TableModel) -> None:
    sampling = WARM if seed % 2 else GREEDY
    expected = _plain(target, sampling)
    fault = Chaos(random.Random(seed), drop=0.15, repeat=0.15, corrupt=0.1)
    drafter = ModelDrafter(engine_of(table_model(tables.blurred(_table(), seed=3, spread=0.3))))
    cell = LocalCell(target, drafter, fault=fault, seed=seed)
    rng = random.Random(seed)

    def shuffle(count: int) -> None:
        if count % 5 == 0:
            cell.verifier_end.shuffle(rng)
            cell.drafter_end.shuffle(rng)

    answers = cell.run(_requests(sampling, "amusd"), shuffle)
    assert [a.tokens for a in answers] == expected
    assert _total(answers, "accepted") > 0
    cell.settle()
    assert cell.verifier.counters["malformed_messages"] + cell.drafter.counters["malformed_messages"] > 0
    assert cell.drafter.counters["lost_sessions"] > 0


def test_a_drafter_that_comes_and_goes_costs_no_token(target: Path) -> None:
    expected = _plain(target, WARM, length=60)
    cell = LocalCell(target, ModelDrafter(engine_of(target)))
    losses = 0

    def flicker(count: int) -> None:
        nonlocal losses
        if count % 23 == 11:
            cell.verifier_end.down()
            losses += 1
        elif count % 23 == 17:
            cell.verifier_end.up()

    answers = cell.run(_requests(WARM, "amusd", length=60), flicker)
    assert [a.tokens for a in answers] == expected
    assert losses >= 3
    assert _total(answers, "accepted") > 0
    cell.verifier_end.up()
    cell.settle()
    assert not cell.drafter.drafts


def test_a_drafter_that_was_never_heard_is_never_waited_for(target: Path) -> None:
    cell = LocalCell(target, NgramDrafter(), speed=0.0)
    answers = cell.run(_requests(GREEDY, "sync"))
    assert cell.waited == 0
    assert _total(answers, "verify_passes") == sum(len(a.tokens) for a in answers)


def test_a_drafter_that_falls_silent_is_waited_for_once(target: Path) -> None:
    settings = VerifierSettings(max_patience=0.5)
    cell = LocalCell(target, ModelDrafter(engine_of(target)), settings=settings, speed=4.0)

    def fall_silent(count: int) -> None:
        if cell.verifier.counters["verify_passes"] >= 4:
            cell.speed = 0.0

    (answer,) = cell.run(_requests(GREEDY, "sync")[:1], fall_silent)
    assert answer.stats.accepted > 0
    assert cell.verifier.counters["late_drafts"] == 1
    assert cell.waited <= 2 * 0.5


def test_ends_lie_where_they_would_without_drafts(table_model: TableModel) -> None:
    """EOS, a stop id and the length limit, at every place within an accepted block."""
    chain = [*range(1, 20), tables.EOS]
    target = table_model(tables.chain_table(chain, VOCAB))
    drafter = ModelDrafter(engine_of(target))
    for first in range(1, 7):
        cell = LocalCell(target, drafter, speed=20.0)
        whole, ended, ignored = cell.run(
            [
                Request("eos", (first,), GREEDY, 100, speculation=Speculation("sync", 5)),
                Request("id", (first,), GREEDY, 100, stop_token_ids=(9,), speculation=Speculation("sync", 5)),
                Request("on", (first,), GREEDY, 30, ignore_eos=True, speculation=Speculation("sync", 5)),
            ]
        )
        assert whole.tokens == tuple(chain[first:])
        assert ended.tokens == tuple(range(first + 1, 10))
        assert whole.finish.reason == ended.finish.reason == "stop"
        assert len(ignored.tokens) == 30
        assert ignored.finish.reason == "length"
        assert ignored.tokens[: len(whole.tokens)] == whole.tokens
        for answer in (whole, ended):
            assert answer.stats.accepted > 0
            assert answer.stats.accepted <= answer.stats.drafted <= len(answer.tokens) + 5
        cell.settle()


def test_the_context_is_used_to_its_last_position(table_model: TableModel) -> None:
    target = table_model(_table(), context=48)
    expected = LocalCell(target, NgramDrafter()).run(_requests(GREEDY, "plain", length=400))
    cell = LocalCell(target, ModelDrafter(engine_of(target)))
    answers = cell.run(_requests(GREEDY, "amusd", length=400))
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert [len(a.tokens) for a in answers] == [47, 38, 29]
    assert {a.finish.reason for a in answers} == {"length"}


def test_a_drafter_with_a_shorter_context_stops_drafting_there(target: Path, table_model: TableModel) -> None:
    expected = _plain(target, GREEDY, length=80)
    cell = LocalCell(target, ModelDrafter(engine_of(table_model(_table(), context=32))))
    answers = cell.run(_requests(GREEDY, "amusd", length=80))
    assert [a.tokens for a in answers] == expected
    assert _total(answers, "accepted") > 0


def test_one_request_with_bad_logits_ends_alone(table_model: TableModel) -> None:
    table = _table()
    table[5] = float("nan")
    target = table_model(table)
    clean = Request("clean", (1, 2), GREEDY, 30, speculation=Speculation("amusd", 4))
    cell = LocalCell(target, NgramDrafter())
    (alone,) = cell.run([clean])
    if 5 in alone.tokens:
        pytest.fail("the clean request must not meet the bad row")
    again, bad = LocalCell(target, NgramDrafter()).run([clean, Request("bad", (3, 5), GREEDY, 30)])
    assert again.tokens == alone.tokens
    assert (bad.finish.reason, bad.finish.code, bad.tokens) == ("error", "bad_logits", ())


def test_cancel_frees_a_session_before_the_next_pass(target: Path) -> None:
    cell = LocalCell(target, ModelDrafter(engine_of(target)))
    first, second, third = _requests(GREEDY, "amusd", length=300)
    submits = [cell.submit(request) for request in (first, second, third)]
    while cell.verifier.counters["verify_passes"] < 6:
        cell.step()
    held = cell.engine.pool.free_blocks
    cell.verifier.inbox.put(Cancel(submits[1]))
    cell.verifier.take(0)
    assert cell.finish(second.id).reason == "cancelled"  # type: ignore[union-attr]
    assert cell.engine.pool.free_blocks > held
    for submit in submits:
        cell.verifier.inbox.put(Cancel(submit))
    cell.settle()
    assert not cell.drafter.drafts


def test_requests_queue_while_there_is_no_room(target: Path) -> None:
    settings = VerifierSettings(max_sessions=2, max_queue=3)
    cell = LocalCell(target, NgramDrafter(), settings=settings)
    expected = _plain(target, GREEDY)[0]
    requests = [Request(f"q{i}", (1,), GREEDY, LENGTH, speculation=Speculation("amusd", 4)) for i in range(7)]
    answers = cell.run(requests)
    refused = [a for a in answers if a.finish.reason == "error"]
    assert [a.finish.code for a in refused] == ["exhausted"] * 2
    assert all("queue is full" in a.finish.error for a in refused)
    served = [a for a in answers if a.finish.reason == "length"]
    assert {a.tokens for a in served} == {expected}
    cell.settle()


def test_a_late_cancel_does_not_end_the_next_request_of_the_same_id(target: Path) -> None:
    cell = LocalCell(target, NgramDrafter())
    request = _requests(GREEDY, "amusd")[0]
    old = cell.submit(request)
    cell.turn_verifier()
    cell.verifier.inbox.put(Cancel(old))
    cell.verifier.take(0)
    cell.deltas[request.id].clear()
    cell.submit(request)
    cell.verifier.inbox.put(Cancel(old))
    while not cell.finish(request.id):
        cell.step()
    assert cell.answer(request.id).tokens == _plain(target, GREEDY)[0]


def test_without_a_queue_an_idle_cell_still_serves(target: Path) -> None:
    cell = LocalCell(target, NgramDrafter(), settings=VerifierSettings(max_sessions=1, max_queue=0))
    first, second = cell.run(_requests(GREEDY, "plain")[:2])
    assert first.finish.reason == "length"
    assert second.finish.code == "exhausted"


def test_a_request_that_cannot_start_leaves_nothing_behind(target: Path) -> None:
    cell = LocalCell(target, NgramDrafter())
    cell.turn_verifier()
    long = Request("long", (1,) * 600, GREEDY, 4, speculation=Speculation("amusd", 4))
    strange = Request("strange", (1,), GREEDY, 4, speculation=Speculation("no such schedule", 4))
    good = _requests(GREEDY, "amusd")[0]
    failed, unknown, served = cell.run([long, strange, good])
    assert "leaves no room" in failed.finish.error
    assert unknown.finish.reason == "error"
    assert served.tokens == _plain(target, GREEDY)[0]
    cell.settle()


def _two_drafters(target: Path, first: Drafter, second: Drafter, **options: Any) -> LocalCell:
    """A cell whose session may be grown by both."""
    cell = LocalCell(target, first, **options)
    cell.add_drafter("drafter-1", second)
    return cell


class TestSeveralDrafters:
    def test_sessions_are_spread_over_model_drafters(self, target: Path) -> None:
        cell = _two_drafters(target, ModelDrafter(engine_of(target)), ModelDrafter(engine_of(target)))
        for request in _requests(GREEDY, "amusd")[:2]:
            cell.submit(request)
        cell.turn_verifier()
        attached = [set(session.feeders) for session in cell.verifier.sessions.values()]
        assert sorted(attached, key=sorted) == [{"drafter-0"}, {"drafter-1"}]

    @pytest.mark.parametrize("schedule", ["amusd", "saguaro", "swiftspec"])
    @pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
    def test_two_grow_one_session_and_equal_paths_are_one(
        self, schedule: str, sampling: Sampling, target: Path, table_model: TableModel
    ) -> None:
        """One is right from time to time, the other one at other times; both name their nodes 1, 2, 3 ..."""
        first, second = (
            ModelDrafter(engine_of(table_model(tables.blurred(_table(), seed=seed)), kv_tokens=4096)) for seed in (2, 3)
        )
        settings = VerifierSettings(drafters_per_session=2)
        cell = _two_drafters(target, first, second, settings=settings, speed=4.0)
        answers = cell.run(_requests(sampling, schedule))
        assert [a.tokens for a in answers] == _plain(target, sampling)
        assert _total(answers, "accepted") > 0
        assert cell.verifier.counters["repeated_nodes"] > 0
        cell.settle()

    def test_retrieval_stands_in_while_a_model_drafter_is_stuck(self, target: Path) -> None:
        cell = LocalCell(target, ModelDrafter(engine_of(target)), speed=0.0)
        cell.add_drafter("lookup", NgramDrafter(), retrieval=True)
        looping = Request("loop", (3, 4, 5) * 8, GREEDY, LENGTH, speculation=Speculation("amusd", 4))
        cell.submit(looping)
        cell.turn_verifier()
        (session,) = cell.verifier.sessions.values()
        assert set(session.feeders) == {"drafter-0", "lookup"}
        while not cell.finish("loop"):
            cell.turn_drafter("lookup")
            cell.turn_verifier()
        assert cell.answer("loop").stats.drafted > 0

    def test_one_is_lost_and_comes_back(self, target: Path) -> None:
        first, second = (ModelDrafter(engine_of(target)) for _ in range(2))
        cell = _two_drafters(target, first, second, settings=VerifierSettings(drafters_per_session=2))
        end = cell.ends["drafter-1"][0]

        def flap(step: int) -> None:
            if step % 24 == 12:
                end.down()
            elif step % 24 == 23:
                end.up()

        answers = cell.run(_requests(GREEDY, "amusd"), flap)
        assert [a.tokens for a in answers] == _plain(target, GREEDY)
        cell.settle()

    def test_one_drafter_serves_two_verifiers(self, target: Path) -> None:
        """Both have a session in slot 0, of the same epoch."""
        one = LocalCell(target, ModelDrafter(engine_of(target)))
        two = LocalCell(target, NgramDrafter(), settings=VerifierSettings(drafters_per_session=2))
        two.connect("shared", one.drafters["drafter-0"])
        requests = _requests(GREEDY, "amusd")[:2]
        one.submit(requests[0])
        two.submit(requests[1])
        while not (one.finish(requests[0].id) and two.finish(requests[1].id)):
            one.turn_drafter()
            one.turn_verifier()
            two.ends["shared"][1].pump()
            two.turn_verifier()
        answers = [one.answer(requests[0].id), two.answer(requests[1].id)]
        assert [a.tokens for a in answers] == _plain(target, GREEDY)[:2]
        assert all(a.stats.accepted > 0 for a in answers)


class _Holding:
    """Text that is held back to the end, as half a stop string is."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        self.ids += token_ids
        return "", None

    def flush(self) -> str:
        text, self.ids = "".join(map(chr, self.ids)), []
        return text


def test_text_that_was_held_back_comes_out_when_a_request_is_cut_short(target: Path) -> None:
    cell = LocalCell(target, NgramDrafter())
    cell.verifier._text = lambda _: _Holding()
    request = _requests(GREEDY, "plain", length=300)[0]
    submit = cell.submit(request)
    while cell.verifier.counters["verify_passes"] < 5:
        cell.step()
    cell.verifier.inbox.put(Cancel(submit))
    cell.verifier.take(0)
    ids = cell.answer(request.id).tokens
    assert "".join(delta.text for delta in cell.deltas[request.id]) == "".join(map(chr, ids))
    assert len(ids) == 5


def test_a_long_prefill_does_not_teach_patience(target: Path) -> None:
    settings = VerifierSettings(pass_tokens=8)
    cell = LocalCell(target, ModelDrafter(engine_of(target)), settings=settings, speed=2.0)
    request = Request("long", tuple(1 + i % 20 for i in range(120)), GREEDY, 20, speculation=Speculation("sync", 4))
    cell.run([request], lambda _: setattr(cell, "now", cell.now + (5.0 if not cell.deltas["long"] else 0.0)))
    assert cell.verifier._patience["drafter-0"].seconds < 0.5


def test_what_waits_begins_when_what_runs_is_cancelled(target: Path) -> None:
    cell = LocalCell(target, NgramDrafter(), settings=VerifierSettings(max_sessions=1))
    running, waiting, _ = _requests(GREEDY, "amusd", length=300)
    first = cell.submit(running)
    cell.turn_verifier()
    cell.submit(waiting)
    cell.verifier.inbox.put(Cancel(first))
    while not cell.finish(waiting.id):
        cell.step()
    assert len(cell.answer(waiting.id).tokens) == 303


def test_a_request_larger_than_the_cache_is_refused_and_a_repeated_id_too(table_model: TableModel) -> None:
    target = table_model(_table(), context=10_000)
    cell = LocalCell(target, NgramDrafter())
    huge, fits = cell.run([Request("huge", (1,), GREEDY, 9000), Request("fits", (1,), GREEDY, 20)])
    assert (huge.finish.reason, huge.finish.code) == ("error", "exhausted")
    assert "ask for fewer tokens" in huge.finish.error
    assert len(fits.tokens) == 20
    cell.submit(Request("twin", (1,), GREEDY, 20))
    cell.verifier.take(0)
    twin: list[Delta] = []
    second = Submit(Request("twin", (2,), GREEDY, 20), twin.append)
    cell.verifier.inbox.put(second)
    # The end of the refused call is not the end of the one that runs.
    cell.verifier.inbox.put(Cancel(second))
    cell.verifier.take(0)
    assert twin[0].finish is not None
    assert "in use" in twin[0].finish.error
    while not cell.finish("twin"):
        cell.step()
    assert len(cell.answer("twin").tokens) == 20


def test_long_prompts_are_fed_in_chunks_beside_running_requests(target: Path) -> None:
    settings = VerifierSettings(prefill_chunk=16)
    expected = _plain(target, GREEDY)
    long = Request("long", tuple(1 + i % (VOCAB - 1) for i in range(200)), GREEDY, 20)
    alone = LocalCell(target, NgramDrafter()).run([long])[0]
    cell = LocalCell(target, ModelDrafter(engine_of(target), prefill_chunk=16), settings=settings)
    *others, chunked = cell.run([*_requests(GREEDY, "amusd"), long])
    assert chunked.tokens == alone.tokens
    assert [a.tokens for a in others] == expected
    assert chunked.stats.accepted > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_end_no_loop_and_no_request(seed: int, target: Path) -> None:
    expected = _plain(target, GREEDY)
    cell = LocalCell(target, ModelDrafter(engine_of(target)), seed=seed)
    rng = random.Random(seed)

    def rubbish(count: int) -> None:
        end = rng.choice((cell.verifier_end, cell.drafter_end))
        head = encode(Close(rng.randrange(4), rng.randrange(6)))[: rng.randrange(17)] if rng.random() < 0.7 else b""
        end.send(head + rng.randbytes(rng.randrange(40)))

    answers = cell.run(_requests(GREEDY, "amusd"), rubbish)
    assert [a.tokens for a in answers] == expected
    cell.settle()
    assert cell.verifier.counters["malformed_messages"] > 0
    assert cell.drafter.counters["malformed_messages"] > 0


def test_a_slot_s_next_user_hears_nothing_of_the_last_one(target: Path, table_model: TableModel) -> None:
    """Growth for a request that was cancelled arrives when its slot is another one's."""
    cell = LocalCell(target, ModelDrafter(engine_of(table_model(tables.contrary(_table())))))
    old, new = _requests(GREEDY, "amusd")[:2]
    expected = _plain(target, GREEDY)[1]
    first = cell.submit(old)
    cell.turn_verifier()
    while not cell.drafter_end.outbox:
        cell.turn_drafter()
    held_back = list(cell.drafter_end.outbox)
    cell.drafter_end.outbox.clear()
    cell.verifier.inbox.put(Cancel(first))
    cell.submit(new)
    cell.turn_verifier()
    assert cell.verifier.sessions[new.id].slot == 0
    before = cell.verifier.counters["stale_messages"]
    cell.drafter_end.outbox.extend(held_back)
    cell.turn_verifier()
    assert cell.verifier.counters["stale_messages"] == before + len(held_back)
    while not cell.finish(new.id):
        cell.step()
    assert cell.answer(new.id).tokens == expected


def test_a_drafter_without_room_leaves_a_session_undrafted(target: Path) -> None:
    cell = LocalCell(target, ModelDrafter(engine_of(target, kv_tokens=RUN_AHEAD + 32)))
    answers = cell.run(_requests(GREEDY, "amusd"))
    assert [a.tokens for a in answers] == _plain(target, GREEDY)
    assert cell.drafter.counters["refused_sessions"] == 2
    assert _total(answers, "accepted") > 0


def test_neither_batch_nor_chunk_nor_k_moves_a_sampled_token(target: Path) -> None:
    """The seed alone decides: the same request alone, in a batch, and under another schedule."""
    expected = _plain(target, WARM)
    for k in (1, 2, 5, 9):
        for i, request in enumerate(_requests(WARM, "amusd", k)):
            cell = LocalCell(target, ModelDrafter(engine_of(target)), seed=k)
            assert cell.run([request])[0].tokens == expected[i]


def test_the_open_message_of_a_session_says_what_a_drafter_needs(target: Path) -> None:
    cell = LocalCell(target, NgramDrafter())
    request = _requests(WARM, "amusd", k=3)[1]
    cell.submit(request)
    cell.verifier_end.pump()
    cell.verifier.take(0)
    message = decode(cell.verifier_end.outbox[-1])
    plan, count = plan_of(request.speculation), len(request.prompt)
    assert message == Open(0, 1, request.prompt, request.sampling, plan, count)
