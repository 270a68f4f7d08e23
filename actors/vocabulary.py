"""A drafter's head over part of the vocabulary: the tokens that are frequent enough to be worth guessing.

Every guess of a small drafter costs one product with its head, which then has most of its parameters, and nearly all
tokens of ordinary text come from a small part of a vocabulary.  So a head of the rows of these alone drafts faster, and
what it never guesses is what was rarely asked for: Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models
via Frequency-Ranked Speculative Sampling" (2025), section 3; Goel et al., "VOCABTRIM" (2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def check_head(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless `ids` are distinct ids of a vocabulary of this size, and at least one."""
    if not ids:
        raise ValueError("a drafter's vocabulary must keep at least one token id, and this one is empty")
    outside = next((id for id in ids if not 0 <= id < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside the drafter's vocabulary of {vocab_size}")
    id, count = Counter(ids).most_common(1)[0]
    if count > 1:
        raise ValueError(f"token id {id} stands in the drafter's vocabulary {count} times")


def trim_head(model: Any, ids: Sequence[int]) -> None:
    """Leave only the rows of `ids`, in this order, in a causal language model's head.

    Its logits become [..., len(ids)].  What it can be fed stays as it was: a tied input table is not touched.
    Raises ValueError; see check_head.
    """
    head = model.get_output_embeddings()
    check_head(ids, head.out_features)
    rows = torch.tensor(ids, device=head.weight.device)
    trimmed = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    trimmed.weight = nn.Parameter(head.weight[rows], requires_grad=False)
    if head.bias is not None:
        trimmed.bias = nn.Parameter(head.bias[rows], requires_grad=False)
    model.set_output_embeddings(trimmed)
