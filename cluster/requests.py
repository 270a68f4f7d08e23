"""From the API's GenerateRequest to a Request that is checked completely: all that is wrong with it is found here.

Nothing here knows gRPC; every refusal names the field by its path in the proto, the accepted range, and the cure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from paceline.actors.schedules import AUTO, MAX_BUDGET, MAX_FANOUT, MAX_K, MAX_WIDTH, SCHEDULES
from paceline.actors.values import Request, Sampling, Speculation
from paceline.cluster.backend import ModelInfo
from paceline.v1 import generation_pb2 as pb

DEFAULT_MAX_TOKENS = 256
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS = 16, 256, 256
ROLES = ("system", "user", "assistant")
SCHEDULE_NAMES = (*SCHEDULES, AUTO)
# Logits divided by less than this may overflow float32.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SHOWN = 60


class Codec(Protocol):
    """The part of a tokenizer that a request needs."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that stands for text; 0 where there is no tokenizer."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of plain text."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The ids of a conversation, ready for the assistant's answer.  ValueError where the template refuses it."""
        ...


class Invalid(ValueError):
    """The request is wrong.  field: the dotted path, in the proto, of what is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


def check(
    proto: pb.GenerateRequest,
    codec: Codec,
    model: ModelInfo,
    new_id: Callable[[], str],
    new_seed: Callable[[], int],
) -> Request:
    """The request in `proto`.  `new_id` and `new_seed` are asked where it names none.  Raises Invalid, nothing else."""
    # The prompt comes last: tokenizing is what takes time.
    request_id = _request_id(proto, new_id)
    sampling = _sampling(proto.sampling, new_seed)
    stop = _stops(proto.stop)
    stop_token_ids = _stop_token_ids(proto.stop_token_ids, model.vocab_size)
    speculation = _speculation(proto.speculation, model.speculation)
    _asks_for_tokens(proto)
    if stop and not codec.vocab_size:
        raise Invalid("stop", "the target has no tokenizer, so there is no text to find it in; use stop_token_ids")
    prompt = _prompt(proto, codec, model)
    max_tokens = _max_tokens(proto, len(prompt), model.context_length)
    return Request(request_id, prompt, sampling, max_tokens, stop, stop_token_ids, proto.ignore_eos, speculation)


def check_options(proto: pb.GenerateRequest) -> None:
    """Raise Invalid for what can be found wrong without the model, so before one is started."""
    _request_id(proto, str)
    _sampling(proto.sampling, int)
    _stops(proto.stop)
    _speculation(proto.speculation, Speculation())
    _asks_for_tokens(proto)


def _show(value: str) -> str:
    """A client's own text in an error message, kept short: statuses travel in headers of limited size."""
    return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "…")


def _request_id(proto: pb.GenerateRequest, new_id: Callable[[], str]) -> str:
    if not proto.HasField("request_id"):
        return new_id()
    if not _REQUEST_ID.fullmatch(proto.request_id):
        raise Invalid(
            "request_id",
            f"must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -, got {_show(proto.request_id)}; "
            "leave it out to have one drawn",
        )
    return proto.request_id


