"""Drafting by a model whose tokenizer is not the target's: what the tokens of one are to the other.

It guesses tokens that both vocabularies have, and whatever the target says is spelled out to it.  After Timor et al.,
"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies" (2025): their
token-level intersection.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.actors.text import Decoder, load_tokenizer, vocab_size

LEAST_SHARED = 0.01
"""A drafter must have more than this share of the target's tokens."""


class Vocabulary:
    """The tokens of a checkpoint that stand for text, whatever way its tokenizer writes them down.

    texts: by id, the bytes; without a token for the byte 255, which is in no text.  size: how many ids the model can be
    fed.  end: the id that ends a text, if there is one.
    Raises ValueError for a tokenizer of a kind that is not known.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from llguidance.hf import from_tokenizer

        self._tokenizer: Any = load_tokenizer(directory)
        self.size, self.end = vocab_size(directory), self._tokenizer.eos_token_id
        try:
            # It wants some id that ends a text, which does not matter here.
            self._bytes = from_tokenizer(self._tokenizer, eos_token=max(self._tokenizer.get_vocab().values()))
        except Exception as error:
            raise ValueError(f"the tokenizer in {directory} cannot be translated: {error}") from error
        spoken = sorted(Decoder(self._tokenizer).spoken(range(self.size)))
        self.texts = {id: text for id in spoken if (text := self._bytes.decode_bytes([id]))}

    def encode(self, text: bytes) -> list[int]:
        """The ids of a whole text, with the special tokens that the tokenizer itself puts round one."""
        return list(self._tokenizer.encode(text.decode(errors="ignore"), truncation=False))

    def spell(self, text: bytes) -> tuple[int, ...]:
        """The ids of a piece of text, which may be half a character; none for what it has no tokens for."""
        return tuple(self._bytes.tokenize_bytes(text))

    def ids(self) -> dict[bytes, int]:
        """By its bytes each token; of those that are spelled alike, the one that the tokenizer itself uses."""
        found: dict[bytes, int] = {}
        for id, text in self.texts.items():
            if text not in found or self.spell(text) == (id,):
                found[text] = id
        return found


class Translation:
    """From a target's tokens to a drafter's and back.

    target_ids, drafter_ids: the tokens that both have, each at the same place; the ends of a text are one of them.
    vocab_size: the target's.  Raises ValueError for a drafter that has next to none of the target's tokens.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary) -> None:
        ids, texts = drafter.ids(), target.ids()
        pairs = {id: ids[text] for text, id in texts.items() if text in ids}
        if len(pairs) <= LEAST_SHARED * len(texts):
            raise ValueError(
                f"the drafter has {len(pairs)} of the target's {len(texts)} tokens, which are too few to draft with; "
                "use another drafter"
            )
        self._same = {id: ids[text] for id, text in target.texts.items() if text in ids}
        if target.end is not None and drafter.end is not None:
            pairs[target.end] = self._same[target.end] = drafter.end
        self.vocab_size = target.size
        self.target_ids, self.drafter_ids = tuple(pairs), tuple(pairs.values())
        self._target, self._drafter = target, drafter

    @classmethod
    def load(cls, target: str | os.PathLike[str], drafter: str | os.PathLike[str]) -> Translation:
        """That of two checkpoint directories, both with a tokenizer.  It takes seconds.  Raises ValueError."""
        return cls(Vocabulary(target), Vocabulary(drafter))

    def prompt(self, tokens: Iterable[int]) -> list[int]:
        """What the drafter makes of the text of these target tokens; special ones have none."""
        return self._drafter.encode(b"".join(self._target.texts.get(token, b"") for token in tokens))

    def feed(self, tokens: Iterable[int]) -> list[int]:
        """Target tokens one by one as the drafter's: each that both have is one, another may be any number, or none."""
        return [id for token in tokens for id in self._spelled(token)]

    def _spelled(self, token: int) -> Sequence[int]:
        same = self._same.get(token)
        return (same,) if same is not None else self._drafter.spell(self._target.texts.get(token, b""))
