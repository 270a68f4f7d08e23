"""Many sessions, small budgets, hardly any blocks: everybody is served, and nobody's tokens change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import table_models as tables
import torch
from conftest import TableModel
from local_cell import Answer, LocalCell, engine_of
from paceline.actors.blocks import block_keys
from paceline.actors.drafters import Drafter, ModelDrafter, NgramDrafter
from paceline.actors.values import Request, Sampling, Speculation
from paceline.actors.verifier import Cancel, VerifierSettings
from tiny_models import VOCAB as TINY_VOCAB
from tiny_models import tiny_model

VOCAB = 24
BLOCK = 4
GREEDY, WARM = Sampling(), Sampling(temperature=0.9, seed=7)


TABLE = tables.random_table(VOCAB, seed=1, spread=2.0)
"""A random chain."""
TABLE[:, tables.EOS] = -1e4


@pytest.fixture
def target(table_model: TableModel) -> Path:
    return table_model(TABLE)


@pytest.fixture(scope="module")
def attentive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose every logit hangs on the whole cache."""
    directory = tmp_path_factory.mktemp("attentive")
    tiny_model("llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def blurred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with noise on it: right some of the time."""
    directory = tmp_path_factory.mktemp("blurred")
    model = tiny_model("llama")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


class Watched(LocalCell):
    """A cell of few blocks that notes who took part in each pass, and with how many tokens."""

    def __init__(self, target: Path, drafter: Drafter, kv_tokens: int, seed: int = 0, **settings: int | float) -> None:
        self.passes: list[dict[str, int]] = []
        # Nobody waits for a draft, so whoever is not in a pass was left out of it.
        chosen = VerifierSettings(**{"max_patience": 0.0, **settings})  # type: ignore[arg-type]
        super().__init__(target, drafter, settings=chosen, seed=seed, engine=engine_of(target, kv_tokens, BLOCK))
        run = self.verifier._pass

        def noted(work: list) -> None:  # type: ignore[type-arg]
            self.passes.append({item.session.request.id: len(item.feed().tokens) for item in work})
            run(work)

        self.verifier._pass = noted  # type: ignore[method-assign]

    @property
    def counters(self) -> Counter[str]:
        return self.verifier.counters

    def longest_gap(self, id: str) -> int:
        """The most passes that a request which ran was left out of in a row."""
        own = [number for number, members in enumerate(self.passes) if id in members]
        return max((after - before for before, after in pairwise(own)), default=0)


def some_requests(
    count: int, vocab: int = VOCAB, sampling: Sampling = GREEDY, schedule: str = "amusd", seed: int = 0, **more: object
) -> list[Request]:
    """Prompts of 1 to 18 tokens, every other one beginning like others do; answers of 10 to 25."""
    rng = random.Random(seed)
    common = [rng.randrange(3, vocab) for _ in range(9)]
    requests = []
    for i in range(count):
        own = [rng.randrange(3, vocab) for _ in range(rng.randint(1, 9 if i % 2 else 18))]
        drawn = Sampling(sampling.temperature, seed=sampling.seed + i)
        prompt = tuple(common + own if i % 2 else own)
        speculation = Speculation(schedule, 4)
        requests.append(
            Request(f"r{i}", prompt, drawn, rng.randint(10, 25), ignore_eos=True, speculation=speculation, **more)  # type: ignore[arg-type]
        )
    return requests


def alone(target: Path, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """What each gets from plain decoding, with nothing beside it or before it."""
    cell, answers = LocalCell(target, NgramDrafter(), speed=0.0), []
    for i, request in enumerate(requests):
        # A tenant of its own finds nothing cached.
        answers += cell.run([replace(request, speculation=Speculation("plain"), tenant=str(i))])
    return tokens(answers)


def by_table(requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """The same for a table, greedy."""
    follower: list[int] = TABLE.argmax(-1).tolist()
    texts = [[r.prompt[-1]] for r in requests]
    for text, request in zip(texts, requests, strict=True):
        for _ in range(request.max_tokens):
            text.append(follower[text[-1]])
    return [tuple(text[1:]) for text in texts]


def tokens(answers: Iterable[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_with_hardly_any_blocks_all_finish_with_the_tokens_they_would_have_alone(
    sampling: Sampling, attentive: Path, blurred: Path
) -> None:
    requests = some_requests(9, TINY_VOCAB, sampling)
    drafter = ModelDrafter(engine_of(blurred, 4096))
    cell = Watched(attentive, drafter, 48, max_sessions=6, pass_tokens=14, prefill_chunk=5)
    cell.speed = 1.0
    answers = cell.run(requests)
    assert tokens(answers) == alone(attentive, requests)
    cell.settle()
    assert cell.counters["preemptions"] >= 3
    assert cell.counters["prefix_hits"] >= 3
    assert cell.counters["spared_nodes"] > 0
    assert 0 < sum(a.stats.accepted for a in answers) < sum(a.stats.drafted for a in answers)
    assert all(sum(members.values()) <= 14 for members in cell.passes)


def test_nobody_who_runs_is_left_out_for_long(target: Path) -> None:
    """More sessions than a pass has tokens: they take turns, whatever they want to verify."""
    requests = [Request(f"r{i}", (i + 1,), GREEDY, 16, speculation=Speculation("amusd", 4)) for i in range(20)]
    cell = Watched(target, ModelDrafter(engine_of(target, 8192)), 512, max_sessions=20, pass_tokens=6)
    answers = cell.run(requests)
    assert tokens(answers) == by_table(requests)
    assert max(cell.longest_gap(r.id) for r in requests) == 4, "20 sessions, 6 tokens: every fourth pass"
    assert cell.counters["preemptions"] == 0


def test_a_long_prompt_holds_nobody_up_and_gets_on(target: Path) -> None:
    chatting = [Request(f"chat{i}", (i + 1,), GREEDY, 60, speculation=Speculation("plain")) for i in range(3)]
    long = Request("long", tuple(1 + i % 20 for i in range(200)), GREEDY, 3, speculation=Speculation("plain"))
    cell = Watched(target, NgramDrafter(), 512, pass_tokens=64, prefill_chunk=8)
    answers = cell.run([*chatting, long])
    assert tokens(answers) == by_table([*chatting, long])
    reading = [members for members in cell.passes if members.get("long", 1) > 1]
    assert len(reading) == 200 / 8
    assert all(members["long"] <= 8 and len(members) == 4 for members in reading), "everybody is in every pass"
    assert max(cell.longest_gap(r.id) for r in chatting) == 1


def test_a_long_prompt_alone_takes_whole_passes(target: Path) -> None:
    long = Request("long", tuple(1 + i % 20 for i in range(200)), GREEDY, 2, speculation=Speculation("plain"))
    cell = Watched(target, NgramDrafter(), 512, pass_tokens=64, prefill_chunk=8)
    cell.run([long])
    assert [members["long"] for members in cell.passes] == [64, 64, 64, 8, 1]


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_first(target: Path) -> None:
    long = Request("long", tuple(1 + i % 20 for i in range(400)), GREEDY, 2, speculation=Speculation("plain"))
    short = Request("short", (1, 2, 3, 4, 5), GREEDY, 30, speculation=Speculation("plain"))
    cell = Watched(target, NgramDrafter(), 512, pass_tokens=32, prefill_chunk=8)
    cell.submit(long)
    cell.turn_verifier()
    cell.submit(short)
    while not cell.deltas["short"]:
        cell.turn_verifier()
    assert len(cell.passes) == 2
    while not cell.finish("long") or not cell.finish("short"):
        cell.turn_verifier()
    assert cell.longest_gap("short") == cell.longest_gap("long") == 1


def test_a_prompt_gets_on_beside_more_that_decode_than_a_pass_can_take(target: Path) -> None:
    chatting = [Request(f"chat{i}", (i + 1,), GREEDY, 16, speculation=Speculation("plain")) for i in range(20)]
    prompts = [Request(f"p{i}", tuple(range(1, 11 + i)), GREEDY, 2, speculation=Speculation("plain")) for i in range(3)]
    cell = Watched(target, NgramDrafter(), 512, max_sessions=23, pass_tokens=8, prefill_chunk=4)
    answers = cell.run([*chatting, *prompts])
    assert tokens(answers) == by_table([*chatting, *prompts])
    assert max(cell.longest_gap(r.id) for r in prompts) <= 3 + 4
    assert max(cell.longest_gap(r.id) for r in chatting) <= 4


def test_the_oldest_never_pauses_and_everybody_ends_in_turn(target: Path) -> None:
    """Four that each need nearly all of the blocks: one pauses, and nobody who came later overtakes it."""
    requests = [Request(f"r{i}", (i + 1,) * 9, GREEDY, 50, speculation=Speculation("amusd", 4)) for i in range(4)]
    cell = Watched(target, ModelDrafter(engine_of(target, 4096)), 64)
    ended: list[str] = []
    paused: list[str] = []
    pause = cell.verifier._pause

    def noted(session) -> None:  # type: ignore[no-untyped-def]
        paused.append(session.request.id)
        assert session is not next(iter(cell.verifier.sessions.values()))
        pause(session)

    cell.verifier._pause = noted  # type: ignore[method-assign]

    def watch(_: int) -> None:
        ended.extend(r.id for r in requests if r.id not in ended and cell.finish(r.id))

    answers = cell.run(requests, watch)
    watch(0)
    assert tokens(answers) == by_table(requests)
    assert set(paused) == {"r1", "r2", "r3"}
    assert ended == ["r0", "r1", "r2", "r3"]
    cell.settle()


def test_guesses_go_before_anybody_pauses(target: Path, table_model: TableModel) -> None:
    """There are blocks for every token, and not for all that is guessed, wrongly, below them."""
    long = Request("long", (1,) * 4, GREEDY, 40, speculation=Speculation("sync", 8))
    short = [Request(f"r{i}", (i + 2,) * 4, GREEDY, 4, speculation=Speculation("sync", 3)) for i in range(4)]
    cell = Watched(target, ModelDrafter(engine_of(table_model(tables.contrary(TABLE)))), 11 * BLOCK)
    cell.speed = 20.0
    answers = cell.run([long, *short])
    assert tokens(answers) == by_table([long, *short])
    assert cell.counters["preemptions"] == 0
    assert cell.counters["spared_nodes"] > 0


def test_an_admitted_request_takes_no_blocks_that_others_need_next(target: Path) -> None:
    """There is room for the second prompt, but not for its reading and the first one's next block."""
    first = Request("first", (1,) * 8, GREEDY, 40, speculation=Speculation("plain"))
    second = Request("second", (2,) * 20, GREEDY, 4, speculation=Speculation("plain"))
    cell = Watched(target, NgramDrafter(), 8 * BLOCK + 16)
    cell.submit(first)
    cell.turn_verifier()
    cell.submit(second)
    while not cell.finish("first"):
        cell.turn_verifier()
    while not cell.finish("second"):
        cell.turn_verifier()
    assert cell.counters["preemptions"] <= 1
    cell.settle()


def test_a_request_that_does_not_fit_alone_is_refused_and_one_that_just_does_is_served(target: Path) -> None:
    cell = Watched(target, ModelDrafter(engine_of(target)), 40)
    big, whole, bad = cell.run(
        [
            Request("big", (1,) * 10, GREEDY, 31),
            Request("whole", (1,) * 10, GREEDY, 30, speculation=Speculation("sync", 6)),
            Request("bad", (1, VOCAB), GREEDY, 4),
        ]
    )
    assert (big.finish.reason, big.finish.code) == ("error", "exhausted")
    assert "cannot hold 41 positions; ask for fewer tokens" in big.finish.error
    assert len(whole.tokens) == 30
    assert "outside the vocabulary" in bad.finish.error
    cell.settle()


# The prefix cache


def test_a_prompt_is_read_once_by_each_tenant(attentive: Path) -> None:
    prompt = tuple(3 + i % 50 for i in range(41))
    expected = alone(attentive, [Request("r", prompt, GREEDY, 6, ignore_eos=True)])[0]
    cell = Watched(attentive, NgramDrafter(), 1024)
    hits = []
    for number, tenant in enumerate(["a", "a", "b", "", "b", "a", ""]):
        before = cell.counters["cached_tokens"]
        request = Request(f"r{number}", prompt, GREEDY, 6, ignore_eos=True, tenant=tenant)
        assert cell.run([request])[0].tokens == expected
        hits.append(cell.counters["cached_tokens"] - before)
    assert hits == [0, 40, 0, 0, 40, 40, 40]
    assert cell.counters["prefix_hits"] == 4
    cell.settle()


def test_a_conversation_goes_on_from_its_last_answer(attentive: Path) -> None:
    first = Request("first", tuple(range(3, 13)), GREEDY, 15, ignore_eos=True)
    cell = Watched(attentive, ModelDrafter(engine_of(attentive)), 1024)
    said = cell.run([first])[0].tokens
    second = Request("second", (*first.prompt, *said, 5, 6, 7), GREEDY, 8, ignore_eos=True)
    assert tokens(cell.run([second])) == alone(attentive, [second])
    # The last token of an answer is never fed, so 24 positions were cached.
    assert cell.counters["cached_tokens"] == 24


def test_nothing_but_committed_tokens_is_ever_found_and_what_is_found_never_changes(
    attentive: Path, blurred: Path
) -> None:
    """Speculation leaves no trace in the cache: neither its tokens nor a bit of its keys and values."""
    requests = some_requests(5, TINY_VOCAB, seed=3)
    texts = [(*r.prompt, *said) for r, said in zip(requests, alone(attentive, requests), strict=True)]
    committed = {key for text in texts for key in block_keys(text, BLOCK, b"")}
    cell = Watched(attentive, ModelDrafter(engine_of(blurred)), 400, pass_tokens=30, prefill_chunk=6)
    pool, seen = cell.engine.pool, {}

    def watch(_: int) -> None:
        for key, block in pool._published.items():
            assert key in committed, "a block of tokens that were never committed can be found"
            rows = [plane[:, block * BLOCK : (block + 1) * BLOCK] for plane in cell.engine._cache.pools]
            before = seen.setdefault((key, block), [plane.clone() for plane in rows])
            assert all(old.equal(new) for old, new in zip(before, rows, strict=True))

    answers = cell.run(requests, watch)
    assert sum(a.stats.drafted - a.stats.accepted for a in answers) > 10, "wrong guesses were verified"
    assert len(seen) > 20


def test_what_lies_behind_a_stop_is_not_kept(attentive: Path) -> None:
    request = Request("r", tuple(range(3, 10)), GREEDY, 20, ignore_eos=True)
    said = alone(attentive, [request])[0]
    end = said.index(said[6]) + 1
    stopped = Request(
        "s", request.prompt, GREEDY, 20, stop_token_ids=(said[6],), ignore_eos=True, speculation=Speculation("sync", 8)
    )
    cell = Watched(attentive, ModelDrafter(engine_of(attentive)), 400, max_patience=1.0)
    cell.speed = 20.0
    assert cell.run([stopped])[0].tokens == said[:end]
    whole = (*request.prompt, *said)
    assert set(cell.engine.pool._published) <= set(block_keys(whole[: len(request.prompt) + end], BLOCK, b""))


# Leaving


def leave_at_random(cell: LocalCell, rng: random.Random, moments: Counter[str]) -> None:
    """Sometimes cancel somebody, more often where that has been rare so far."""
    paused = list(cell.verifier._paused)
    waiting = [submit.request.id for submit in cell.verifier.waiting if submit.request.id not in paused]
    for moment, ids in (("running", list(cell.verifier.sessions)), ("paused", paused), ("waiting", waiting)):
        if ids and rng.random() < 0.2 / (1 + 10 * moments[moment]):
            moments[moment] += 1
            cell.verifier.inbox.put(Cancel(cell.verifier._submits[rng.choice(ids)]))


def test_a_cancel_at_any_moment_leaks_nothing_and_changes_nobody_else(attentive: Path, blurred: Path) -> None:
    moments: Counter[str] = Counter()
    requests = some_requests(8, TINY_VOCAB, seed=1)
    expected = alone(attentive, requests)
    for seed in range(2):
        rng = random.Random(seed)
        drafter = ModelDrafter(engine_of(blurred, 4096))
        cell = Watched(attentive, drafter, 48, seed, max_sessions=6, pass_tokens=12, prefill_chunk=4)
        cell.speed = 1.0
        answers = cell.run(requests, lambda _, cell=cell, rng=rng: leave_at_random(cell, rng, moments))  # type: ignore[misc]
        for answer, whole in zip(answers, expected, strict=True):
            assert answer.tokens == whole[: len(answer.tokens)]
            assert answer.finish.reason == "cancelled" or answer.tokens == whole
        cell.settle()
    assert all(moments[moment] for moment in ("running", "paused", "waiting")), moments


def test_a_broken_cache_fails_one_request_and_not_the_next(attentive: Path) -> None:
    prompt = tuple(range(3, 20))
    cell = Watched(attentive, NgramDrafter(), 400)
    request = Request("first", prompt, GREEDY, 5, ignore_eos=True)
    expected = cell.run([request])[0].tokens
    for plane in cell.engine._cache.pools:
        plane.fill_(torch.nan)
    second, third = (cell.run([replace(request, id=id)])[0] for id in ("second", "third"))
    assert (second.finish.reason, second.finish.code) == ("error", "bad_logits")
    assert third.tokens == expected
    cell.settle()


def test_choices_read_their_prompt_once(attentive: Path) -> None:
    prompt = tuple(3 + i % 50 for i in range(81))
    requests = [Request(f"r#{i}", prompt, Sampling(0.9, seed=i), 6, ignore_eos=True) for i in range(8)]
    expected = alone(attentive, requests)
    cell = Watched(attentive, NgramDrafter(), 2048, max_sessions=8, prefill_chunk=16)
    answers = cell.run(requests)
    assert tokens(answers) == expected
    read = {request.id: sum(members.get(request.id, 0) for members in cell.passes) for request in requests}
    assert read.pop("r#0") >= len(prompt)
    assert max(read.values()) < len(prompt) / 2
    cell.settle()


@pytest.mark.parametrize("leave", ["cancel", "pause"])
def test_who_lets_another_one_read_goes_on_without_it(leave: str, attentive: Path) -> None:
    prompt = tuple(3 + i % 50 for i in range(60))
    requests = [Request(f"r{i}", prompt, GREEDY, 5, ignore_eos=True) for i in range(3)]
    expected = alone(attentive, requests)
    cell = Watched(attentive, NgramDrafter(), 2048, pass_tokens=8)
    submits = [cell.submit(request) for request in requests]
    for _ in range(3):
        cell.turn_verifier()
    assert [session.follows for session in cell.verifier.sessions.values()] == [False, True, True]
    if leave == "cancel":
        cell.verifier.inbox.put(Cancel(submits[0]))
    else:
        cell.verifier._pause(cell.verifier.sessions["r0"])
    for _ in range(400):
        if not all(cell.finish(request.id) for request in requests):
            cell.step()
    answers = [cell.answer(request.id).tokens for request in requests]
    assert answers[1:] == expected[1:]
    assert answers[0] == (() if leave == "cancel" else expected[0])
    cell.settle()
