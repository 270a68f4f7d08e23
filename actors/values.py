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
    """What a request asks of speculation: a schedule by name, or "auto", and its numbers.

    k: draft depth in tokens (of pearl: its largest chunk).  fanout: other outcomes prepared per position, in the mean
    (saguaro).  width: leaves grown per draft step (swiftspec).  budget: nodes verified in a pass (swiftspec).
    """

    schedule: str = "auto"
    k: int = 4
    fanout: int = 3
    width: int = 4
    budget: int = 12


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, checked and tokenized.  `prompt` holds at least one token id.

    tenant: whose it is, as the server knows it; cached prompts are shared between requests of one tenant only.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculation: Speculation = Speculation()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """What speculation did for one request.  Counts only; rates are derived.

    drafted: draft tokens that went through a verify pass.  accepted: those of them that were delivered.
    verify_passes: passes that committed at least one token.  hits: those after which a draft below the new prefix was
    there already.  waited: seconds in which the request could have been verified, but waited for a draft.
    positions: (drafted, accepted) by depth in the draft; index 0 is the first draft token of a pass.
    """

    schedule: str
    drafted: int = 0
    accepted: int = 0
    verify_passes: int = 0
    hits: int = 0
    waited: float = 0.0
    positions: tuple[tuple[int, int], ...] = ()


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
