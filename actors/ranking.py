"""The likeliest tokens after every row of a draft step, found for all rows together.

A drafter ranks by the scores that the target's token is drawn with: its own logits, processed as the target's are, and
at temperature > 0 the noise of the position.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from paceline.actors.rule import Edit, process
from paceline.actors.values import Sampling
from paceline.kernels.noise import gumbel
from torch import Tensor

log = logging.getLogger(__name__)

_CHUNK = 64


class Candidate(NamedTuple):
    """A token, and the log of its share among the scores that it was found by; 0 at most.

    At temperature > 0 these hold the noise: the share says how sure it is that the target will fall on this token,
    which the drafter's own probability does not when the noise is known.
    """

    token: int
    logq: float


class Rows(NamedTuple):
    """What a step has brought for one session.

    logits: [rows, columns].  positions: per row the index in the whole sequence of the token that it decides.
    edit, paths: the request's constraints, and per row the tokens between its committed prefix and that row.
    """

    logits: Tensor
    sampling: Sampling
    positions: Sequence[int]
    edit: Edit | None = None
    paths: Sequence[tuple[int, ...]] = ()


class Ranker:
    """Finds the `count` likeliest tokens of each row.  head: the ids that the columns stand for; None: 0, 1, 2, ..."""

    def __init__(self, count: int, vocab_size: int, head: Sequence[int] | None = None) -> None:
        self._count, self._vocab_size = count, vocab_size
        self._head = None if head is None else torch.tensor(head)
        # The noise of a token does not depend on how many others there are.
        self._reach = 1 + max(head) if head else 0
        self._scores = torch.empty(0, 0)

    def rank(self, parts: Sequence[Rows]) -> list[list[tuple[Candidate, ...]]]:
        """Per part and row its candidates, the best first; none for logits that are not numbers."""
        counts = [len(part.positions) for part in parts]
        if not any(counts):
            return [[] for _ in parts]
        scores = self._room(sum(counts), parts[0].logits)
        for part, place in zip(parts, torch.split(scores, counts), strict=True):
            if part.positions:
                self._fill(place, part)
        best, columns = top(scores, self._count)
        tokens = columns if self._head is None else self._head[columns]
        found = iter(_candidates(best, tokens))
        return [list(islice(found, count)) for count in counts]

    def _room(self, rows: int, like: Tensor) -> Tensor:
        """Memory for the scores of so many rows.  It is kept: touching new memory costs as much as the arithmetic."""
        if len(self._scores) < rows:
            self._scores = torch.empty((2 * rows, like.shape[-1]), dtype=like.dtype, device=like.device)
            self._head = self._head if self._head is None else self._head.to(like.device)
        return self._scores[:rows]

    def _fill(self, place: Tensor, part: Rows) -> None:
        """Write the log shares of rule.perturbed of each row."""
        logits = part.logits
        if part.edit is not None:
            rows = zip(part.logits, part.paths, strict=True)
            logits = torch.stack([self._edited(row, path, part.edit) for row, path in rows])
        if part.sampling.temperature == 0:
            torch.log_softmax(logits, -1, out=place)
            return
        # Siblings share a position, and so its noise.
        levels = sorted(set(part.positions))
        noise = self._noise(part.sampling.seed, levels, part.logits)
        for row, position, out in zip(logits, part.positions, place, strict=True):
            torch.log_softmax(process(row, part.sampling) + noise[levels.index(position)], -1, out=out)

    def _edited(self, row: Tensor, path: tuple[int, ...], edit: Edit) -> Tensor:
        """A row as the target's would be edited; nothing can be guessed after one that cannot be."""
        whole = row
        if self._head is not None:
            whole = row.new_full((self._vocab_size,), -torch.inf)
            whole[self._head] = row
        try:
            whole = edit(whole, path)
        except Exception as error:
            log.debug("nothing can be guessed after %s: %s", path, error)
            whole = torch.full_like(whole, -torch.inf)
        return whole if self._head is None else whole[self._head]

    def _noise(self, seed: int, positions: Sequence[int], logits: Tensor) -> Tensor:
        if self._head is None:
            return gumbel(seed, positions, logits.shape[-1], logits.device)
        return gumbel(seed, positions, self._reach, logits.device)[:, self._head]


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of every row of [rows, V], or all if there are fewer: (values, columns), in falling order.

    Tensor.topk, which looks at each score several times, sees only what can be among them: the largest `count` scores
    lie in the `count` chunks of largest maximum, or after the last whole chunk.
    """
    rows, vocab = scores.shape
    chunks = vocab // _CHUNK
    if chunks <= count:
        values, columns = scores.topk(min(count, vocab))
        return values, columns
    whole = scores[:, : chunks * _CHUNK].reshape(rows, chunks, _CHUNK)
    first = whole.amax(-1).topk(count).indices * _CHUNK
    inside = (first[..., None] + torch.arange(_CHUNK, device=scores.device)).flatten(1)
    after = torch.arange(chunks * _CHUNK, vocab, device=scores.device).expand(rows, -1)
    columns = torch.cat([inside, after], dim=-1)
    found = scores.gather(1, columns).topk(count)
    return found.values, columns.gather(1, found.indices)


def _candidates(logqs: Tensor, tokens: Tensor) -> list[tuple[Candidate, ...]]:
    """Of every row, those that have a chance at all."""
    rows = zip(tokens.tolist(), logqs.tolist(), strict=True)
    return [
        tuple(Candidate(token, min(logq, 0.0)) for token, logq in zip(*row, strict=True) if logq > -math.inf)
        for row in rows
    ]
