"""What the sampling contract promises beside the fields themselves: one request's fault is its own, the limits hold to
the last token, and a seed gives the same tokens alone, in company, among other choices and after a pause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import table_models as tables
import torch
from conftest import TableModel
from fields import EOS, VOCAB
from local_cell import LocalCell, engine_of
from paceline.actors import session as session_module
from paceline.actors.constraints import Shaper
from paceline.actors.drafters import ModelDrafter, NgramDrafter, Start
from paceline.actors.grammar import from_ebnf, from_regex
from paceline.actors.values import Constraints, Request, Sampling, Speculation
from paceline.actors.verifier import VerifierSettings
from paceline.cluster.requests import choices
from paceline.v1 import generation_pb2 as pb
from test_equality import TEXTS, blurred, codec, grammars, model_drafter, plain, said, target
from torch import Tensor

GREEDY = Sampling()
SCHEDULES = ("plain", "sync", "pearl", "amusd", "saguaro", "swiftspec")


def request(id: str, schedule: str, k: int = 4, **options: Any) -> Request:
    given = {"sampling": Sampling(0.6, seed=7), "max_tokens": 24, "ignore_eos": True, **options}
    return Request(id, codec().encode(TEXTS[0]), speculation=Speculation(schedule, k), **given)


def cell_with(**settings: Any) -> LocalCell:
    return LocalCell(target(), model_drafter(), settings=VerifierSettings(max_patience=0.5, **settings), speed=5.0)


# Faults


class Poisoned:
    """A target whose logits after a given token are not numbers."""

    def __init__(self, cell: LocalCell, token: int, value: float) -> None:
        self.hits = 0
        step = cell.engine.step

        def poisoned(feeds: Sequence[Any]) -> list[Tensor]:
            answers = step(feeds)
            for feed, rows in zip(feeds, answers, strict=True):
                for row, index in zip(rows, feed.rows, strict=True):
                    if feed.tokens[index] == token:
                        row[5] = value
                        self.hits += 1
            return answers

        cell.engine.step = poisoned  # type: ignore[method-assign]


def uneditable(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Constraints that raise after a given token."""

    class Raising(Shaper):
        def __call__(self, logits: Tensor, path: tuple[int, ...]) -> Tensor:
            if token in path or token in self._output:
                raise RuntimeError("a processor broke")
            return super().__call__(logits, path)

    monkeypatch.setattr(session_module, "shaper_of", Raising)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["NaN", "inf", "processor", "grammar"])
