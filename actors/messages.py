"""What verifier and drafter say to each other: four messages in a fixed little-endian layout, no pickle.

Every message begins with the header: magic "PL", version, kind, session (u32), epoch (u32), base_len (u32).
`epoch` tells lives of a session slot apart; `base_len` is the committed length that the message speaks of.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.actors.schedules import Plan
from paceline.actors.tree import ROOT, NewNode
from paceline.actors.values import FREE, Constraints, Sampling

VERSION = 3
_MAGIC = b"PL"
_HEADER = struct.Struct("<2sBBIII")
_OPEN = struct.Struct("<QdddII")
_CONSTRAINTS = struct.Struct("<dddIIIII")
_BIAS = struct.Struct("<Id")
_PLAN = struct.Struct("<16sHHHHHf")
_GROWTH = struct.Struct("<IBxHff")
_VERDICT = struct.Struct("<BxH")
_NODE = struct.Struct("<IIIf")


class _Kind(enum.IntEnum):
    OPEN = 1
    GROWTH = 2
    VERDICT = 3
    CLOSE = 4


_DONE, _LOST = 1, 2
_RESYNC = 1


class Malformed(ValueError):
    """Bytes that are no message of ours.  session and epoch are set where the header could be read."""

    def __init__(self, reason: str, session: int | None = None, epoch: int | None = None) -> None:
        super().__init__(reason)
        self.session, self.epoch = session, epoch


@dataclass(frozen=True, slots=True)
class Open:
    """Verifier to drafter: begin to draft after `tokens`, all the committed ones.  base_len is their number.

    prompt_len: how many of them are the prompt's.
    """

    session: int
    epoch: int
    tokens: tuple[int, ...]
    sampling: Sampling
    plan: Plan
    prompt_len: int = 0
    constraints: Constraints = FREE

    @property
    def base_len(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class GrowthMessage:
    """Drafter to verifier: new nodes below the prefix of base_len tokens.

    done: no more will come for this base.  lost: the drafter missed a verdict and asks to be opened anew.
    step: how long a draft step takes, in the mean, in seconds; 0 if there was none yet.
    age: seconds since the verdict (or Open) that made base_len had reached the drafter.
    """

    session: int
    epoch: int
    base_len: int
    version: int
    nodes: tuple[NewNode, ...] = ()
    done: bool = False
    lost: bool = False
    step: float = 0.0
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verifier to drafter: `tokens` were committed after the prefix of base_len tokens; go on by `plan`.

    resync: growth arrived here whose parent is unknown; push the whole tree again.
    """

    session: int
    epoch: int
    base_len: int
    tokens: tuple[int, ...]
    plan: Plan
    resync: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """Verifier to drafter: forget this session."""

    session: int
    epoch: int


Message = Open | GrowthMessage | Verdict | Close


def encode(message: Message) -> bytes:
    """The bytes of a message.  struct.error if a field does not fit its width."""
    match message:
        case Open():
            return _encode_open(message)
        case GrowthMessage():
            return _encode_growth(message)
        case Verdict(tokens=tokens):
            fixed = _VERDICT.pack(_RESYNC * message.resync, len(tokens)) + _pack_plan(message.plan)
            return _header(_Kind.VERDICT, message, message.base_len) + fixed + _pack_tokens(tokens)
        case Close():
            return _header(_Kind.CLOSE, message, 0)


def _header(kind: int, message: Message, base_len: int) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, kind, message.session, message.epoch, base_len)


