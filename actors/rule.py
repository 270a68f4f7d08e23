"""The acceptance rule: the one place where a token is decided.

At output position t of a request with seed s the target's token is ``argmax_v(z_t[v] + g_t[v])``, where z_t are its
processed logits and g_t is Gumbel noise fixed by (s, t) (the Gumbel-max trick: the argmax is an exact draw from
softmax(z_t)); at temperature 0 it is ``argmax_v z_t[v]``.  A draft is accepted while it equals that token.  Drafts can
therefore change how many tokens one pass yields, never which tokens they are, and decoding without drafts is the case
of an empty tree, not another path through the code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from paceline.actors.tree import Subtree
from paceline.actors.values import Sampling
from paceline.kernels.noise import gumbel
from torch import Tensor


class BadLogits(ValueError):
    """The target's logits at some position hold no finite maximum; that request ends, others go on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pass decided for one session.

    tokens: the committed tokens, at least one: those of `path`, then the bonus token (or the correction).
    path: the indices into the subtree of the accepted nodes, root first.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]


def process(logits: Tensor, sampling: Sampling) -> Tensor:
    """The scores that a token is drawn from, float32 [V], from the raw logits [V] at temperature > 0.

    In this order: temperature, top-k, top-p, min-p.  A token that is cut scores -inf.
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.numel():
        threshold = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if sampling.top_p < 1:
        scores = _cut_top_p(scores, sampling.top_p)
    if sampling.min_p > 0:
        probabilities = scores.softmax(-1)
        scores = scores.masked_fill(probabilities < sampling.min_p * probabilities.max(), -torch.inf)
    return scores


def _cut_top_p(scores: Tensor, top_p: float) -> Tensor:
    ordered, order = scores.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    # A token stays while the mass before it is below top_p, so the most likely one always stays.
    cut = (probabilities.cumsum(-1) - probabilities) >= top_p
    cut[0] = False
    return scores.masked_fill(torch.empty_like(cut).scatter(0, order, cut), -torch.inf)


def perturbed(logits: Tensor, sampling: Sampling, position: int) -> Tensor:
    """The scores whose argmax is the token at `position`, float32 [V]; what the drafter ranks its guesses by, too."""
    if sampling.temperature == 0:
        return logits
    noise = gumbel(sampling.seed, (position,), logits.shape[-1], logits.device)[0]
    return process(logits, sampling) + noise


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The target's own token at `position`, given its raw logits [V] there.  Raises BadLogits."""
    best, token = perturbed(logits, sampling, position).max(dim=-1)
    if not torch.isfinite(best):
        raise BadLogits(f"the target's logits at position {position} have no finite maximum")
    return int(token)


def verify(tree: Subtree, logits: Tensor, sampling: Sampling, position: int) -> Outcome:
    """Walk down `tree` while a child equals the target's own draw.

    tree: N nodes below the last committed token.  logits: [1 + N, V], row 0 after the last committed token, row 1 + i
    after node i.  position: the index in the whole sequence of the first token to be decided.
    """
    if logits.shape[0] != 1 + len(tree.tokens):
        raise ValueError(f"{len(tree.tokens)} nodes need {1 + len(tree.tokens)} rows of logits, got {logits.shape[0]}")
    tokens: list[int] = []
    path: list[int] = []
    node = -1
    while True:
        token = draw(logits[1 + node], sampling, position + len(tokens))
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return Outcome(tuple(tokens), tuple(path))
        path.append(child)
        node = child