def test_a_fault_ends_its_own_request_where_plain_decoding_meets_it(
    kind: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = plain(request("free", "plain")).tokens
    neighbours = [request(f"neighbour{i}", schedule, sampling=Sampling(0.6, seed=90 + i)) for i in range(2)]
    expected = [plain(replace(one, speculation=Speculation())) for one in neighbours]
    ill = request("ill", schedule)
    fatal = next(token for token in free[6:] if not any(token in one.tokens for one in expected))
    before = free[: free.index(fatal) + 1]
    cell = cell_with()
    if kind in ("NaN", "inf"):
        Poisoned(cell, fatal, torch.nan if kind == "NaN" else torch.inf)
        code, reason = "bad_logits", "no finite maximum"
    elif kind == "processor":
        # Something has to be constrained for the processor to be there.
        ill = replace(ill, constraints=Constraints(logit_bias=((0, -1.0),)))
        uneditable(monkeypatch, fatal)
        code, reason = "internal", "a processor broke"
    else:
        digits = from_regex("[0-9]{9}")
        bad = tuple((token,) for token in range(VOCAB) if codec().piece(token).strip("0123456789") == "")
        ill = replace(ill, constraints=Constraints(grammar=digits, bad_words=bad))
        before = ()
        code, reason = "invalid", "response_format: no token is left"
    answers = cell.run([neighbours[0], ill, neighbours[1]])
    assert answers[1].finish.reason == "error"
    assert (answers[1].finish.code, reason in answers[1].finish.error) == (code, True)
    assert answers[1].tokens == before
    assert said(cell.deltas["ill"]).text == codec().decode(before), "what was held back is given out"
    for one, wanted in zip(neighbours, expected, strict=True):
        assert said(cell.deltas[one.id]) == wanted
    cell.settle()
    if schedule != "plain":
        assert sum(answer.stats.accepted for answer in answers) > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_lies_behind_the_end_is_no_fault(schedule: str) -> None:
    """Logits that are not numbers, in an accepted path, but after the stop."""
    free = plain(request("free", "plain")).tokens
    place = next(i for i in range(6, 20) if free[i + 1] not in free[: i + 1] and free[i] not in free[:i])
    one = request("r", schedule, 8, stop_token_ids=(free[place],))
    cell = LocalCell(target(), ModelDrafter(engine_of(target(), 8192)), speed=20.0)
    poison = Poisoned(cell, free[place], torch.nan)
    answer = cell.run([one])[0]
    assert (answer.finish.reason, answer.tokens) == ("stop", free[: place + 1])
    if schedule in ("sync", "saguaro"):
        assert poison.hits > 0, "the draft went on behind the end"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_grammar_that_fails_behind_an_accepted_path_takes_nothing_back(schedule: str) -> None:
    """The text is forced up to a place where the library gives up; all of it is delivered, by drafts or without."""
    grammar = from_ebnf('start: "quick brown" X\nX: /[^\\s\\S]/')
    one = request("r", schedule, 8, constraints=Constraints(grammar=grammar))
    cell = cell_with()
    cell.speed = 20.0
    answer = cell.run([one])[0]
    assert (answer.finish.reason, answer.finish.code) == ("error", "invalid")
    assert said(cell.deltas["r"]) == plain(replace(one, speculation=Speculation()))
    assert codec().decode(answer.tokens) == "quick brown"
    cell.settle()


def test_an_open_that_a_drafter_stumbles_over_leaves_it_alive() -> None:
    """Tokens and biases beyond its vocabulary, and a Shaper that raises."""
    drafter = ModelDrafter(engine_of(blurred(), 8192), compile=grammars().matcher)
    constraints = Constraints(((VOCAB + 3, 9.0),), frequency_penalty=0.5)
    session = drafter.open(Start((3, 4, VOCAB + 3, 5), GREEDY, 2, constraints))
    drafter.close(session)

    def raises(start: Start) -> None:
        raise IndexError("out of range")

    cell = LocalCell(target(), drafter, speed=5.0)
    drafter._shaper = raises  # type: ignore[method-assign, assignment]
    assert cell.run([request("r", "sync")])[0].finish.reason == "length"
    assert cell.drafter.counters["refused_sessions"] > 0
    cell.settle()


def test_a_grammar_that_cannot_be_compiled_is_refused_by_the_verifier_too() -> None:
    ill = request("ill", "sync", constraints=Constraints(grammar="no grammar at all"))
    well = request("well", "sync")
    cell = cell_with()
    answers = cell.run([ill, well])
    assert (answers[0].finish.reason, answers[0].finish.code) == ("error", "invalid")
    assert answers[0].finish.error.startswith("response_format: ")
    assert answers[1].finish.reason == "length"
    cell.settle()


def test_a_target_without_a_tokenizer_refuses_a_grammar(table_model: TableModel) -> None:
    cell = LocalCell(table_model(tables.random_table(24, seed=1)), NgramDrafter())
    one = Request("r", (3, 4), Sampling(), 5, constraints=Constraints(grammar=from_regex("a")))
    assert cell.run([one])[0].finish.code == "invalid"


# Limits


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("short", [0, 1])
def test_prompt_and_answer_may_fill_the_context_and_no_more(schedule: str, short: int) -> None:
    """The context is 128; the drafter's is 44."""
    prompt = tuple(range(3, 108))
    count = 128 - len(prompt) - short
    one = Request("r", prompt, Sampling(0.6, seed=3), count, ignore_eos=True, speculation=Speculation(schedule, 8))
    for drafter in (model_drafter(), model_drafter(44)):
        cell = LocalCell(target(), drafter, speed=8.0)
        answer = cell.run([one])[0]
        assert (len(answer.tokens), answer.finish.reason) == (count, "length")
        assert said(cell.deltas["r"]) == plain(replace(one, speculation=Speculation()))
        cell.settle()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("extra", [0, 1, 2, 5])
def test_max_tokens_and_a_stop_overlap(schedule: str, extra: int) -> None:
    """The stop string is complete `extra` tokens before the last one that may come."""
    free = plain(request("free", "plain"))
    text = codec().decode
    stop = next(s for n in range(9, 20) if (s := text(free.tokens[:n])[-3:]) and "\ufffd" not in s)
    taken = next(n for n in range(1, 25) if stop in text(free.tokens[:n]))
    one = request("r", schedule, 8, stop=(stop,), max_tokens=taken + extra)
    cell = LocalCell(target(), ModelDrafter(engine_of(target(), 8192)), speed=20.0)
    answer = cell.run([one])[0]
    assert (answer.tokens, answer.finish.reason) == (free.tokens[:taken], "stop")
    shorter = replace(one, id="s", max_tokens=taken - 1)
    assert cell.run([shorter])[0].finish.reason == "length"
    assert said(cell.deltas["s"]).text == text(free.tokens[: taken - 1]), "what was held back for the stop is given out"


# The same seed, the same tokens


def test_choices_are_what_each_of_them_is_alone() -> None:
    """And so they are under any schedule, in hardly any room, paused and read again."""
    proto, paused = pb.GenerateRequest(n=6), 0
    for schedule in SCHEDULES[1:]:
        wanted = choices(proto, request("r", schedule))
        engine = engine_of(target(), 100, 4)
        settings = VerifierSettings(max_sessions=6, pass_tokens=20, prefill_chunk=6, max_patience=0.0)
        cell = LocalCell(target(), model_drafter(), settings=settings, speed=4.0, engine=engine)
        answers = cell.run(wanted)
        assert len({answer.tokens for answer in answers}) == 6, "each has randomness of its own"
        for one in wanted:
            assert said(cell.deltas[one.id]) == plain(replace(one, speculation=Speculation())), schedule
        paused += cell.verifier.counters["preemptions"]
        cell.settle()
    assert paused > 3


def test_seeded_and_unseeded_requests_do_not_meet() -> None:
    one = request("r", "saguaro")
    strangers = [request(f"s{i}", "saguaro", sampling=Sampling(0.6, seed=1000 + i)) for i in range(4)]
    cell = cell_with()
    cell.run([*strangers[:2], one, *strangers[2:]])
    assert said(cell.deltas["r"]) == plain(replace(one, speculation=Speculation()))


@pytest.mark.parametrize("schedule", ["sync", "saguaro", "swiftspec"])
def test_a_draft_that_knows_the_constraints_is_right_more_often(schedule: str) -> None:
    """The drafter guesses what may come: without its knowledge of bias, penalties or grammar it would be wrong."""
    words = from_regex(r"([a-z]{2,9}( |, ))+[A-Z]\.")
    cases = {
        "bias": Constraints(logit_bias=tuple((token, 6.0) for token in range(60, 70))),
        "penalties": Constraints(logit_bias=((41, 12.0), (42, 11.0), (43, 10.0)), frequency_penalty=2.0),
        "grammar": Constraints(grammar=words),
    }
    for name, constraints in cases.items():
        one = request("r", schedule, constraints=constraints, sampling=Sampling(0.6, seed=4))
        shares = []
        for knows in (True, False):
            drafter = ModelDrafter(engine_of(blurred(), 8192), compile=grammars().matcher)
            if not knows:
                drafter._shaper = lambda start: None  # type: ignore[method-assign]
            cell = LocalCell(target(), drafter, speed=8.0, settings=VerifierSettings(max_patience=1.0))
            answer = cell.run([one])[0]
            assert said(cell.deltas["r"]).tokens == plain(replace(one, speculation=Speculation())).tokens
            shares.append(answer.stats.accepted / answer.stats.drafted)
        assert shares[0] > shares[1], (name, shares)


def test_eos_may_not_come_before_min_tokens_under_any_path() -> None:
    """EOS is what the target and the drafter like best, at every position."""
    liked = Constraints(logit_bias=((EOS, 40.0),), min_tokens=7)
    for schedule in SCHEDULES:
        cell = cell_with()
        answer = cell.run([request("r", schedule, 3, constraints=liked, ignore_eos=False)])[0]
        assert len(answer.tokens) == 8
        assert answer.tokens[-1] == EOS
        assert EOS not in answer.tokens[:-1]
