"""Between text and token ids: encoding a prompt, and turning committed ids back into text while they arrive."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.actors.constraints import Compile
from paceline.actors.grammar import GrammarError, Grammars
from paceline.actors.session import TextStream
from paceline.actors.values import Request

log = logging.getLogger(__name__)

# A tokenizer lies in a checkpoint as at least one of these; transformers would make up an empty one without them.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_NO_TOKENIZER = "the model has no tokenizer"
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    """Does this checkpoint directory come with a tokenizer?"""
    return any((Path(directory) / name).is_file() for name in _TOKENIZER_FILES)


def vocab_size(directory: str | os.PathLike[str]) -> int:
    """How many token ids a checkpoint can be fed: the rows of its input table."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    return int(config.get_text_config(decoder=True).vocab_size)


def load_tokenizer(directory: str | os.PathLike[str]) -> Any:
    """The transformers tokenizer of a checkpoint directory; nothing is fetched, and none of its code is run."""
    # Imported here, since it takes seconds, and a model without a tokenizer does not need it.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Both may be stored in tokenizer.json.  The first encode would switch them off while others may be under way.
        backend.no_truncation()
        backend.no_padding()
    return tokenizer


class TextCodec:
    """A model's tokenizer and its end-of-sequence ids.

    eos_ids: from generation_config.json, config.json and the tokenizer together.  vocab_size: one more than the
    largest id that stands for text; 0 for a model without a tokenizer, whose text out is empty.  longest_token: in
    characters.  has_grammars: whether texts can be held to a grammar.
    """

    def __init__(self, tokenizer: Any | None, eos_ids: frozenset[int]) -> None:
        self.eos_ids = eos_ids
        vocabulary: Mapping[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.longest_token = max(map(len, vocabulary), default=0)
        self.has_grammars: bool = tokenizer is not None and tokenizer.is_fast
        self.has_chat_template = tokenizer is not None and tokenizer.chat_template is not None
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else Decoder(tokenizer)
        self._grammars: Grammars | None = None

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> TextCodec:
        """Read a checkpoint directory.  One without tokenizer files gives a codec that takes and makes no text."""
        directory = Path(directory)
        tokenizer = load_tokenizer(directory) if has_tokenizer(directory) else None
        return cls(tokenizer, _eos_ids(directory, tokenizer))

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt, with the special tokens that the tokenizer itself puts round one.

        Raises ValueError without a tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError(f"{_NO_TOKENIZER}: send token_ids instead of text")
        return tuple(self._tokenizer.encode(text, truncation=False))

    def encode_part(self, text: str) -> tuple[int, ...]:
        """The ids of a piece of text, without any special tokens.  Raises ValueError without a tokenizer."""
        if self._tokenizer is None:
            raise ValueError(_NO_TOKENIZER)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, truncation=False))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The ids of a conversation up to where the assistant speaks.  messages: each with `role` and `content`.

        Raises ValueError without a tokenizer or chat template, and where the template refuses the messages.
        """
        if self._tokenizer is None:
            raise ValueError(f"{_NO_TOKENIZER}: send token_ids instead of messages")
        if not self.has_chat_template:
            raise ValueError("the model has no chat template: send a text prompt or token_ids instead of messages")
        try:
            # transformers renders it in a sandbox, and adds no special tokens to those that the template writes.
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # The template comes with the model, and may raise anything.
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return tuple(ids)

    def grammars(self, vocab_size: int) -> Grammars | None:
        """What compiles grammars, for logits of so many columns; None where nothing can.  It takes up to seconds."""
        if not self.has_grammars:
            return None
        try:
            return Grammars(self._tokenizer, vocab_size, self.eos_ids)
        except GrammarError as error:
            log.warning("%s", error)
            self.has_grammars = False
            return None

    def compiler(self, vocab_size: int) -> Compile | None:
        """See `grammars`: what makes a matcher of a grammar."""
        grammars = self.grammars(vocab_size)
        return grammars.matcher if grammars else None

    def check_grammar(self, grammar: str) -> None:
        """Raise ValueError, with the place, unless this grammar can be followed."""
        if self._grammars is None:
            self._grammars = self.grammars(self.vocab_size)
        if self._grammars is None:
            raise GrammarError("the target's tokenizer cannot be used with grammars")
        self._grammars.check(grammar)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens; "" without a tokenizer."""
        return "" if self._decoder is None else self._decoder(self._decoder.spoken(ids))

    def piece(self, token: int) -> str:
        """The text of one token by itself; U+FFFD where it is not whole characters, "" without a tokenizer."""
        return "" if self._decoder is None else self._decoder([token])

    def stream(self, stop: Sequence[str] = (), *, min_tokens: int = 0, include: bool = False) -> TextStream:
        """A new stream of text that ends before the first of the `stop` strings, or behind it, with `include`.

        min_tokens: with the first so many tokens it does not end.
        Raises ValueError for an empty stop string, and for any without a tokenizer.
        """
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        if self._decoder is not None:
            return Detokenizer(self._decoder, stop, min_tokens, include)
        if stop:
            raise ValueError(f"{_NO_TOKENIZER}: send stop_token_ids instead of stop strings")
        return _NoText()


