"""The values that pass between the gateway, the session and the loops.  All of them are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
ErrorCode = Literal["", "internal", "invalid", "exhausted", "bad_logits"]


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
class Constraints:
    """What changes the target's logits before a token is drawn from them; see constraints.Shaper for the order.

    logit_bias: (token, what is added to its logit).  repetition_penalty: 1 is off; over prompt and completion.
    frequency_penalty, presence_penalty: 0 is off; over the completion.  bad_words: token sequences that are never
    completed.  min_tokens: none of the first so many tokens is one of `ends`.  ends: the ids that end the request.
    grammar: what the completion has to follow, as llguidance writes it; "" for none.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    grammar: str = ""

    @property
    def penalize(self) -> bool:
        """Whether any penalty is on."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        return bool(self.logit_bias or self.penalize or self.bad_words or self.min_tokens or self.grammar)


FREE = Constraints()
"""No constraints."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request asks of speculation: a schedule by name, or "auto", and its numbers.

    k: draft depth in tokens (of pearl: its largest chunk).  fanout: other outcomes prepared per position, in the mean
    (saguaro).  width: leaves grown per draft step (swiftspec).  budget: nodes verified in a pass (swiftspec).
    max_k: no draft that is verified is deeper, whatever the schedule; None for no bound.
    """

    schedule: str = "auto"
    k: int = 4
    fanout: int = 3
    width: int = 4
    budget: int = 12
    max_k: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, checked and tokenized.  `prompt` holds at least one token id.

    constraints: without `ends`, which follow from the stop ids and the target.
    include_stop: the text holds the stop string or stop token that it ends at.
    top_logprobs: how many of the likeliest tokens to report with each token's own log-probability; None for neither.
    prompt_logprobs: the same for the tokens of the prompt.
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
    constraints: Constraints = FREE
    include_stop: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
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
    now, the same request may succeed later.  "invalid": the request asks for what cannot be.
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
class TokenLogprobs:
    """A token's log-probability under the target's own logits, and the likeliest tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream: the ids of one verify pass, the text they complete, and the end, if this is it.

    logprobs: one per id, where they were asked for.  prompt_logprobs: of the prompt's tokens but the first one, in one
    piece, before or with the first id.
    """

    token_ids: tuple[int, ...]
    text: str
    finish: Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
