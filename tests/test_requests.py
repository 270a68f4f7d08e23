"""Checking requests: what is accepted and what it becomes, and for all else the field that is wrong."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.actors.grammar import from_regex
from paceline.actors.schedules import MAX_BUDGET, MAX_FANOUT, MAX_K, MAX_WIDTH, SCHEDULES
from paceline.actors.values import FREE, Constraints, Request, Sampling, Speculation
from paceline.cluster.requests import SCHEDULE_NAMES, Invalid, check, check_options, choices, derived_seed
from paceline.v1 import generation_pb2 as pb
from scripted import MODEL, ByteCodec

NAN = math.nan


def checked(proto: pb.GenerateRequest, codec: ByteCodec | None = None, **model: int) -> Request:
    return check(proto, codec or ByteCodec(), dataclasses.replace(MODEL, **model), lambda: "drawn", lambda: 7)


def request(**fields) -> pb.GenerateRequest:
    """A request of these fields; with text "hi" unless they bring an input."""
    given = {} if {"text", "chat", "tokens", "nothing"} & set(fields) else {"text": "hi"}
    fields.pop("nothing", None)
    return pb.GenerateRequest(**(given | fields))


def test_a_request_that_names_nothing_gets_the_defaults():
    expected = Request("drawn", (104, 105), Sampling(seed=7), 62, (), (), False, Speculation("auto", 4))
    assert checked(request()) == expected
    assert checked(request(), context_length=10_000).max_tokens == MODEL.default_max_tokens


def test_every_field_arrives():
    sampling = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 2**64 - 1}
    proto = request(
        tokens={"ids": [0, 299]},
        sampling=sampling,
        max_tokens=62,
        stop=["a", "b" * 256],
        stop_token_ids=[0, 299],
        ignore_eos=True,
        speculation={"schedule": "sync", "k": MAX_K, "fanout": MAX_FANOUT, "width": MAX_WIDTH, "budget": MAX_BUDGET},
        request_id="a.B_9:-",
    )
    expected = Request(
        "a.B_9:-",
        (0, 299),
        Sampling(0.7, 5, 0.9, 0.1, 2**64 - 1),
        62,
        ("a", "b" * 256),
        (0, 299),
        True,
        Speculation("sync", MAX_K, MAX_FANOUT, MAX_WIDTH, MAX_BUDGET),
    )
    assert checked(proto) == expected


def test_zero_is_a_value_of_its_own():
    sampling = checked(request(sampling={"temperature": 0, "top_k": 0, "min_p": 0, "seed": 0})).sampling
    assert sampling == Sampling(0.0, 0, 1.0, 0.0, 0)
    assert math.copysign(1, checked(request(sampling={"temperature": -0.0})).sampling.temperature) == 1


def test_a_chat_goes_through_the_template():
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "x"}]
    assert bytes(checked(request(chat={"messages": messages})).prompt) == b"<system><user>x"


def test_one_speculation_field_leaves_the_other_at_the_server_default():
    assert checked(request(speculation={"k": 9})).speculation == Speculation("auto", 9)
    assert checked(request(speculation={"schedule": "plain"})).speculation == Speculation("plain", 4)
    assert checked(request(speculation={"fanout": 1, "width": 2, "budget": 3})).speculation == Speculation(
        "auto", 4, 1, 2, 3
    )


@pytest.mark.parametrize("schedule", [*SCHEDULES, "auto"])
def test_every_schedule_can_be_named(schedule):
    assert checked(request(speculation={"schedule": schedule})).speculation.schedule == schedule


@pytest.mark.parametrize("length", [1, 62, 63])
def test_a_prompt_that_leaves_room_for_a_token_is_accepted(length):
    assert checked(request(text="x" * length)).max_tokens == 64 - length
    assert checked(request(text="x" * length, max_tokens=64 - length)).max_tokens == 64 - length


def user(content: str = "hi") -> dict[str, str]:
    return {"role": "user", "content": content}


BAD = [
    ({"nothing": 1}, "input", "set exactly one of text, chat, tokens"),
    ({"text": ""}, "text", "empty"),
    ({"text": "x" * 64}, "text", "64 tokens; the context of 64 takes at most 63"),
    ({"text": "x" * 10_000}, "text", "10000 tokens"),
    ({"text": "x" * 12_801}, "text", "12801 characters are more than 64 tokens can hold (12800)"),
    ({"tokens": {}}, "tokens.ids", "empty"),
    ({"tokens": {"ids": [1, 300]}}, "tokens.ids[1]", "below the vocabulary's size, 300, got 300"),
    ({"tokens": {"ids": [2**32 - 1]}}, "tokens.ids[0]", "got 4294967295"),
    ({"tokens": {"ids": [1] * 64}}, "tokens", "takes at most 63"),
    ({"chat": {}}, "chat.messages", "empty"),
    ({"chat": {"messages": [user(), {"content": "x"}]}}, "chat.messages[1].role", "system, user, assistant, got ''"),
    ({"chat": {"messages": [user(), user(), {"role": "tool"}]}}, "chat.messages[2].role", "got 'tool'"),
    ({"chat": {"messages": [user("")]}}, "chat.messages[0].content", "empty"),
    ({"chat": {"messages": [{"role": "assistant", "content": "x"}]}}, "chat.messages", "must not begin with"),
    ({"chat": {"messages": [user("x" * 64)]}}, "chat", "70 tokens"),
    ({"sampling": {"temperature": NAN}}, "sampling.temperature", "0 (greedy) or from 0.000001 to 100, got nan"),
    ({"sampling": {"temperature": math.inf}}, "sampling.temperature", "got inf"),
    ({"sampling": {"temperature": -math.inf}}, "sampling.temperature", "got -inf"),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature", "got -0.1"),
    ({"sampling": {"temperature": 100.1}}, "sampling.temperature", "got 100.1"),
    ({"sampling": {"temperature": 1e-40}}, "sampling.temperature", "got 1e-40"),
    ({"sampling": {"top_p": 0}}, "sampling.top_p", "above 0 and at most 1, got 0.0"),
    ({"sampling": {"top_p": 1.01}}, "sampling.top_p", "got 1.01"),
    ({"sampling": {"top_p": NAN}}, "sampling.top_p", "got nan"),
    ({"sampling": {"min_p": -0.01}}, "sampling.min_p", "from 0 to 1, got -0.01"),
    ({"sampling": {"min_p": 1.01}}, "sampling.min_p", "got 1.01"),
    ({"sampling": {"min_p": NAN}}, "sampling.min_p", "got nan"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 63}, "max_tokens", "from 1 to 62 after a prompt of 2 tokens in a context of 64, got 63"),
    ({"max_tokens": 2**32 - 1}, "max_tokens", "got 4294967295"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": ["x", ""]}, "stop[1]", "1 to 256 characters long, got 0"),
    ({"stop": ["x" * 257]}, "stop[0]", "got 257"),
    ({"stop_token_ids": [0, 300]}, "stop_token_ids[1]", "got 300"),
    ({"stop_token_ids": [0] * 257}, "stop_token_ids", "at most 256"),
    ({"speculation": {"schedule": "magic"}}, "speculation.schedule", f"{', '.join(SCHEDULES)}, auto, got 'magic'"),
    ({"speculation": {"schedule": ""}}, "speculation.schedule", "got ''"),
    ({"speculation": {"k": 0}}, "speculation.k", f"from 1 to {MAX_K}, got 0"),
    ({"speculation": {"k": MAX_K + 1}}, "speculation.k", f"got {MAX_K + 1}"),
    ({"speculation": {"fanout": 0}}, "speculation.fanout", f"from 1 to {MAX_FANOUT}, got 0; leave it out"),
    ({"speculation": {"fanout": MAX_FANOUT + 1}}, "speculation.fanout", f"got {MAX_FANOUT + 1}"),
    ({"speculation": {"width": 0}}, "speculation.width", f"from 1 to {MAX_WIDTH}, got 0"),
    ({"speculation": {"width": 2**32 - 1}}, "speculation.width", "got 4294967295"),
    ({"speculation": {"budget": 0}}, "speculation.budget", f"from 1 to {MAX_BUDGET}, got 0"),
    ({"speculation": {"budget": MAX_BUDGET + 1}}, "speculation.budget", f"got {MAX_BUDGET + 1}"),
    ({"speculation": {"max_k": 0}}, "speculation.max_k", f"from 1 to {MAX_K}, got 0"),
    ({"speculation": {"max_k": MAX_K + 1}}, "speculation.max_k", f"got {MAX_K + 1}"),
    ({"sampling": {"presence_penalty": 2.1}}, "sampling.presence_penalty", "from -2 to 2, got 2.1; 0 turns it off"),
    ({"sampling": {"presence_penalty": NAN}}, "sampling.presence_penalty", "got nan"),
    ({"sampling": {"frequency_penalty": -2.1}}, "sampling.frequency_penalty", "got -2.1"),
    ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty", "from 0.01 to 100, got 0.0; 1 turns it"),
    ({"sampling": {"repetition_penalty": math.inf}}, "sampling.repetition_penalty", "got inf"),
    ({"sampling": {"logit_bias": {3: 100.5}}}, "sampling.logit_bias[3]", "from -100 to 100, got 100.5"),
    ({"sampling": {"logit_bias": {3: NAN}}}, "sampling.logit_bias[3]", "got nan"),
    ({"sampling": {"logit_bias": {300: 1}}}, "sampling.logit_bias[300]", "below the vocabulary's size, 300"),
    ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "sampling.logit_bias", "at most 1024 ids"),
    ({"n": 0}, "n", "from 1 to 64, got 0"),
    ({"n": 65}, "n", "got 65"),
    ({"min_tokens": 63}, "min_tokens", "at most max_tokens, which is 62 here, got 63"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "which is 4 here, got 5"),
    ({"top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "from 0 to 20, got 21"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20, got 21"),
    ({"bad_words": ["x"] * 65}, "bad_words", "at most 64"),
    ({"bad_words": ["x", ""]}, "bad_words[1]", "1 to 128 characters and not only spaces, got ''"),
    ({"bad_words": ["x" * 129]}, "bad_words[0]", "1 to 128"),
    ({"bad_words": ["  "]}, "bad_words[0]", "not only spaces"),
    ({"response_format": {}}, "response_format", "set one of json_schema, regex, grammar"),
    ({"response_format": {"json_schema": ""}}, "response_format.json_schema", "1 to 65536 characters long, got 0"),
    ({"response_format": {"json_schema": "{"}}, "response_format.json_schema", "not JSON"),
    ({"response_format": {"json_schema": "x" * 65537}}, "response_format.json_schema", "got 65537"),
    ({"response_format": {"grammar": "root ::= ("}}, "response_format.grammar", "cannot be read"),
    ({"response_format": {"regex": "refused"}}, "response_format.regex", "it says refused"),
    ({"request_id": ""}, "request_id", "1 to 128"),
    ({"request_id": "x" * 129}, "request_id", "1 to 128"),
    ({"request_id": "a b"}, "request_id", "got 'a b'"),
    ({"request_id": "a\n"}, "request_id", "A-Z"),
    ({"request_id": "ä"}, "request_id", "A-Z"),
]


@pytest.mark.parametrize(
    ("fields", "field", "reason"), BAD, ids=[f"{field}-{index}" for index, (_, field, _) in enumerate(BAD)]
)
def test_what_is_wrong_is_named(fields, field, reason):
    with pytest.raises(Invalid) as caught:
        checked(request(**fields))
    assert caught.value.field == field
    assert reason in caught.value.reason
    assert str(caught.value) == f"{field}: {caught.value.reason}"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("fields", "field", "reason"), BAD)
def test_what_needs_no_model_is_found_without_one(fields, field, reason):
    proto = request(**fields)
    needs_model = field.startswith(("input", "text", "tokens", "chat", "stop_token_ids", "min_tokens", "max_tokens"))
    if (needs_model and "at least 1" not in reason) or "vocabulary" in reason or "says refused" in reason:
        check_options(proto)
        return
    with pytest.raises(Invalid) as caught:
        check_options(proto)
    assert caught.value.field == field


def test_what_the_tokenizer_makes_is_checked_too():
    with pytest.raises(Invalid, match=r"text: its token 122 is not in the target's vocabulary of 100"):
        checked(request(text="az"), vocab_size=100)


class NoTokenizer(ByteCodec):
    vocab_size = 0
    has_chat_template = has_grammars = False

    def encode(self, text: str) -> tuple[int, ...]:
        raise ValueError("the model has no tokenizer")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "hi"}, "text"),
        ({"chat": {"messages": [user()]}}, "chat"),
        ({"tokens": {"ids": [1]}, "stop": ["x"]}, "stop"),
        ({"tokens": {"ids": [1]}, "bad_words": ["x"]}, "bad_words"),
        ({"tokens": {"ids": [1]}, "response_format": {"regex": "x"}}, "response_format"),
    ],
)
def test_a_target_without_a_tokenizer_takes_token_ids_only(fields, field):
    with pytest.raises(Invalid) as caught:
        checked(request(**fields), NoTokenizer())
    assert caught.value.field == field
    assert checked(request(tokens={"ids": [1]}), NoTokenizer()).prompt == (1,)


def test_every_constraint_arrives():
    proto = request(
        n=3,
        sampling={
            "presence_penalty": -2,
            "frequency_penalty": 2,
            "repetition_penalty": 1.5,
            "logit_bias": {299: -100, 0: 100},
            "seed": 9,
        },
        min_tokens=4,
        include_stop=True,
        logprobs=True,
        top_logprobs=20,
        prompt_logprobs=0,
        bad_words=["x", " yz"],
        response_format={"regex": "[0-9]+"},
        speculation={"max_k": 2},
    )
    found = checked(proto)
    assert [bytes(word) for word in found.constraints.bad_words] == [b"x", b" x", b" yz"]
    assert replace(found.constraints, bad_words=()) == Constraints(
        ((0, 100.0), (299, -100.0)), 1.5, 2.0, -2.0, (), 4, (), from_regex("[0-9]+")
    )
    assert (found.include_stop, found.top_logprobs, found.prompt_logprobs) == (True, 20, 0)
    assert found.speculation.max_k == 2
    first, second, third = choices(proto, found)
    assert first == found
    assert [one.id for one in (first, second, third)] == ["drawn", "drawn#1", "drawn#2"]
    assert len({one.sampling.seed for one in (first, second, third)}) == 3
    assert (first.prompt_logprobs, second.prompt_logprobs) == (0, None)
    assert replace(second, id=first.id, sampling=first.sampling, prompt_logprobs=0) == first


def test_choices_do_not_depend_on_how_many_there_are():
    found = checked(request(n=5, sampling={"seed": 2**64 - 1}))
    assert choices(request(n=2), found) == choices(request(n=5), found)[:2]
    assert derived_seed(1, 2) != derived_seed(2, 1)


def test_what_is_not_asked_for_is_off():
    found = checked(request(logprobs=True))
    assert (found.top_logprobs, found.prompt_logprobs, found.constraints) == (0, None, FREE)
    assert checked(request()).top_logprobs is None


def unknown(number: int) -> bytes:
    """A field of a newer API, of length 1."""
    key = number << 3 | 2
    return bytes([key & 0x7F | 0x80, key >> 7, 1, 65])


@pytest.mark.parametrize(
    ("path", "where"), [((), "request"), (("sampling",), "sampling"), (("response_format",), "response_format")]
)
def test_a_field_of_a_newer_api_is_refused_not_ignored(path, where):
    proto = request()
    part = proto
    for name in path:
        part = getattr(part, name)
    part.MergeFromString(unknown(100))
    with pytest.raises(Invalid, match=f"{where}: its field number 100 is not known to this server") as caught:
        checked(proto)
    assert caught.value.field == where


def test_so_is_one_inside_a_list():
    proto = request(chat={"messages": [user(), user()]})
    proto.chat.messages[1].MergeFromString(unknown(77))
    with pytest.raises(Invalid, match=r"chat\.messages: its field number 77 is not known"):
        check_options(proto)


u32, numbers = st.integers(0, 2**32 - 1), st.floats()
some_id = st.one_of(st.integers(0, 310), u32)
texts = st.text(max_size=80)


def maybe(strategy):
    return st.one_of(st.none(), strategy)


protos = st.builds(
    pb.GenerateRequest,
    text=maybe(texts),
    sampling=st.builds(
        pb.SamplingOptions,
        temperature=maybe(numbers),
        top_k=maybe(u32),
        top_p=maybe(numbers),
        min_p=maybe(numbers),
        seed=maybe(st.integers(0, 2**64 - 1)),
        presence_penalty=maybe(numbers),
        frequency_penalty=maybe(numbers),
        repetition_penalty=maybe(numbers),
        logit_bias=st.dictionaries(some_id, numbers, max_size=4),
    ),
    n=maybe(st.integers(0, 70)),
    min_tokens=st.one_of(st.just(0), u32),
    include_stop=st.booleans(),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 22),
    prompt_logprobs=maybe(st.integers(0, 22)),
    bad_words=st.lists(texts, max_size=5),
    response_format=st.one_of(
        st.none(),
        st.just(pb.ResponseFormat()),
        st.builds(pb.ResponseFormat, json_schema=texts),
        st.builds(pb.ResponseFormat, regex=texts),
        st.builds(pb.ResponseFormat, grammar=texts),
    ),
    max_tokens=maybe(st.one_of(st.integers(0, 70), u32)),
    stop=st.lists(texts, max_size=20),
    stop_token_ids=st.lists(some_id, max_size=5),
    ignore_eos=st.booleans(),
    speculation=st.builds(
        pb.SpeculationOptions,
        schedule=maybe(st.one_of(st.sampled_from(sorted(SCHEDULES)), texts)),
        k=maybe(st.one_of(st.integers(0, 40), u32)),
        fanout=maybe(st.one_of(st.integers(0, 10), u32)),
        width=maybe(st.one_of(st.integers(0, 20), u32)),
        budget=maybe(st.one_of(st.integers(0, 70), u32)),
    ),
    request_id=maybe(texts),
)
chats = st.builds(
    pb.ChatInput,
    messages=st.lists(
        st.builds(
            pb.ChatMessage, role=st.one_of(st.sampled_from(["system", "user", "assistant"]), texts), content=texts
        ),
        max_size=4,
    ),
)
inputs = st.one_of(
    st.builds(lambda text: pb.GenerateRequest(text=text), texts),
    st.builds(lambda chat: pb.GenerateRequest(chat=chat), chats),
    st.builds(lambda ids: pb.GenerateRequest(tokens=pb.TokenInput(ids=ids)), st.lists(some_id, max_size=70)),
)


def fits(accepted: Request) -> bool:
    sampling = accepted.sampling
    return (
        1 <= len(accepted.prompt) <= 63
        and max(accepted.prompt) < 300
        and 1 <= accepted.max_tokens <= 64 - len(accepted.prompt)
        and 0 <= sampling.temperature <= 100
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
        and all(accepted.stop)
        and all(token < 300 for token in accepted.stop_token_ids)
        and all(token < 300 and abs(bias) <= 100 for token, bias in accepted.constraints.logit_bias)
        and all(word and max(word) < 300 for word in accepted.constraints.bad_words)
        and accepted.constraints.min_tokens <= accepted.max_tokens
        and accepted.constraints.repetition_penalty > 0
        and accepted.speculation.schedule in SCHEDULE_NAMES
        and 1 <= accepted.speculation.k <= MAX_K
        and 1 <= accepted.speculation.fanout <= MAX_FANOUT
        and 1 <= accepted.speculation.width <= MAX_WIDTH
        and 1 <= accepted.speculation.budget <= MAX_BUDGET
        and bool(accepted.id)
    )


@settings(max_examples=500, deadline=None)
@given(protos, inputs)
def test_any_request_is_fit_to_run_or_invalid(proto, prompt):
    proto.MergeFrom(prompt)
    try:
        assert fits(checked(proto))
    except Invalid as error:
        assert error.field


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_that_parse_are_fit_to_run_or_invalid(data):
    try:
        proto = pb.GenerateRequest.FromString(data)
    except Exception:
        return
    try:
        assert fits(checked(proto))
    except Invalid as error:
        assert error.field


@settings(max_examples=200, deadline=None)
@given(inputs, st.data())
def test_any_prompt_with_options_in_range_is_judged_by_the_prompt_alone(proto, data):
    proto.sampling.temperature = data.draw(st.floats(1e-6, 100))
    proto.sampling.top_p = data.draw(st.floats(0, 1, exclude_min=True))
    proto.speculation.k = data.draw(st.integers(1, MAX_K))
    try:
        assert fits(checked(proto))
    except Invalid as error:
        assert error.field.split(".")[0] in ("text", "chat", "tokens", "input")