def _sampling(options: pb.SamplingOptions, new_seed: Callable[[], int]) -> Sampling:
    default = Sampling()
    temperature = options.temperature if options.HasField("temperature") else default.temperature
    # Written so that NaN, which is in no range, fails too.
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
        raise Invalid(
            "sampling.temperature",
            f"must be 0 (greedy) or from {MIN_TEMPERATURE:f} to {MAX_TEMPERATURE:g}, got {temperature}",
        )
    top_p = options.top_p if options.HasField("top_p") else default.top_p
    if not 0 < top_p <= 1:
        raise Invalid("sampling.top_p", f"must be above 0 and at most 1, got {top_p}; 1 turns it off")
    min_p = options.min_p if options.HasField("min_p") else default.min_p
    if not 0 <= min_p <= 1:
        raise Invalid("sampling.min_p", f"must be from 0 to 1, got {min_p}; 0 turns it off")
    seed = options.seed if options.HasField("seed") else new_seed()
    return Sampling(abs(temperature), options.top_k, top_p, min_p, seed)


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise Invalid("stop", f"at most {MAX_STOPS} strings are allowed, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise Invalid(f"stop[{index}]", f"must be 1 to {MAX_STOP_LENGTH} characters long, got {len(stop)}")
    return tuple(stops)


def _stop_token_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_IDS:
        raise Invalid("stop_token_ids", f"at most {MAX_STOP_IDS} ids are allowed, got {len(ids)}")
    _in_vocabulary("stop_token_ids", ids, vocab_size)
    return tuple(ids)


def _in_vocabulary(field: str, ids: Sequence[int], vocab_size: int) -> None:
    for index, token in enumerate(ids):
        if token >= vocab_size:
            raise Invalid(f"{field}[{index}]", f"must be below the vocabulary's size, {vocab_size}, got {token}")


def _speculation(options: pb.SpeculationOptions, default: Speculation) -> Speculation:
    schedule = options.schedule if options.HasField("schedule") else default.schedule
    if schedule not in SCHEDULE_NAMES:
        raise Invalid("speculation.schedule", f"must be one of {', '.join(SCHEDULE_NAMES)}, got {_show(schedule)}")
    return Speculation(
        schedule,
        _number(options, "k", default.k, MAX_K, '; schedule "plain" turns drafting off'),
        _number(options, "fanout", default.fanout, MAX_FANOUT),
        _number(options, "width", default.width, MAX_WIDTH),
        _number(options, "budget", default.budget, MAX_BUDGET),
    )


def _number(
    options: pb.SpeculationOptions,
    name: Literal["k", "fanout", "width", "budget"],
    default: int,
    most: int,
    cure: str = "; leave it out for the server's default",
) -> int:
    number: int = getattr(options, name) if options.HasField(name) else default
    if not 1 <= number <= most:
        raise Invalid(f"speculation.{name}", f"must be from 1 to {most}, got {number}{cure}")
    return number


def _prompt(proto: pb.GenerateRequest, codec: Codec, model: ModelInfo) -> tuple[int, ...]:
    field = proto.WhichOneof("input")
    match field:
        case "text":
            prompt = _text(proto.text, codec)
        case "chat":
            prompt = _chat(proto.chat.messages, codec)
        case "tokens":
            prompt = tuple(proto.tokens.ids)
            _in_vocabulary("tokens.ids", prompt, model.vocab_size)
        case _:
            raise Invalid("input", "the prompt is missing; set exactly one of text, chat, tokens")
    if not prompt:
        raise Invalid("tokens.ids" if field == "tokens" else field, "the prompt is empty; at least one token is needed")
    if max(prompt) >= model.vocab_size:
        raise Invalid(field, f"its token {max(prompt)} is not in the target's vocabulary of {model.vocab_size}")
    if len(prompt) >= model.context_length:
        raise Invalid(
            field,
            f"the prompt has {len(prompt)} tokens; the context of {model.context_length} takes at most "
            f"{model.context_length - 1}, and one to generate; shorten it",
        )
    return prompt


def _text(text: str, codec: Codec) -> tuple[int, ...]:
    if not text:
        raise Invalid("text", "the prompt is empty; give at least one character")
    return _encoded("text", lambda: codec.encode(text))


def _chat(messages: Sequence[pb.ChatMessage], codec: Codec) -> tuple[int, ...]:
    if not codec.has_chat_template:
        raise Invalid("chat", "the target has no chat template; send the prompt as text (paceline generate --raw)")
    if not messages:
        raise Invalid("chat.messages", "the conversation is empty; at least one message is needed")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            reason = f"must be one of {', '.join(ROLES)}, got {_show(message.role)}"
            raise Invalid(f"chat.messages[{index}].role", reason)
        if message.role == "user" and not message.content:
            raise Invalid(f"chat.messages[{index}].content", "a user's message is empty; leave it out")
    pairs = [{"role": message.role, "content": message.content} for message in messages]
    return _encoded("chat.messages", lambda: codec.encode_chat(pairs))


def _encoded(field: str, encode: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return encode()
    except ValueError as error:
        raise Invalid(field, str(error)) from error


def _asks_for_tokens(proto: pb.GenerateRequest) -> None:
    if proto.HasField("max_tokens") and proto.max_tokens == 0:
        raise Invalid("max_tokens", "must be at least 1; leave it out for the default")


def _max_tokens(proto: pb.GenerateRequest, prompt: int, context: int) -> int:
    room = context - prompt
    if not proto.HasField("max_tokens"):
        return min(DEFAULT_MAX_TOKENS, room)
    if proto.max_tokens > room:
        raise Invalid(
            "max_tokens",
            f"must be from 1 to {room} after a prompt of {prompt} tokens in a context of {context}, "
            f"got {proto.max_tokens}",
        )
    return proto.max_tokens
