"""What verifier and drafter say to each other: four messages in a fixed little-endian layout, no pickle.

Every message begins with the header: magic "PL", version, kind, session (u32), epoch (u32), base_len (u32).
`epoch` tells lives of a session slot apart; `base_len` is the committed length that the message speaks of.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.actors.schedules import Plan
from paceline.actors.tree import ROOT, NewNode
from paceline.actors.values import Sampling

VERSION = 2
_MAGIC = b"PL"
_HEADER = struct.Struct("<2sBBIII")
_OPEN = struct.Struct("<QdddII")
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
    """Verifier to drafter: begin to draft after `tokens`, all the committed ones.  base_len is their number."""

    session: int
    epoch: int
    tokens: tuple[int, ...]
    sampling: Sampling
    plan: Plan
    max_tokens: int

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
        message.max_tokens,
    )
    return (
        _header(_Kind.OPEN, message, message.base_len) + fixed + _pack_plan(message.plan) + _pack_tokens(message.tokens)
    )


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
        if len(self.data) < start + layout.size:
            self.fail(f"{len(self.data)} bytes are too few")
        return layout.unpack_from(self.data, start)

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
        seed, temperature, top_p, min_p, top_k, max_tokens = self._fixed(_OPEN)
        if not all(map(math.isfinite, (temperature, top_p, min_p))) or temperature < 0:
            self.fail("a sampling field is out of its range")
        start = _HEADER.size + _OPEN.size
        plan = self._plan(start)
        tokens = self._tokens(start + _PLAN.size, self.base_len)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        return Open(self.session, self.epoch, tokens, sampling, plan, max_tokens)

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
