"""One request's life in the verifier: its committed tokens, its mirror of the draft tree, and where it ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from paceline.actors.messages import Open, Verdict
from paceline.actors.rule import Outcome
from paceline.actors.schedules import SCHEDULES
from paceline.actors.tree import DraftTree, Subtree
from paceline.actors.values import Delta, ErrorCode, Finish, FinishReason, Request, Stats

log = logging.getLogger(__name__)


class TextStream(Protocol):
    """Turns committed ids into text, and finds the stop strings in it."""

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        """The text that these ids complete; and, if a stop string is complete, how many of the ids it took."""

    def flush(self) -> str:
        """The text held back so far; nothing may be pushed afterwards."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the target allows: its end-of-sequence ids, and positions per sequence."""

    eos_ids: frozenset[int]
    context_length: int


class Session:
    """The verifier's record of one request.

    slot, epoch: its name towards the drafters; a slot is used again, an epoch never.  sequence: its id in the engine.
    drafter: the link it is drafted over, None while there is none.  heard: something came from it in this epoch.
    done_at: the base_len below which the drafter will grow no more.  ready_at: since when it could be verified.
    """

    def __init__(self, request: Request, slot: int, limits: Limits, text: TextStream) -> None:
        self.request, self.slot = request, slot
        self.sequence = -1
        self.schedule = SCHEDULES[request.speculation.schedule]
        self.tokens = list(request.prompt)
        self.mirror = DraftTree(len(self.tokens))
        self.epoch = 0
        self.drafter: str | None = None
        self.heard = self.resync = False
        self.done_at = -1
        self.ready_at: float | None = None
        self._limits, self._text = limits, text
        self._stops = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else limits.eos_ids)
        self._drafted = self._accepted = self._passes = 0

    @property
    def completion(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """How many more tokens may come, by max_tokens and the context; at least 1 while the session runs."""
        length = min(len(self.request.prompt) + self.request.max_tokens, self._limits.context_length)
        return length - len(self.tokens)

    def open_message(self, epoch: int, drafter: str) -> Open:
        """Begin to be drafted by `drafter` under a new epoch; what the mirror held under the old one is void."""
        self.detach()
        self.epoch, self.drafter = epoch, drafter
        speculation, sampling = self.request.speculation, self.request.sampling
        return Open(self.slot, epoch, tuple(self.tokens), sampling, speculation, self.remaining)

    def detach(self) -> None:
        """Go on without a drafter."""
        self.drafter = None
        self.heard = self.resync = False
        self.done_at = -1
        self.mirror = DraftTree(len(self.tokens))

    def within(self, tree: Subtree) -> Subtree:
        """`tree` without nodes so deep that their tokens could not be delivered any more."""
        depths: list[int] = []
        for parent in tree.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        if not depths or max(depths) < self.remaining:
            return tree
        return self.mirror.subtree(id for id, depth in zip(tree.ids, depths, strict=True) if depth < self.remaining)

    def commit(self, outcome: Outcome, drafted: int) -> tuple[Delta, Verdict | None]:
        """Take in what one pass decided.  `drafted` nodes were verified.  The verdict is None after the end."""
        base_len = len(self.tokens)
        tokens, text, reason = self._cut(outcome.tokens)
        self.tokens += tokens
        self.mirror = self.mirror.reroot(tokens)
        self.ready_at = None
        self._passes += 1
        # Neither drafts nor acceptance count behind the end of the request.
        self._accepted += min(len(outcome.path), len(tokens))
        self._drafted += drafted if reason is None else min(drafted, len(tokens))
        if reason is not None:
            return Delta(tokens, text, self.finish(reason)), None
        verdict = Verdict(self.slot, self.epoch, base_len, tokens, self.resync)
        self.resync = False
        return Delta(tokens, text), verdict

    def _cut(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str, FinishReason | None]:
        """The tokens up to where the request ends, their text, and why it ends there, if it does."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self._stops), None)
        limit = self.remaining
        kept = tokens[: min(limit, end or limit)]
        text, stopped = self._text.push(kept)
        if stopped is not None:
            return kept[:stopped], text, "stop"
        if end is not None and end <= limit:
            return kept, text + self._text.flush(), "stop"
        if len(kept) == limit:
            return kept, text + self._text.flush(), "length"
        return kept, text, None

    def held_text(self) -> str:
        """The text of delivered ids that was held back; for a session that is cut short."""
        try:
            return self._text.flush()
        except Exception:
            log.exception("the last text of request %s is lost", self.request.id)
            return ""

    def finish(self, reason: FinishReason, error: str = "", code: ErrorCode = "") -> Finish:
        """The end of this request, as it stands now."""
        stats = Stats(self.schedule.name, self._drafted, self._accepted, self._passes)
        prompt, seed = len(self.request.prompt), self.request.sampling.seed
        return Finish(reason, prompt, self.completion, seed, stats, error, code)
