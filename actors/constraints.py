"""What a request does to the target's logits before a token is drawn: one function of (logits, tokens so far).

Verifier and drafter use the same one, at every node of a draft tree: so a constraint holds at each position of a block
that is accepted, and the drafter guesses what the target may still say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from paceline.actors.grammar import GrammarError, Matcher
from paceline.actors.values import FREE, Constraints, Request
from torch import Tensor

Compile = Callable[[str], Matcher]
"""Makes a Matcher of a grammar.  Raises GrammarError."""


class DeadEnd(ValueError):
    """The constraints leave no token that could come next; the request asks for what cannot be."""


def constraints_of(request: Request, eos_ids: frozenset[int]) -> Constraints:
    """The constraints of a request with its ends, those of the target among them; FREE where nothing is changed."""
    ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else eos_ids)
    constraints = replace(request.constraints, ends=tuple(sorted(ends)))
    return constraints if constraints.active else FREE


def shaper_of(
    constraints: Constraints,
    prompt: Sequence[int],
    output: Sequence[int],
    vocab_size: int,
    compile: Compile | None = None,
) -> Shaper | None:
    """See Shaper; None where nothing is changed.  Raises GrammarError."""
    return Shaper(constraints, prompt, output, vocab_size, compile) if constraints.active else None


class Shaper:
    """The constraints of one request, as they stand after its committed tokens.

    In this order: logit bias; repetition, frequency and presence penalty; then what must not come is masked: what the
    grammar does not allow, the last token of a bad word, and, before min_tokens, the ends.

    output: the committed tokens after the prompt.  Raises GrammarError.
    """

    def __init__(
        self,
        constraints: Constraints,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab_size: int,
        compile: Compile | None = None,
    ) -> None:
        self._constraints = constraints = _within(constraints, vocab_size)
        self._matcher = _matcher(constraints, compile)
        self._output: list[int] = []
        self._bias = torch.tensor([bias for _, bias in constraints.logit_bias])
        self._biased = torch.tensor([token for token, _ in constraints.logit_bias], dtype=torch.int64)
        self._counts = torch.zeros(vocab_size if constraints.penalize else 0)
        self._seen = torch.zeros(len(self._counts), dtype=torch.bool)
        if constraints.penalize:
            self._seen[[token for token in prompt if token < vocab_size]] = True
        self.advance(output)

    def __call__(self, logits: Tensor, path: tuple[int, ...]) -> Tensor:
        """The logits [V] of a row `path` below the committed tokens, as a token is drawn from them; float32.

        Raises DeadEnd where no token is left.
        """
        row = logits.float().clone()
        if len(self._biased):
            row.index_add_(0, self._biased.to(row.device), self._bias.to(row.device))
        if self._constraints.penalize:
            row = self._penalized(row, path)
        banned = self._banned(path, len(row))
        return row if banned is None else row.masked_fill_(banned.to(row.device), -torch.inf)

    def end(self, tokens: Sequence[int]) -> int | None:
        """After how many of these next tokens nothing can follow by the grammar; None if something can after all."""
        if self._matcher is None:
            return None
        for count in range(1, len(tokens) + 1):
            if tokens[count - 1] in self._constraints.ends:
                return None
            if self._matcher.complete(tokens[:count]):
                return count
        return None

    def advance(self, tokens: Sequence[int]) -> None:
        """These were committed."""
        self._output += tokens
        # A drafter's vocabulary may be the smaller one.
        known = [token for token in tokens if token < len(self._counts)]
        if known:
            at = torch.tensor(known)
            self._counts.index_add_(0, at, torch.ones(len(at)))
            self._seen[at] = True
        if self._matcher is not None:
            self._matcher.advance([token for token in tokens if token not in self._constraints.ends])

    def _penalized(self, row: Tensor, path: Sequence[int]) -> Tensor:
        constraints, counts, seen = self._constraints, self._counts, self._seen
        known = [token for token in path if token < len(counts)]
        if known:
            at = torch.tensor(known)
            counts = counts.index_add(0, at, torch.ones(len(at)))
            seen = seen.index_fill(0, at, True)
        counts, seen = counts.to(row.device), seen.to(row.device)
        if constraints.repetition_penalty != 1:
            weaker = torch.where(row > 0, row / constraints.repetition_penalty, row * constraints.repetition_penalty)
            row = torch.where(seen, weaker, row)
        return row - constraints.frequency_penalty * counts - constraints.presence_penalty * (counts > 0)

    def _banned(self, path: tuple[int, ...], vocab_size: int) -> Tensor | None:
        """Which tokens must not come after `path`, bool [V]; None if all may.  Raises DeadEnd."""
        ids = [*self._early_ends(path), *self._last_of_bad_words(path)]
        if self._matcher is None and not ids:
            return None
        banned = torch.zeros(vocab_size, dtype=torch.bool)
        if self._matcher is not None:
            try:
                banned |= ~torch.from_numpy(self._matcher.allowed(path, self._constraints.ends))
            except GrammarError as error:
                raise DeadEnd(f"response_format: the grammar cannot be followed any further: {error}") from error
        banned[ids] = True
        if banned.all():
            field = "response_format" if self._matcher is not None else "bad_words"
            rest = ": bad_words and min_tokens rule out the last ones" if ids and self._matcher is not None else ""
            at = len(self._output) + len(path)
            raise DeadEnd(f"{field}: no token is left that could come after {at} tokens{rest}")
        return banned

    def _early_ends(self, path: tuple[int, ...]) -> Sequence[int]:
        early = len(self._output) + len(path) < self._constraints.min_tokens
        return self._constraints.ends if early else ()

    def _last_of_bad_words(self, path: tuple[int, ...]) -> Iterator[int]:
        """What would complete a bad word."""
        words = self._constraints.bad_words
        longest = max(map(len, words), default=0)
        if not longest:
            return
        before = (*self._output[-longest:], *path)
        for *first, last in words:
            if not first or before[-len(first) :] == tuple(first):
                yield last


def _within(constraints: Constraints, vocab_size: int) -> Constraints:
    """Without what speaks of other tokens: a drafter's vocabulary may be the smaller one."""
    return replace(
        constraints,
        logit_bias=tuple((token, bias) for token, bias in constraints.logit_bias if token < vocab_size),
        bad_words=tuple(word for word in constraints.bad_words if max(word) < vocab_size),
        ends=tuple(token for token in constraints.ends if token < vocab_size),
    )


def _matcher(constraints: Constraints, compile: Compile | None) -> Matcher | None:
    if not constraints.grammar:
        return None
    if compile is None:
        raise GrammarError("there is no tokenizer to follow a grammar with")
    return compile(constraints.grammar)
