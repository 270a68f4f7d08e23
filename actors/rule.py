"""The acceptance rule: the one place where a token is decided.

At output position t of a request with seed s the target's token is ``argmax_v(z_t[v] + g_t[v])``, where z_t are its
processed logits and g_t is Gumbel noise fixed by (s, t) (the Gumbel-max trick: the argmax is an exact draw from
softmax(z_t)); at temperature 0 it is ``argmax_v z_t[v]``.  A draft is accepted while it equals that token.  Drafts can
therefore change how many tokens one pass yields, never which tokens they are, and decoding without drafts is the case
of an empty tree, not another path through the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.actors.tree import Subtree
from paceline.actors.values import Sampling
from paceline.kernels.noise import gumbel
from paceline.kernels.verify_tree import Walk, process, verify_tree
from torch import Tensor

__all__ = ["BadLogits", "Outcome", "draw", "perturbed", "process", "verify", "verify_all"]


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


def perturbed(logits: Tensor, sampling: Sampling, position: int) -> Tensor:
    """The scores whose argmax is the token at `position`, float32 [V]; what the drafter ranks its guesses by, too."""
    if sampling.temperature == 0:
        return logits
    noise = gumbel(sampling.seed, (position,), logits.shape[-1], logits.device)[0]
    return process(logits, sampling) + noise


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The target's own token at `position`, given its raw logits [V] there.  Raises BadLogits."""
    return verify(Subtree(), logits[None], sampling, position).tokens[0]


def verify(tree: Subtree, logits: Tensor, sampling: Sampling, position: int) -> Outcome:
    """Walk down `tree` while a child equals the target's own draw.

    tree: N nodes below the last committed token.  logits: [1 + N, V], row 0 after the last committed token, row 1 + i
    after node i.  position: the index in the whole sequence of the first token to be decided.  Raises BadLogits.
    """
    outcome = verify_all([tree], [logits], [sampling], [position])[0]
    if isinstance(outcome, BadLogits):
        raise outcome
    return outcome


def verify_all(
    trees: Sequence[Subtree], logits: Sequence[Tensor], samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[Outcome | BadLogits]:
    """`verify` for many sessions at once: on a GPU one launch and one answer for all of them.

    BadLogits stands in the place of the session whose logits they are; it is no other one's concern.
    """
    for tree, rows in zip(trees, logits, strict=True):
        nodes = len(tree.tokens)
        if rows.shape[0] != 1 + nodes:
            raise ValueError(f"{nodes} nodes need {1 + nodes} rows of logits, got {rows.shape[0]}")
    walks = verify_tree(logits, trees, samplings, positions)
    return [_outcome(walk, position) for walk, position in zip(walks, positions, strict=True)]


def _outcome(walk: Walk, position: int) -> Outcome | BadLogits:
    if walk.broken:
        at = position + len(walk.tokens)
        return BadLogits(f"the target's logits at position {at} have no finite maximum")
    return Outcome(walk.tokens, walk.path)