def _pack_tokens(tokens: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _pack_plan(plan: Plan) -> bytes:
    name = plan.schedule.encode("ascii")
    return _PLAN.pack(name, plan.k, plan.fanout, plan.width, plan.budget, plan.fresh, plan.acceptance)


def _encode_open(message: Open) -> bytes:
    sampling = message.sampling
    fixed = _OPEN.pack(
        sampling.seed,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.top_k,
        message.prompt_len,
    )
    plan, constraints = _pack_plan(message.plan), _pack_constraints(message.constraints)
    return _header(_Kind.OPEN, message, message.base_len) + fixed + plan + constraints + _pack_tokens(message.tokens)


def _pack_constraints(constraints: Constraints) -> bytes:
    grammar = constraints.grammar.encode()
    # Each bad word stands behind its length.
    words = tuple(number for word in constraints.bad_words for number in (len(word), *word))
    fixed = _CONSTRAINTS.pack(
        constraints.repetition_penalty,
        constraints.frequency_penalty,
        constraints.presence_penalty,
        constraints.min_tokens,
        len(constraints.logit_bias),
        len(constraints.ends),
        len(words),
        len(grammar),
    )
    bias = b"".join(_BIAS.pack(token, value) for token, value in constraints.logit_bias)
    return fixed + bias + _pack_tokens((*constraints.ends, *words)) + grammar


def _encode_growth(message: GrowthMessage) -> bytes:
    flags = _DONE * message.done | _LOST * message.lost
    nodes = b"".join(_NODE.pack(*node) for node in message.nodes)
    body = _GROWTH.pack(message.version, flags, len(message.nodes), message.step, message.age) + nodes
    return _header(_Kind.GROWTH, message, message.base_len) + body


def decode(data: bytes) -> Message:
    """The message in `data`.  Raises Malformed, and nothing else, for any other bytes."""
    if len(data) < _HEADER.size:
        raise Malformed(f"{len(data)} bytes are shorter than the header")
    magic, version, kind, session, epoch, base_len = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise Malformed(f"not a message of version {VERSION}: it begins with {data[:3]!r}")
    return _Body(data, session, epoch, base_len).read(kind)


class _Body:
    """The part of a message behind its header."""

    def __init__(self, data: bytes, session: int, epoch: int, base_len: int) -> None:
        self.data, self.session, self.epoch, self.base_len = data, session, epoch, base_len

    def fail(self, reason: str) -> NoReturn:
        raise Malformed(reason, self.session, self.epoch)

    def read(self, kind: int) -> Message:
        match kind:
            case _Kind.OPEN:
                return self._open()
            case _Kind.GROWTH:
                return self._growth()
            case _Kind.VERDICT:
                return self._verdict()
            case _Kind.CLOSE:
                self._expect(_HEADER.size)
                return Close(self.session, self.epoch)
        self.fail(f"unknown kind {kind}")

    def _expect(self, size: int) -> None:
        if len(self.data) != size:
            self.fail(f"{len(self.data)} bytes where {size} belong")

    def _fixed(self, layout: struct.Struct, start: int = _HEADER.size) -> tuple[Any, ...]:
        return layout.unpack(self._part(start, layout.size))

    def _plan(self, start: int) -> Plan:
        name, k, fanout, width, budget, fresh, acceptance = self._fixed(_PLAN, start)
        try:
            plan = Plan(name.rstrip(b"\0").decode("ascii"), k, fanout, width, budget, acceptance, fresh)
        except UnicodeDecodeError:
            self.fail("the schedule's name is not ASCII")
        if not plan.within_limits():
            self.fail(f"nobody can follow {plan}")
        return plan

    def _tokens(self, start: int, count: int) -> tuple[int, ...]:
        self._expect(start + 4 * count)
        return struct.unpack_from(f"<{count}I", self.data, start)

    def _open(self) -> Open:
        seed, temperature, top_p, min_p, top_k, prompt_len = self._fixed(_OPEN)
        if not all(map(math.isfinite, (temperature, top_p, min_p))) or temperature < 0:
            self.fail("a sampling field is out of its range")
        start = _HEADER.size + _OPEN.size
        plan = self._plan(start)
        if prompt_len > self.base_len:
            self.fail(f"a prompt of {prompt_len} tokens in {self.base_len}")
        constraints, start = self._constraints(start + _PLAN.size)
        tokens = self._tokens(start, self.base_len)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        return Open(self.session, self.epoch, tokens, sampling, plan, prompt_len, constraints)

    def _constraints(self, start: int) -> tuple[Constraints, int]:
        """They, and where they end."""
        repetition, frequency, presence, min_tokens, biases, ends, words, grammar = self._fixed(_CONSTRAINTS, start)
        start += _CONSTRAINTS.size
        if not (all(map(math.isfinite, (repetition, frequency, presence))) and repetition > 0):
            self.fail("a penalty is out of its range")
        part = self._part(start, _BIAS.size * biases)
        bias = tuple(_BIAS.iter_unpack(part))
        if not all(math.isfinite(value) for _, value in bias):
            self.fail("a bias is not finite")
        numbers = struct.unpack(f"<{ends + words}I", self._part(start + len(part), 4 * (ends + words)))
        start += len(part) + 4 * len(numbers)
        try:
            text = bytes(self._part(start, grammar)).decode()
        except UnicodeDecodeError:
            self.fail("the grammar is not UTF-8")
        bad_words = tuple(self._words(numbers[ends:]))
        constraints = Constraints(bias, repetition, frequency, presence, bad_words, min_tokens, numbers[:ends], text)
        return constraints, start + grammar

    def _words(self, numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Token sequences, each behind its length."""
        while numbers:
            end = 1 + numbers[0]
            if not 1 < end <= len(numbers):
                self.fail("a bad word is cut off")
            yield numbers[1:end]
            numbers = numbers[end:]

    def _part(self, start: int, size: int) -> memoryview:
        if len(self.data) < start + size:
            self.fail(f"{len(self.data)} bytes are too few")
        return memoryview(self.data)[start : start + size]

    def _growth(self) -> GrowthMessage:
        version, flags, count, step, age = self._fixed(_GROWTH)
        if not (0 <= step < math.inf and 0 <= age < math.inf):
            self.fail(f"a step takes {step} seconds, a verdict is {age} seconds old")
        start = _HEADER.size + _GROWTH.size
        self._expect(start + _NODE.size * count)
        nodes = tuple(map(NewNode._make, _NODE.iter_unpack(memoryview(self.data)[start:])))
        for id, _, _, logq in nodes:
            if id == ROOT or not -math.inf < logq <= 0:
                self.fail(f"node {id} has log q {logq}")
        done, lost = bool(flags & _DONE), bool(flags & _LOST)
        return GrowthMessage(self.session, self.epoch, self.base_len, version, nodes, done, lost, step, age)

    def _verdict(self) -> Verdict:
        flags, count = self._fixed(_VERDICT)
        start = _HEADER.size + _VERDICT.size
        plan = self._plan(start)
        tokens = self._tokens(start + _PLAN.size, count)
        return Verdict(self.session, self.epoch, self.base_len, tokens, plan, bool(flags & _RESYNC))
