"""Log-probabilities of tokens, under the target's own logits: before any bias, penalty, temperature or cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from paceline.actors.values import TokenLogprobs
from torch import Tensor


def logprobs(rows: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of each token, given the raw logits [n, V] that it was drawn from, and of the `count` likeliest tokens there."""
    if not tokens:
        return []
    shares = rows.float().log_softmax(-1)
    own = shares.gather(1, torch.tensor(list(tokens), device=rows.device)[:, None])[:, 0].tolist()
    best = shares.topk(min(count, shares.shape[1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, share, tuple(zip(ids, values, strict=True)))
        for token, share, (ids, values) in zip(tokens, own, tops, strict=True)
    ]
