"""The prompts of `paceline bench run`: 84 of them in six classes, written for it."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("prompts.toml")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user asks.  kind: its class, such as "code"."""

    kind: str
    text: str


def load(count: int | None = None) -> list[Prompt]:
    """The first `count` prompts, taken from all classes in turn; all of them by default.

    Raises ValueError if there are not so many.
    """
    classes = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    prompts = [
        Prompt(kind, text.strip())
        for texts in itertools.zip_longest(*classes.values())
        for kind, text in zip(classes, texts, strict=True)
        if text is not None
    ]
    if count is not None and not 1 <= count <= len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts, so from 1 to {len(prompts)} can be asked for, not {count}")
    return prompts[:count]
