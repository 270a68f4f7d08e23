"""The acceptance rule: the one place where a token is decided.

At output position t of a request with seed s the target's token is ``argmax_v(z_t[v] + g_t[v])``, where z_t are its
processed logits and g_t is Gumbel noise fixed by (s, t) (the Gumbel-max trick: the argmax is an exact draw from
softmax(z_t)); at temperature 0 it is ``argmax_v z_t[v]``.  A draft is accepted while it equals that token.  Drafts can
therefore change how many tokens one pass yields, never which tokens they are, and decoding without drafts is the case
of an empty tree, not another path through the code.

The logits are processed in this order: what the request's constraints do (an Edit, see constraints.Shaper), then
temperature, top-k, top-p, min-p (see verify_tree.process).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.actors.tree import Subtree
from paceline.actors.values import Sampling
from paceline.kernels.noise import gumbel
from paceline.kernels.verify_tree import Edit, Walk, process, verify_tree
from torch import Tensor

__all__ = ["BadLogits", "Edit", "Outcome", "draw", "perturbed", "process", "verify", "verify_all"]


class BadLogits(ValueError):
    """The target's logits at some position hold no finite maximum; that request ends, others go on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pass decided for one session.

    tokens: the decided tokens: those of `path`, then the bonus token (or the correction), unless there is a fault.
    path: the indices into the subtree of the accepted nodes, root first.
    fault: why the token after `path` cannot be drawn.  It counts only if the request has not ended by then, since
    decoding without drafts would never have come there.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    fault: Exception | None = None


def perturbed(logits: Tensor, sampling: Sampling, position: int) -> Tensor:
    """The scores whose argmax is the token at `position`, float32 [V]; what the drafter ranks its guesses by, too."""
    if sampling.temperature == 0:
        return logits
    noise = gumbel(sampling.seed, (position,), logits.shape[-1], logits.device)[0]
    return process(logits, sampling) + noise


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The target's own token at `position`, given its edited logits [V] there.  Raises BadLogits."""
    outcome = verify(Subtree(), logits[None], sampling, position)
    if outcome.fault is not None:
        raise outcome.fault
    return outcome.tokens[0]


def verify(tree: Subtree, logits: Tensor, sampling: Sampling, position: int, edit: Edit | None = None) -> Outcome:
    """Walk down `tree` while a child equals the target's own draw.

    tree: N nodes below the last committed token.  logits: [1 + N, V], row 0 after the last committed token, row 1 + i
    after node i.  position: the index in the whole sequence of the first token to be decided.
    edit: the request's constraints as they stand at that position.
    """
    return verify_all([tree], [logits], [sampling], [position], [edit])[0]


def verify_all(
    trees: Sequence[Subtree],
    logits: Sequence[Tensor],
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    edits: Sequence[Edit | None],
) -> list[Outcome]:
    """`verify` for many sessions at once: on a GPU one launch and one answer for all of them.

    A fault stands in the outcome of the session whose it is; it is no other one's concern.
    """
    for tree, rows in zip(trees, logits, strict=True):
        nodes = len(tree.tokens)
        if rows.shape[0] != 1 + nodes:
            raise ValueError(f"{nodes} nodes need {1 + nodes} rows of logits, got {rows.shape[0]}")
    walks = verify_tree(logits, trees, samplings, positions, edits)
    return [_outcome(walk, position) for walk, position in zip(walks, positions, strict=True)]


def _outcome(walk: Walk, position: int) -> Outcome:
    fault = walk.fault
    if walk.broken and fault is None:
        at = position + len(walk.tokens)
        fault = BadLogits(f"the target's logits at position {at} have no finite maximum")
    return Outcome(walk.tokens, walk.path, fault)
