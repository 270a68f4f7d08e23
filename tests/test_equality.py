"""Every field of a request, under every schedule, drafter, depth and company, gives what plain decoding gives; and that
is what an implementation of the contract by its own words gives.

The design is pairwise: every two levels of any two factors meet in some cell.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from fields import EOS, VOCAB, decoded, write_model
from local_cell import LocalCell, engine_of
from paceline.actors.drafters import Drafter, ModelDrafter, NgramDrafter
from paceline.actors.grammar import Grammars, from_json_schema, from_regex
from paceline.actors.memory_link import Chaos, faithful
from paceline.actors.text import TextCodec, load_tokenizer
from paceline.actors.torch_engine import load_engine
from paceline.actors.values import Delta, Request, Sampling, Speculation, TokenLogprobs
from paceline.actors.verifier import VerifierSettings
from pairwise import Row, pairwise
from transformers import AutoModelForCausalLM

LENGTH = 24
CHAOS = {"drop": 0.05, "repeat": 0.1, "corrupt": 0.02}


@cache
def place() -> Path:
    """Where the models of this file lie, for as long as the process runs."""
    return Path(mkdtemp(prefix="paceline-equality-"))


@cache
def target() -> Path:
    return write_model(place() / "target")


@cache
def blurred(context: int = 128) -> Path:
    return write_model(place() / f"blurred{context}", blur=0.03, context=context)


@cache
def codec() -> TextCodec:
    return TextCodec.load(target())


@cache
def grammars() -> Grammars:
    return Grammars(load_tokenizer(target()), VOCAB, {EOS})


# The fields


@dataclass(frozen=True)
class Free:
    """What a request gives without the field: something to choose a stop or a bad word from."""

    tokens: tuple[int, ...]
    text: str


Use = Callable[[Request, Free], Request]


def constrain(**constraints: Any) -> Use:
    return lambda request, _: replace(request, constraints=replace(request.constraints, **constraints))


def sample(**sampling: Any) -> Use:
    return lambda request, _: replace(request, sampling=replace(request.sampling, **sampling))


def fields(**values: Any) -> Use:
    return lambda request, _: replace(request, **values)


def bad_words(request: Request, free: Free) -> Request:
    words = ((free.tokens[2],), free.tokens[4:6], free.tokens[7:10])
    return constrain(bad_words=words)(request, free)


def stop_string(request: Request, free: Free) -> Request:
    """Somewhere in the middle, over the ends of tokens; and one that would come later."""
    half = len(free.text) // 2
    return replace(request, stop=(free.text[half : half + 4], free.text[-3:]))


def stop_id(request: Request, free: Free) -> Request:
    return replace(request, stop_token_ids=(free.tokens[11],))


def late_stop(request: Request, free: Free) -> Request:
    """A stop string that is complete before min_tokens does not count."""
    stop = codec().piece(free.tokens[3]).strip("\ufffd") or free.text[2:4]
    return replace(constrain(min_tokens=9)(request, free), stop=(stop,), stop_token_ids=(free.tokens[5],))


JSON = from_json_schema('{"type": "array", "items": {"enum": ["quick", "brown fox", 17, true]}, "minItems": 3}')
WORDS = from_regex(r"([a-z]{2,9}( |, ))+[A-Z]\.")

FIELDS: dict[str, Use] = {
    "none": fields(),
    "cuts": sample(top_k=8, top_p=0.8, min_p=0.1),
    "logit bias": constrain(logit_bias=((40, 9.0), (41, -9.0), (98, 6.0), (283, -100.0))),
    "penalties": constrain(frequency_penalty=0.7, presence_penalty=0.4),
    "repetition": constrain(repetition_penalty=1.6),
    "min tokens": constrain(min_tokens=9, logit_bias=((EOS, 30.0),)),
    "bad words": bad_words,
    "json": constrain(grammar=JSON),
    "regex": constrain(grammar=WORDS),
    "stop string": stop_string,
    "include stop": lambda request, free: replace(stop_string(request, free), include_stop=True),
    "stop id": stop_id,
    "late stop": late_stop,
    "ignore eos": lambda request, free: replace(constrain(logit_bias=((EOS, 12.0),))(request, free), ignore_eos=True),
    "logprobs": fields(top_logprobs=3),
    "prompt logprobs": fields(top_logprobs=0, prompt_logprobs=2),
    "max k": lambda request, _: replace(request, speculation=replace(request.speculation, max_k=2)),
    "many": lambda request, free: replace(
        constrain(
            logit_bias=((98, 4.0),), frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=6, bad_words=((41,),)
        )(request, free),
        top_logprobs=2,
        include_stop=True,
        stop=("p", "e", "9"),
    ),
}


# The other factors


def trimmed() -> Drafter:
    """It can guess three of four tokens only."""
    head = tuple(id for id in range(VOCAB) if id % 4)
    engine = load_engine(str(blurred()), torch.device("cpu"), torch.float32, 8192, head=head)
    return ModelDrafter(engine, head=head, compile=grammars().matcher)


def model_drafter(context: int = 128) -> Drafter:
    return ModelDrafter(engine_of(blurred(context), 8192), compile=grammars().matcher)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "blurred": model_drafter,
    "trimmed": trimmed,
    # The answers begin within its context, and go on beyond it.
    "short context": lambda: model_drafter(44),
    "with lookup": model_drafter,
}
COMPANY: dict[str, dict[str, Any]] = {
    "alone": {},
    "others": {},
    "crowded": {"kv_tokens": 160, "max_sessions": 3, "pass_tokens": 12, "prefill_chunk": 5},
    "bad link": {},
}
FACTORS = {
    "field": tuple(FIELDS),
    "temperature": (0.0, 0.6),
    "schedule": ("sync", "pearl", "amusd", "saguaro", "swiftspec", "auto"),
    "k": (1, 3, 8),
    "drafter": tuple(DRAFTERS),
    "company": tuple(COMPANY),
}
DESIGN = pairwise(FACTORS)
TEXTS = (
    "The quick brown fox jumps over the lazy dog. It",
    "Stop here. STOP there! ### User: hello",
    "caf\u00e9 na\u00efve w\u00f6rld, and the lazy",
)


@dataclass(frozen=True)
class Said:
    """All that a client sees of an answer."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    usage: tuple[int, int]
    logprobs: tuple[TokenLogprobs, ...] = field(repr=False)
    prompt_logprobs: tuple[TokenLogprobs, ...] = field(repr=False)