def stream_of(codec: TextCodec, request: Request) -> TextStream:
    """The text of one request."""
    return codec.stream(request.stop, min_tokens=request.constraints.min_tokens, include=request.include_stop)


class Decoder:
    """Ids to text in one shot, once those that give none (special, or in no vocabulary) have been left out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        self._spoken = frozenset(vocabulary.values()) - special
        self._bytes = frozenset(id for token, id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    def __call__(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def spoken(self, ids: Iterable[int]) -> list[int]:
        """Those ids that can give text."""
        return [id for id in ids if id in self._spoken]

    def settled(self, last: int, text: str) -> bool:
        """Is `text`, whose last token is `last`, final whatever follows?

        A character's first bytes decode to U+FFFD until the rest is there; and one wrong byte spoils the whole run of
        byte-fallback tokens that it ends.
        """
        return last not in self._bytes and not text.endswith(_REPLACEMENT)


class _Window:
    """The newest ids of a stream, and a few before them: how a token is spelled can depend on what it follows.

    The ids up to `_cut` are settled.  `_known` characters of the window's text were handed out.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._cut = self._known = 0
        self._text = ""

    @property
    def pending(self) -> str:
        """The text that was not handed out yet, as it would be if nothing followed."""
        return self._text[self._known :]

    def add(self, ids: Iterable[int]) -> bool:
        """Take in ids; False when none of them can give text."""
        spoken = self._decoder.spoken(ids)
        if spoken:
            self._ids += spoken
            self._text = self._decoder(self._ids)
        return bool(spoken)

    def settle(self) -> bool:
        """Hand out what is pending, if it is final."""
        if not self._ids or not self._decoder.settled(self._ids[-1], self._text):
            return False
        alone = self._decoder(self._ids[self._cut :])
        # Ids without text of their own (a leading space that is stripped) would not be seen to come before the next.
        if alone:
            del self._ids[: self._cut]
            self._cut, self._text = len(self._ids), alone
        self._known = len(self._text)
        return True


class Detokenizer:
    """The text of one stream of ids, cut at the first stop string.

    All pieces together equal the one-shot decode of all ids, up to where a stop string starts.  Text is held back while
    a later token could still change it, and while it could be the beginning of a stop string.
    """

    def __init__(self, decoder: Decoder, stop: Sequence[str], min_tokens: int = 0, include: bool = False) -> None:
        self._window = _Window(decoder)
        self._decoder, self._stop, self._include = decoder, tuple(stop), include
        self._early = min_tokens
        self._held = ""
        # How much of the text that was not handed out yet is too early for a stop string to end in.
        self._barred = 0

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        """The text that these ids complete; and, if they complete a stop string, how many of them that took.

        The stop string that is complete after the fewest ids counts; of several, the one that starts first.
        """
        if not self._stop:
            return self._push_block(token_ids), None
        pieces: list[str] = []
        for used, token in enumerate(token_ids, start=1):
            early, self._early = self._early > 0, self._early - 1
            if not self._window.add((token,)):
                continue
            text = self._held + self._window.pending
            if early:
                self._barred = len(text.rstrip(_REPLACEMENT))
            end = self._end_in(text)
            if end is not None:
                self._held, self._window = "", _Window(self._decoder)
                return "".join((*pieces, text[:end])), used
            if self._window.settle():
                free = len(text) - self._beginning_at_end(text)
                pieces.append(text[:free])
                self._held = text[free:]
                self._barred = max(0, self._barred - free)
        return "".join(pieces), None

    def flush(self) -> str:
        """The text held back so far; nothing may be pushed afterwards."""
        return self._held + self._window.pending

    def _push_block(self, token_ids: tuple[int, ...]) -> str:
        self._window.add(token_ids)
        text = self._window.pending
        return text if self._window.settle() else ""

    def _end_in(self, text: str) -> int | None:
        """Where the text ends, if a stop string is complete in it: where the first one starts, or ends."""
        # A character of which only the first bytes are there is not yet the one that it looks like.
        complete = text.rstrip(_REPLACEMENT)
        firsts = ((complete.find(stop, max(0, self._barred + 1 - len(stop))), stop) for stop in self._stop)
        found = [(start, start + len(stop)) for start, stop in firsts if start >= 0]
        return min(found)[self._include] if found else None

    def _beginning_at_end(self, text: str) -> int:
        """How many characters at the end of `text` could be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            lengths = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((length for length in lengths if text.endswith(stop[:length])), longest)
        return longest


class _NoText:
    """The stream of a model without a tokenizer."""

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        return "", None

    def flush(self) -> str:
        return ""


def _eos_ids(directory: Path, tokenizer: Any | None) -> frozenset[int]:
    ids = {None if tokenizer is None else tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for part in (values, values.get("text_config") or {}):
            eos = part.get("eos_token_id")
            ids |= set(eos) if isinstance(eos, list) else {eos}
    return frozenset(id for id in ids if id is not None)
