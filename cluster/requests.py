"""From the API's GenerateRequest to a Request that is checked completely: all that is wrong with it is found here.

Nothing here knows gRPC; every refusal names the field by its path in the proto, the accepted range, and the cure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from paceline.actors.grammar import GrammarError, from_ebnf, from_json_schema, from_regex
from paceline.actors.schedules import AUTO, MAX_BUDGET, MAX_FANOUT, MAX_K, MAX_WIDTH, SCHEDULES
from paceline.actors.values import Constraints, Request, Sampling, Speculation
from paceline.cluster.backend import ModelInfo
from paceline.v1 import generation_pb2 as pb

MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS = 16, 256, 256
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH, MAX_BIASES = 64, 128, 1024
MAX_CHOICES, MAX_LOGPROBS, MAX_FORMAT_LENGTH = 64, 20, 65536
ROLES = ("system", "user", "assistant")
SCHEDULE_NAMES = (*SCHEDULES, AUTO)
# Logits divided by less than this may overflow float32.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_PENALTY, MAX_BIAS = 2.0, 100.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SHOWN, _LONGEST_REASON = 60, 400


class Codec(Protocol):
    """The part of a tokenizer that a request needs."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that stands for text; 0 where there is no tokenizer."""
        ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of plain text."""
        ...

    def encode_part(self, text: str) -> tuple[int, ...]:
        """The ids of a piece of text, without special tokens."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The ids of a conversation, ready for the assistant's answer.  ValueError where the template refuses it."""
        ...

    @property
    def has_grammars(self) -> bool:
        """Whether texts can be held to a grammar."""
        ...

    def check_grammar(self, grammar: str) -> None:
        """ValueError where this grammar cannot be followed."""
        ...

    def piece(self, token: int) -> str:
        """The text of one token by itself."""
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
    """The request in `proto`.  `new_id` and `new_seed` are asked where it names none.  Raises Invalid, nothing else.

    It is the first one of `choices`.
    """
    # The prompt comes last: tokenizing is what takes time.
    _known_fields(proto)
    request_id = _request_id(proto, new_id)
    sampling = _sampling(proto.sampling, new_seed)
    stop = _stops(proto.stop)
    stop_token_ids = _stop_token_ids(proto.stop_token_ids, model.vocab_size)
    _choices(proto)
    top_logprobs, prompt_logprobs = _top_logprobs(proto), _prompt_logprobs(proto)
    speculation = _speculation(proto.speculation, model.speculation)
    _asks_for_tokens(proto)
    if stop and not codec.vocab_size:
        raise Invalid("stop", "the target has no tokenizer, so there is no text to find it in; use stop_token_ids")
    constraints = _constraints(proto, codec, model.vocab_size)
    prompt = _prompt(proto, codec, model)
    max_tokens = _max_tokens(proto, len(prompt), model)
    if proto.min_tokens > max_tokens:
        raise Invalid("min_tokens", f"must be at most max_tokens, which is {max_tokens} here, got {proto.min_tokens}")
    return Request(
        id=request_id,
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=proto.ignore_eos,
        speculation=speculation,
        constraints=constraints,
        include_stop=proto.include_stop,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def choices(proto: pb.GenerateRequest, request: Request) -> list[Request]:
    """The request of each choice that `proto` asks for, given what `check` has made of it.

    Each has a seed of its own, drawn from the request's; the first one has that itself, so that it is what n = 1 gives.
    """
    return [request, *(_choice(request, index) for index in range(1, _choices(proto)))]


def _choice(request: Request, index: int) -> Request:
    seed = derived_seed(request.sampling.seed, index)
    return replace(
        request,
        id=f"{request.id}#{index}",
        sampling=replace(request.sampling, seed=seed),
        prompt_logprobs=None,
    )


def derived_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request, unsigned 64 bits; that of choice 0 is the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def check_options(proto: pb.GenerateRequest) -> None:
    """Raise Invalid for what can be found wrong without the model, so before one is started."""
    _known_fields(proto)
    _request_id(proto, str)
    _sampling(proto.sampling, int)
    _penalties(proto.sampling)
    _logit_bias(proto.sampling)
    _stops(proto.stop)
    _bad_words(proto.bad_words)
    _choices(proto)
    _top_logprobs(proto)
    _prompt_logprobs(proto)
    if proto.HasField("response_format"):
        _grammar(proto.response_format)
    _speculation(proto.speculation, Speculation())
    _asks_for_tokens(proto)


def _known_fields(message: Message, path: str = "") -> None:
    """Refuse what a newer client may ask for: ignoring it would give it something else."""
    for field in UnknownFieldSet(message):  # type: ignore[attr-defined]
        raise Invalid(
            path.rstrip(".") or "request",
            f"its field number {field.field_number} is not known to this server; leave it out, or update the server",
        )
    for descriptor, value in message.ListFields():
        inner = [value] if isinstance(value, Message) else value if descriptor.message_type else []
        for one in inner:
            if isinstance(one, Message):
                _known_fields(one, f"{path}{descriptor.name}.")


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


def _between(field: str, value: float, least: float, most: float, off: float) -> float:
    # Written so that NaN, which is in no range, fails too.
    if not least <= value <= most:
        raise Invalid(field, f"must be from {least:g} to {most:g}, got {value}; {off:g} turns it off")
    return value


def _penalties(options: pb.SamplingOptions) -> tuple[float, float, float]:
    """Repetition, frequency and presence penalty."""
    repetition = options.repetition_penalty if options.HasField("repetition_penalty") else 1.0
    return (
        _between("sampling.repetition_penalty", repetition, MIN_REPETITION, MAX_REPETITION, 1),
        _between("sampling.frequency_penalty", options.frequency_penalty, -MAX_PENALTY, MAX_PENALTY, 0),
        _between("sampling.presence_penalty", options.presence_penalty, -MAX_PENALTY, MAX_PENALTY, 0),
    )


def _logit_bias(options: pb.SamplingOptions) -> tuple[tuple[int, float], ...]:
    if len(options.logit_bias) > MAX_BIASES:
        raise Invalid("sampling.logit_bias", f"at most {MAX_BIASES} ids are allowed, got {len(options.logit_bias)}")
    for token, bias in options.logit_bias.items():
        _between(f"sampling.logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS, 0)
    return tuple(sorted(options.logit_bias.items()))


def _bad_words(words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise Invalid("bad_words", f"at most {MAX_BAD_WORDS} words are allowed, got {len(words)}")
    for index, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_LENGTH or not word.strip():
            reason = f"must be 1 to {MAX_BAD_WORD_LENGTH} characters and not only spaces, got {_show(word)}"
            raise Invalid(f"bad_words[{index}]", reason)


def _choices(proto: pb.GenerateRequest) -> int:
    count = proto.n if proto.HasField("n") else 1
    if not 1 <= count <= MAX_CHOICES:
        raise Invalid("n", f"must be from 1 to {MAX_CHOICES}, got {count}")
    return count


def _top_logprobs(proto: pb.GenerateRequest) -> int | None:
    if proto.top_logprobs > MAX_LOGPROBS:
        raise Invalid("top_logprobs", f"must be from 0 to {MAX_LOGPROBS}, got {proto.top_logprobs}")
    if proto.top_logprobs and not proto.logprobs:
        raise Invalid("top_logprobs", "needs logprobs; set that to true, or leave this out")
    return proto.top_logprobs if proto.logprobs else None


def _prompt_logprobs(proto: pb.GenerateRequest) -> int | None:
    if proto.prompt_logprobs > MAX_LOGPROBS:
        raise Invalid("prompt_logprobs", f"must be from 0 to {MAX_LOGPROBS}, got {proto.prompt_logprobs}")
    return proto.prompt_logprobs if proto.HasField("prompt_logprobs") else None


def _grammar(form: pb.ResponseFormat) -> str:
    """The grammar that a response has to follow."""
    makers = {"json_schema": from_json_schema, "regex": from_regex, "grammar": from_ebnf}
    name = form.WhichOneof("form")
    if name is None:
        raise Invalid("response_format", "its form is missing; set one of json_schema, regex, grammar, or leave it out")
    text: str = getattr(form, name)
    if not 1 <= len(text) <= MAX_FORMAT_LENGTH:
        raise Invalid(f"response_format.{name}", f"must be 1 to {MAX_FORMAT_LENGTH} characters long, got {len(text)}")
    try:
        return makers[name](text)
    except GrammarError as error:
        raise Invalid(f"response_format.{name}", _cut(str(error))) from error


def _cut(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"


def _constraints(proto: pb.GenerateRequest, codec: Codec, vocab_size: int) -> Constraints:
    repetition, frequency, presence = _penalties(proto.sampling)
    bias = _logit_bias(proto.sampling)
    for token, _ in bias:
        if token >= vocab_size:
            raise Invalid(f"sampling.logit_bias[{token}]", f"ids must be below the vocabulary's size, {vocab_size}")
    words = tuple(_ids_of_words(proto.bad_words, codec, vocab_size))
    grammar = _checked_grammar(proto, codec)
    return Constraints(bias, repetition, frequency, presence, words, proto.min_tokens, grammar=grammar)


def _ids_of_words(words: Sequence[str], codec: Codec, vocab_size: int) -> Iterator[tuple[int, ...]]:
    """The ids of each word, at the beginning of a text and after a space."""
    _bad_words(words)
    if words and not codec.vocab_size:
        raise Invalid("bad_words", "the target has no tokenizer, so there are no words; use sampling.logit_bias")
    for index, word in enumerate(words):
        for text in dict.fromkeys((word, f" {word.lstrip()}")):
            ids = codec.encode_part(text)
            if not ids or max(ids) >= vocab_size:
                raise Invalid(f"bad_words[{index}]", f"{_show(word)} cannot be written in the target's vocabulary")
            yield ids


def _checked_grammar(proto: pb.GenerateRequest, codec: Codec) -> str:
    if not proto.HasField("response_format"):
        return ""
    if not codec.has_grammars:
        raise Invalid("response_format", "the target's tokenizer cannot follow grammars; leave it out")
    grammar = _grammar(proto.response_format)
    try:
        codec.check_grammar(grammar)
    except ValueError as error:
        name = proto.response_format.WhichOneof("form")
        raise Invalid(f"response_format.{name}", _cut(str(error))) from error
    return grammar


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
        _number(options, "max_k", 0, MAX_K, "; leave it out for no bound") if options.HasField("max_k") else None,
    )


def _number(
    options: pb.SpeculationOptions,
    name: Literal["k", "fanout", "width", "budget", "max_k"],
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
            prompt = _text(proto.text, codec, model.context_length)
        case "chat":
            prompt = _chat(proto.chat.messages, codec, model.context_length)
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


def _text(text: str, codec: Codec, context: int) -> tuple[int, ...]:
    if not text:
        raise Invalid("text", "the prompt is empty; give at least one character")
    _not_too_long("text", len(text), codec, context)
    return _encoded("text", lambda: codec.encode(text))


def _chat(messages: Sequence[pb.ChatMessage], codec: Codec, context: int) -> tuple[int, ...]:
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
    _not_too_long("chat.messages", sum(len(message.content) for message in messages), codec, context)
    pairs = [{"role": message.role, "content": message.content} for message in messages]
    return _encoded("chat.messages", lambda: codec.encode_chat(pairs))


def _not_too_long(field: str, characters: int, codec: Codec, context: int) -> None:
    """Refuse what cannot fit before it is tokenized, which may take seconds that others wait for."""
    most = context * codec.longest_token
    if characters > most:
        raise Invalid(field, f"{characters} characters are more than {context} tokens can hold ({most}); shorten it")


def _encoded(field: str, encode: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return encode()
    except ValueError as error:
        raise Invalid(field, str(error)) from error


def _asks_for_tokens(proto: pb.GenerateRequest) -> None:
    if proto.HasField("max_tokens") and proto.max_tokens == 0:
        raise Invalid("max_tokens", "must be at least 1; leave it out for the default")


def _max_tokens(proto: pb.GenerateRequest, prompt: int, model: ModelInfo) -> int:
    room = model.context_length - prompt
    if not proto.HasField("max_tokens"):
        return min(model.default_max_tokens, room)
    if proto.max_tokens > room:
        raise Invalid(
            "max_tokens",
            f"must be from 1 to {room} after a prompt of {prompt} tokens in a context of {model.context_length}, "
            f"got {proto.max_tokens}",
        )
    return proto.max_tokens