def said(deltas: Sequence[Delta]) -> Said:
    finish = deltas[-1].finish
    assert finish is not None
    assert all(delta.finish is None for delta in deltas[:-1])
    return Said(
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        finish.reason,
        (finish.prompt_tokens, finish.completion_tokens),
        tuple(one for delta in deltas for one in delta.logprobs),
        tuple(one for delta in deltas for one in delta.prompt_logprobs),
    )


def equal(one: Said, other: Said) -> None:
    for name in ("tokens", "text", "reason", "usage"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("logprobs", "prompt_logprobs"):
        flat = [[(it.token, it.logprob), *it.top] for it in getattr(one, name)]
        expected = [[(it.token, it.logprob), *it.top] for it in getattr(other, name)]
        assert [[id for id, _ in row] for row in flat] == [[id for id, _ in row] for row in expected], name
        values = [value for row in flat for _, value in row]
        assert values == pytest.approx([value for row in expected for _, value in row], abs=1e-4), name


@cache
def plain(request: Request) -> Said:
    """What plain decoding gives to a request that is alone."""
    cell = LocalCell(target(), NgramDrafter(), speed=0.0)
    cell.run([replace(request, speculation=Speculation("plain"))])
    return said(cell.deltas[request.id])


def request_of(field: str, temperature: float, text: str, id: str) -> Request:
    """A request that uses a field, of its own seed."""
    sampling = Sampling(temperature, seed=2**63 + len(id))
    request = Request(id, codec().encode(text), sampling, LENGTH, ignore_eos=True)
    free = plain(request)
    return FIELDS[field](replace(request, ignore_eos=False), Free(free.tokens, free.text))


def requests_of(row: Row) -> list[Request]:
    """The cell's own request, asked three times of different texts, and what keeps it company."""
    own = [request_of(row["field"], row["temperature"], text, f"own{i}") for i, text in enumerate(TEXTS)]
    if row["company"] == "alone":
        chosen = own[:1]
    else:
        rng = random.Random(repr(row))
        others = [request_of(rng.choice(list(FIELDS)), rng.choice((0.0, 0.6)), TEXTS[0], f"other{i}") for i in range(2)]
        chosen = [*own, *others]
    return [with_schedule(request, row) for request in chosen]


def with_schedule(request: Request, row: Row) -> Request:
    speculation = Speculation(row["schedule"], row["k"], max_k=request.speculation.max_k)
    return replace(request, speculation=speculation)


def cell_of(row: Row, seed: int) -> LocalCell:
    crowded = dict(COMPANY[row["company"]])
    fault = Chaos(random.Random(seed), **CHAOS) if row["company"] == "bad link" else faithful
    engine = engine_of(target(), crowded.pop("kv_tokens"), 4) if crowded else None
    settings = VerifierSettings(**crowded, max_patience=0.2)
    cell = LocalCell(
        target(), DRAFTERS[row["drafter"]](), fault=fault, settings=settings, speed=5.0, seed=seed, engine=engine
    )
    if row["drafter"] == "with lookup":
        cell.add_drafter("lookup", NgramDrafter(), retrieval=True)
    return cell


def named(row: Row) -> str:
    return "-".join(str(level).replace(" ", "_") for level in row.values())


def cases() -> list[Any]:
    """Every cell; four of five are slow tests, to keep the fast ones fast."""
    return [
        pytest.param(row, id=named(row), marks=[pytest.mark.slow] if number % 5 else [])
        for number, row in enumerate(DESIGN)
    ]


@pytest.mark.parametrize("row", cases())
def test_every_field_holds_at_every_position_of_every_path(row: Row) -> None:
    requests = requests_of(row)
    drafted = accepted = 0
    for seed in range(4):
        cell = cell_of(row, seed)
        answers = cell.run(requests)
        for request in requests:
            equal(said(cell.deltas[request.id]), plain(replace(request, speculation=Speculation())))
        cell.settle()
        drafted += sum(answer.stats.drafted for answer in answers)
        accepted += sum(answer.stats.accepted for answer in answers)
        if 0 < accepted < drafted:
            break
    assert accepted > 0, "no draft was accepted"
    assert accepted < drafted, "no draft was rejected"


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("field", FIELDS)
def test_plain_decoding_does_what_the_fields_say(field: str, temperature: float) -> None:
    request = request_of(field, temperature, TEXTS[0], "own")
    found = plain(request)
    if request.stop:
        check_stop(request, found)
        return
    tokens, logprobs, reason = decoded(target(), request, grammars())
    assert list(found.tokens) == tokens
    assert found.text == codec().decode(tokens[:-1] if tokens[-1] in request.stop_token_ids else tokens)
    if request.top_logprobs is not None:
        assert [one.logprob for one in found.logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert found.reason == reason


def check_stop(request: Request, found: Said) -> None:
    """A request with stop strings gives what it would without them, up to the first one that counts."""
    whole = plain(replace(request, id="whole", stop=()))
    decode = codec().decode
    early = decode(whole.tokens[: request.constraints.min_tokens])
    ends = [
        count
        for count in range(1 + request.constraints.min_tokens, len(whole.tokens) + 1)
        if any(stop in decode(whole.tokens[:count])[len(early) :] for stop in request.stop)
    ]
    if not ends:
        assert found == whole
        return
    assert found.reason == "stop"
    assert found.tokens == whole.tokens[: ends[0]]
    text = decode(found.tokens)
    start, stop = min((at, stop) for stop in request.stop if (at := text.find(stop, len(early))) >= 0)
    assert found.text == text[: start + len(stop) * request.include_stop]


def test_each_field_changes_what_is_said() -> None:
    """Or these tests would prove nothing about it."""
    silent = {"none", "logprobs", "prompt logprobs", "max k"}
    free = plain(request_of("none", 0.6, TEXTS[0], "own"))
    for name in FIELDS.keys() - silent:
        assert plain(request_of(name, 0.6, TEXTS[0], "own")) != free, name


def test_the_prompts_logprobs_are_those_of_the_model() -> None:
    request = request_of("prompt logprobs", 0.0, TEXTS[0], "own")
    found = plain(request).prompt_logprobs
    model: Any = AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32)
    shares = model(torch.tensor([request.prompt])).logits[0].log_softmax(-1).detach()
    assert [one.token for one in found] == list(request.prompt[1:])
    for row, one in zip(shares, found, strict=False):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [id for id, _ in one.top] == row.topk(2).indices.tolist()
