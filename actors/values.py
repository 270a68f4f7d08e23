"""The values that pass between the gateway, the session and the loops.  All of them are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
ErrorCode = Literal["", "internal", "exhausted", "bad_logits"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from the target's logits.

    temperature: 0 is greedy.  top_k: 0 is off.  top_p and min_p: 1 and 0 are off.
    seed: unsigned 64 bits; together with a position it fixes the noise of that position.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """Which schedule drafts for a request, and k, the depth of its draft chain in tokens."""

    schedule: str = "amusd"
    k: int = 4


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, checked and tokenized.  `prompt` holds at least one token id."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculation: Speculation = Speculation()


@dataclass(frozen=True, slots=True)
class Stats:
    """What speculation did for one request.  Counts only; rates are derived.

    drafted: draft tokens that went through a verify pass.  accepted: those of them that were delivered.
    verify_passes: passes that committed at least one token.
    """

    schedule: str
    drafted: int = 0
    accepted: int = 0
    verify_passes: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended.  completion_tokens equals the number of ids that were delivered.

    error, code: what went wrong, and of what kind it is, where the reason is "error".  "exhausted": there is no room
    now, the same request may succeed later.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    seed: int
    stats: Stats
    error: str = ""
    code: ErrorCode = ""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per verify pass; 1 for plain decoding, 0 before the first pass."""
        passes = self.stats.verify_passes
        return self.completion_tokens / passes if passes else 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream: the ids of one verify pass, the text they complete, and the end, if this is it."""

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None = None
