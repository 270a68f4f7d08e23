"""Which tokens a drafter's head keeps: rankings of token ids by how often text needs them, made here and read here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.cluster.models import ModelError, ModelFiles, Progress

RANKING = "draft_vocab.json"
"""The name of a ranking that lies beside a drafter's checkpoint."""

_PIECE = 1_000_000  # characters tokenized at once


def rank(model: ModelFiles, texts: Sequence[Path], keep: int | None, progress: Progress) -> list[int]:
    """The token ids of `texts`, the most frequent first; equally frequent ones by id.  At most `keep` ids.

    Special and end-of-sequence ids stand before all others, since a drafter has to guess them whatever the texts are.
    texts: files, UTF-8.  Raises ModelError.
    """
    from paceline.actors.text import has_tokenizer, load_tokenizer

    if not has_tokenizer(model.directory):
        raise ModelError(f"--tokenizer: {model.name} has no tokenizer; name a model that has one")
    tokenizer, counts = load_tokenizer(model.directory), Counter[int]()
    for path in texts:
        for piece in _pieces(path):
            counts.update(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
            progress(f"reading {path.name}: {counts.total()} tokens, {len(counts)} different ones")
    if not counts:
        raise ModelError("TEXTS: they hold no text, so there is nothing to count")
    special = special_ids(model.directory)
    seen = sorted(counts.keys() - set(special), key=lambda id: (-counts[id], id))
    return [*special, *seen][:keep]


def head_ids(wanted: int | str, drafter: ModelFiles) -> tuple[int, ...]:
    """The ids that a drafter's head shall keep, in rising order; special and end-of-sequence ids are always among them.

    wanted: a file of ids, or how many of the most frequent ones.  Those are the first ones of RANKING beside the
    checkpoint; without it, the lowest ids: a byte-pair tokenizer numbers its tokens in the order in which it has merged
    them, and it merges the most frequent pair first.
    Raises ModelError.
    """
    from paceline.actors.text import vocab_size
    from paceline.actors.vocabulary import check_head

    size = vocab_size(drafter.directory)
    ids = read_ranking(Path(wanted)) if isinstance(wanted, str) else _first(wanted, drafter, size)
    try:
        check_head(ids, size)
    except ValueError as error:
        raise ModelError(f"drafter_vocab {wanted}: {error}; `paceline vocab rank` makes a list that fits") from error
    return tuple(sorted({*ids, *special_ids(drafter.directory)}))


def read_ranking(path: Path) -> list[int]:
    """A file of token ids, the most frequent first: a JSON list, or numbers between white space.  Raises ModelError."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelError(f"drafter_vocab: {path} cannot be read: {_reason(error)}") from error
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except ValueError as error:
        raise ModelError(f"drafter_vocab: {path} is no list of token ids: {error}") from error
    wrong = next((value for value in values if type(value) is not int), None)
    if wrong is not None:
        raise ModelError(f"drafter_vocab: {path} must hold token ids only, and {wrong!r} is none")
    return values


def special_ids(directory: Path) -> list[int]:
    """The special and end-of-sequence ids of a checkpoint that it has rows for, in rising order."""
    from paceline.actors.text import TextCodec, has_tokenizer, load_tokenizer, vocab_size

    ids, size = set(TextCodec.load(directory).eos_ids), vocab_size(directory)
    if has_tokenizer(directory):
        tokenizer: Any = load_tokenizer(directory)
        ids |= {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids |= set(tokenizer.all_special_ids)
    return sorted(id for id in ids if id < size)


def _first(count: int, drafter: ModelFiles, size: int) -> Sequence[int]:
    ranking = drafter.directory / RANKING
    ranked = read_ranking(ranking) if ranking.is_file() else range(size)
    if count > len(ranked):
        what = f"{ranking} ranks {len(ranked)}" if ranking.is_file() else f"{drafter.name} has {size} in all"
        raise ModelError(f"drafter_vocab {count}: {what}; ask for at most so many, or rank more text")
    return ranked[:count]


def _pieces(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while piece := file.read(_PIECE):
                yield piece
    except (OSError, UnicodeError) as error:
        raise ModelError(f"TEXTS: {path} cannot be read: {_reason(error)}") from error


def _reason(error: OSError | UnicodeError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else "it is not UTF-8"
