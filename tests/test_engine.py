"""The engine against the plain transformers forward: every logit it gives is compared with that of the whole path."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.actors import torch_engine as engine_module
from paceline.actors.attention import UnsupportedModel, refuse_unsupported
from paceline.actors.blocks import OutOfBlocks
from paceline.actors.engine import Feed
from paceline.actors.torch_engine import TorchEngine, load_engine
from paceline.kernels import tree_attention as kernel
from tiny_models import CONFIGS, VOCAB, WINDOW, tiny_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

ATOL = 1e-4


def chain(count: int, after: int = -1, first: int = 0) -> tuple[int, ...]:
    """Parents of `count` slots in a row below slot `after`; the first one is slot `first`."""
    return (after, *range(first, first + count - 1))


def feed(sequence: int, tokens: Sequence[int], parents: Sequence[int]) -> Feed:
    return Feed(sequence, tuple(tokens), tuple(parents), tuple(range(len(tokens))))


def plain_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """The logits of the plain forward, float32 [len(tokens), vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0].float()


@dataclass
class Shadow:
    """What one sequence ought to hold: plain lists, and no cache at all."""

    tokens: list[int] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)  # (token, parent slot)

    def path(self, slot: int) -> list[int]:
        """The slots from the committed prefix down to `slot`."""
        slots: list[int] = []
        while slot >= 0:
            slots.insert(0, slot)
            slot = self.pending[slot][1]
        return slots

    def text(self, slot: int) -> tuple[int, ...]:
        return (*self.tokens, *(self.pending[p][0] for p in self.path(slot)))

    def commit(self, path: Sequence[int]) -> dict[int, int]:
        below = [p for p in range(len(self.pending)) if path[-1] in self.path(p) and p != path[-1]]
        renamed = {old: new for new, old in enumerate(below)}
        self.tokens += [self.pending[p][0] for p in path]
        self.pending = [(self.pending[p][0], renamed.get(self.pending[p][1], -1)) for p in below]
        return renamed


class Pair:
    """An engine and, beside it, the plain model and a Shadow per sequence.  Every call compares the two sides."""

    def __init__(
        self, model: Any, reference: Any, kv_tokens: int = 512, block_size: int = 4, atol: float = ATOL
    ) -> None:
        self.engine = TorchEngine(model, kv_tokens, block_size)
        self.atol = atol
        self.shadows: dict[int, Shadow] = {}
        self.reference = reference
        self.known: dict[tuple[int, ...], Tensor] = {}
        self.seen: dict[bytes, tuple[int, list[Tensor]]] = {}
        self.texts: list[list[int]] = []

    def plain(self, text: tuple[int, ...]) -> Tensor:
        """The plain forward's logits after `text`."""
        if text not in self.known:
            logits = plain_logits(self.reference, text)
            self.known.update((text[: i + 1], row) for i, row in enumerate(logits))
        return self.known[text]

    def open(self, tokens: Sequence[int] = (), salt: bytes | None = None) -> int:
        """A sequence with these tokens committed."""
        sequence = self.adopt(tokens, salt)
        rest = tokens[self.engine.length(sequence) :]
        if rest:
            self.step(feed(sequence, rest, chain(len(rest))))
            self.commit(sequence, range(len(rest)))
        return sequence

    def adopt(self, tokens: Sequence[int], salt: bytes | None) -> int:
        """A sequence with as many of these tokens committed as are cached."""
        cost, free = self.engine.cost(tokens, salt), self.engine.free_blocks
        sequence = self.engine.open(tokens, salt)
        cached = self.engine.length(sequence)
        assert cached == 0 or cached < len(tokens)
        size = self.engine.block_size
        taken = free - self.engine.free_blocks + -(-len(tokens) // size) - cached // size
        assert cost == taken, "what it takes in the end is not what it was said to cost"
        self.shadows[sequence] = Shadow(list(tokens[:cached]))
        self.check()
        return sequence

    def step(self, *feeds: Feed) -> list[Tensor]:
        results = self.engine.step(feeds)
        for one, logits in zip(feeds, results, strict=True):
            shadow = self.shadows[one.sequence]
            base = len(shadow.pending)
            shadow.pending += zip(one.tokens, one.parents, strict=True)
            assert logits.shape == (len(one.rows), self.engine.vocab_size)
            assert logits.dtype == torch.float32
            # The longest first: one plain forward tells the logits of all its prefixes.
            texts = [(shadow.text(base + row), got) for row, got in zip(one.rows, logits, strict=True)]
            for text, got in sorted(texts, key=lambda pair: -len(pair[0])):
                torch.testing.assert_close(got, self.plain(text), atol=self.atol, rtol=0)
        self.check()
        return results

    def commit(self, sequence: int, path: Sequence[int]) -> dict[int, int]:
        renamed = self.engine.commit(sequence, path)
        assert renamed == self.shadows[sequence].commit(path)
        self.check()
        return renamed

    def truncate(self, sequence: int, length: int) -> None:
        self.engine.truncate(sequence, length)
        shadow = self.shadows[sequence]
        shadow.tokens, shadow.pending = shadow.tokens[:length], []
        self.check()

    def close(self, sequence: int) -> None:
        self.engine.close(sequence)
        self.shadows.pop(sequence, None)
        self.check()

    def check(self) -> None:
        self.engine.check()
        for sequence, shadow in self.shadows.items():
            assert self.engine.length(sequence) == len(shadow.tokens)
            assert self.engine.pending(sequence) == len(shadow.pending)
        self.watch()

    def watch(self) -> None:
        """What can be found has not changed since it could be."""
        pool, size = self.engine.pool, self.engine.block_size
        found = {key: block for block in range(pool.blocks) if (key := pool.key(block)) is not None}
        self.seen = {key: rows for key, rows in self.seen.items() if key in found}
        for key, block in found.items():
            rows = [plane[:, block * size : (block + 1) * size].clone() for plane in self.engine._cache.pools]
            if key not in self.seen:
                self.seen[key] = (block, rows)
            before, old = self.seen[key]
            if before == block:
                assert all(torch.equal(a, b) for a, b in zip(old, rows, strict=True)), f"block {block} was written"

    def go_on(self) -> None:
        """Prove that every sequence holds what it should, by a token below each pending slot and below the prefix."""
        for sequence, shadow in list(self.shadows.items()):
            parents = range(-1, len(shadow.pending))
            self.step(feed(sequence, [7 + parent % 5 for parent in parents], parents))


@functools.cache
def reference(name: str) -> Any:
    return tiny_model(name)


@functools.cache
def hosted(name: str) -> Any:
    """The same model again, for engines: they replace its attention."""
    return tiny_model(name)


def pair(name: str, **options: Any) -> Pair:
    return Pair(hosted(name), reference(name), **options)


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


# Three branches of different depth, slots far from their parents: distance by slot and by depth differ.
BUSHY = (-1, -1, 0, 0, 1, 2, 2, 5, 6, 7, 9, 10, 3, 4, 11, 12, -1, 16)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_chain_has_the_logits_of_the_plain_forward(name: str):
    two = pair(name)
    tokens = some_tokens(4 * WINDOW)
    sequence = two.open()
    two.step(feed(sequence, tokens[:10], chain(10)))
    two.step(feed(sequence, tokens[10:], chain(len(tokens) - 10, after=9, first=10)))
    two.commit(sequence, range(len(tokens)))
    for token in some_tokens(5, seed=1):
        two.step(feed(sequence, [token], [-1]))
        two.commit(sequence, [0])
    for slot, token in enumerate(some_tokens(2 * WINDOW, seed=2)):
        two.step(feed(sequence, [token], [slot - 1]))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("committed", [0, WINDOW - 2, 3 * WINDOW])
def test_every_path_of_a_tree_has_the_logits_of_the_plain_forward(name: str, committed: int):
    two = pair(name)
    sequence = two.open(some_tokens(committed))
    two.step(feed(sequence, some_tokens(len(BUSHY), seed=1), BUSHY))
    depths = [len(two.shadows[sequence].path(slot)) for slot in range(len(BUSHY))]
    assert max(depths) > WINDOW, "the tree reaches beyond a window of its own"
    two.step(feed(sequence, some_tokens(3, seed=2), [14, 15, 17]))


@pytest.mark.parametrize("padding", [1.0, 1.25, 100.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_pass_over_sequences_of_different_lengths_and_trees(
    name: str, padding: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernel, "_PADDING_ALLOWED", padding)
    two = pair(name)
    lengths = [0, 3, 17, 9, 10, 18]
    sequences = [two.open(some_tokens(length, seed=length)) for length in lengths]
    trees = [BUSHY, (-1, 0), (-1, -1, 0), chain(5), (-1,), BUSHY[:4]]
    two.step(*(feed(s, some_tokens(len(t), seed=s), t) for s, t in zip(sequences, trees, strict=True)))
    two.commit(sequences[0], [0, 2])
    two.commit(sequences[3], [0, 1, 2])
    two.go_on()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("path", [(0,), (0, 2), (0, 2, 5, 7), (1, 4, 13), (16, 17)])
def test_after_a_commit_the_survivors_and_the_prefix_go_on(name: str, path: tuple[int, ...]):
    two = pair(name)
    sequence = two.open(some_tokens(5))
    two.step(feed(sequence, some_tokens(len(BUSHY), seed=1), BUSHY))
    survivors = two.commit(sequence, path)
    assert bool(survivors) == (path[-1] in BUSHY)
    two.go_on()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [0, 1, 8, 11, 12])
def test_after_a_truncation_the_prefix_goes_on(name: str, length: int):
    two = pair(name)
    sequence = two.open(some_tokens(12))
    two.step(feed(sequence, some_tokens(4), (-1, 0, 0, 1)))
    two.truncate(sequence, length)
    two.go_on()


def random_parents(rng: random.Random, pending: int, count: int) -> tuple[int, ...]:
    if rng.random() < 0.4:
        return chain(count, after=rng.randrange(-1, pending), first=pending)
    return tuple(rng.randrange(-1, pending + i) for i in range(count))


def random_feed(rng: random.Random, sequence: int, shadow: Shadow) -> Feed:
    count = rng.choice([1, 1, 2, 3, 5, 8])
    rows = tuple(rng.choices(range(count), k=rng.randint(0, count)))
    tokens = tuple(rng.choices(range(VOCAB), k=count))
    return Feed(sequence, tokens, random_parents(rng, len(shadow.pending), count), rows)


USUAL = ("step",) * 6 + ("commit",) * 6 + ("truncate", "open", "close")
SHARING = ("step",) * 3 + ("commit",) * 4 + ("truncate", "truncate", "adopt", "adopt", "close", "close")


def act(two: Pair, rng: random.Random, done: Counter[str], kinds: Sequence[str]) -> None:
    """One random thing that a verifier may do."""
    kind = rng.choice(kinds if len(two.shadows) > 2 else [kind for kind in kinds if kind in ("open", "adopt")])
    sequence, shadow = rng.choice(list(two.shadows.items()) or [(-1, Shadow())])
    match kind:
        case "open":
            two.open()
        case "adopt":
            kind = adopt_at_random(two, rng)
        case "step":
            chosen = rng.sample(list(two.shadows), rng.randint(1, len(two.shadows)))
            kind = "batch" if len(chosen) > 1 else "step"
            try:
                two.step(*(random_feed(rng, id, two.shadows[id]) for id in chosen))
            except OutOfBlocks:
                kind = "out of blocks"
                two.check()
        case "commit" if shadow.pending:
            path = max((shadow.path(rng.randrange(len(shadow.pending))) for _ in range(3)), key=len)
            kind = "kept" if two.commit(sequence, path[: rng.choice([1, len(path), len(path)])]) else "commit"
        case "truncate":
            # Mostly near the end, so that sequences outgrow their windows.
            length = max(0, len(shadow.tokens) - rng.choice([0, 1, 2, 3, len(shadow.tokens)]))
            kept = two.engine._sequences[sequence].blocks[: -(-length // two.engine.block_size)]
            shared = bool(length % two.engine.block_size) and two.engine.pool.holders(kept[-1]) > 1
            try:
                two.truncate(sequence, length)
            except OutOfBlocks:
                kind, shared = "no copy", False
                two.check()
            done["copied"] += shared
        case "close":
            two.close(sequence)
    done[kind] += 1


def adopt_at_random(two: Pair, rng: random.Random) -> str:
    """With a text that some sequence has, or had a moment ago, so that its blocks are mostly found."""
    old = max(rng.choices(two.texts, k=5), key=len)
    sequence = two.adopt([*old, *rng.choices(range(VOCAB), k=2)], rng.choice([None, b"b", *[b"a"] * 8]))
    return "adopted" if two.engine.length(sequence) else "open"


def run_course(two: Pair, rng: random.Random, done: Counter[str], kinds: Sequence[str] = USUAL) -> None:
    for _ in range(100):
        two.texts = [*two.texts, *(list(shadow.tokens) for shadow in two.shadows.values())][-40:]
        act(two, rng, done, kinds)
        done["beyond the window"] += any(len(shadow.tokens) > 2 * WINDOW for shadow in two.shadows.values())
    for sequence in list(two.shadows):
        two.close(sequence)
    assert two.engine.pool.free_blocks == two.engine.pool.blocks


@pytest.mark.parametrize("name", CONFIGS)
def test_any_course_of_calls_equals_the_naive_model(name: str, monkeypatch: pytest.MonkeyPatch):
    done = count_hard_paths(monkeypatch)
    for seed, block_size in enumerate([1, 3, 4, 7]):
        if seed == 2:
            monkeypatch.setattr(kernel, "_PADDING_ALLOWED", 100.0)  # from here on, all sequences in one group
        run_course(pair(name, kv_tokens=84, block_size=block_size), random.Random(f"{name} {seed}"), done)
    hard = ("batch", "kept", "out of blocks", "truncate", "padded", "scattered", "moved", "beyond the window")
    assert not [kind for kind in hard if done[kind] < 3], f"the courses hardly came to these: {done}"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_any_course_with_shared_blocks_equals_the_naive_model(name: str):
    done: Counter[str] = Counter()
    for seed, block_size in enumerate([3, 4]):
        two = pair(name, kv_tokens=120, block_size=block_size)
        two.open(some_tokens(24), b"a")
        run_course(two, random.Random(f"{name} {seed}"), done, SHARING)
    hard = ("adopted", "copied", "kept", "beyond the window")
    assert not [kind for kind in hard if done[kind] < 3], f"the courses hardly came to these: {done}"


def count_hard_paths(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts passes that padded a sequence, that read one in scattered blocks, and commits that moved rows."""
    done: Counter[str] = Counter()
    attend, compact = engine_module.tree_attention, engine_module.kv_compact

    def watched_attention(*arguments: Any, **options: Any) -> Tensor:
        batch: kernel.TreeBatch = arguments[3]
        done["padded"] += any(group.padding is not None for group in batch.groups)
        done["scattered"] += any(not sequence.is_contiguous() for sequence in batch.sequences)
        return attend(*arguments, **options)

    def watched_compact(*arguments: Tensor) -> None:
        done["moved"] += 1
        compact(*arguments)

    monkeypatch.setattr(engine_module, "tree_attention", watched_attention)
    monkeypatch.setattr(engine_module, "kv_compact", watched_compact)
    return done


def scale(module_name: str, factor: float = 0.0) -> Callable[[Any], None]:
    """Change every parameter of modules of this name."""

    def change(model: Any) -> None:
        touched = [p for name, p in model.named_parameters() if module_name in name]
        assert touched, f"there is no {module_name}"
        for parameter in touched:
            parameter.mul_(factor)

    return change


FEATURES: dict[str, tuple[str, dict[str, Any], Callable[[Any], None] | None]] = {
    "Llama's RoPE base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, None),
    "Llama's linear RoPE scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        None,
    ),
    "YaRN's attention factor": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        None,
    ),
    "tied head": ("llama_tied", {}, scale("embed_tokens", 0.5)),
    "Qwen2's query bias": ("qwen2", {}, scale("q_proj.bias")),
    "Qwen2's key and value bias": ("qwen2", {}, scale("v_proj.bias")),
    "Qwen3's query norm": ("qwen3", {}, scale("q_norm", 3.0)),
    "Qwen3's key norm": ("qwen3", {}, scale("k_norm", 3.0)),
    "Gemma 2's window": ("gemma2", {"sliding_window": WINDOW - 1}, None),
    "Gemma 2's full layer": ("gemma2", {"layer_types": ["sliding_attention"] * 3}, None),
    "Gemma 2's attention soft cap": ("gemma2", {"attn_logit_softcapping": None}, None),
    "Gemma 2's final soft cap": ("gemma2", {"final_logit_softcapping": None}, None),
    "Gemma 2's query scale": ("gemma2", {"query_pre_attn_scalar": 2}, None),
    "Gemma 3's window": ("gemma3", {"sliding_window": WINDOW + 1}, None),
    "Gemma 3's QK norm": ("gemma3", {}, scale("q_norm", 3.0)),
    "Gemma 3's layer order": ("gemma3", {"layer_types": ["full_attention", *["sliding_attention"] * 2]}, None),
    "Mistral's window": ("mistral", {"sliding_window": None}, None),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_tiny_models_really_use_the_feature_and_the_engine_follows(feature: str):
    name, changes, change = FEATURES[feature]
    models = [tiny_model(name, **changes) for _ in range(2)]
    for model in models:
        if change is not None:
            change(model)
    two = Pair(*models)
    sequence = two.open(some_tokens(2 * WINDOW))
    two.step(feed(sequence, some_tokens(len(BUSHY), seed=1), BUSHY))
    text = two.shadows[sequence].text(14)
    assert (plain_logits(reference(name), text) - plain_logits(models[1], text)).abs().max() > 100 * ATOL


def two_sequences(name: str = "mistral") -> tuple[Pair, int, int]:
    """A Pair with pending trees; the pool has room for one more block."""
    two = pair(name, kv_tokens=40, block_size=4)
    first, second = two.open(some_tokens(14)), two.open(some_tokens(5))
    two.step(feed(first, [5, 6, 7], (-1, 0, 0)), feed(second, [8, 9], (-1, -1)))
    return two, first, second


WRONG_FEEDS = {
    "no slot to follow": (Feed(0, (5, 6), (-1, 5), (0,)), "slot 4 cannot follow slot 5"),
    "a slot after itself": (Feed(0, (5,), (3,), (0,)), "slot 3 cannot follow slot 3"),
    "a negative slot": (Feed(0, (5,), (-2,), (0,)), "cannot follow slot -2"),
    "token too large": (Feed(0, (5, VOCAB), (-1, 0), (0,)), f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
    "token negative": (Feed(0, (-1,), (-1,), (0,)), "token -1 is outside the vocabulary"),
    "unknown row": (Feed(0, (5,), (-1,), (1,)), "row 1 of 1 tokens"),
    "nothing": (Feed(0, (), (), ()), "0 tokens and 0 parents"),
    "parents missing": (Feed(0, (5, 6), (-1,), ()), "2 tokens and 1 parents"),
    "unknown sequence": (Feed(9, (5,), (-1,), ()), "no open sequence 9"),
    "beyond the context": (Feed(0, (5,) * 120, chain(120, after=2, first=3), ()), "position 135 is beyond the context"),
}


@pytest.mark.parametrize("what", WRONG_FEEDS)
def test_a_wrong_feed_is_refused_and_its_neighbours_stay_as_they_were(what: str):
    wrong, message = WRONG_FEEDS[what]
    two, first, second = two_sequences()
    assert first == 0
    with pytest.raises(ValueError, match=message):
        two.engine.step([feed(second, [4], [-1]), wrong])
    two.check()
    two.truncate(second, 5)
    two.go_on()


def test_the_last_position_of_the_context_can_be_used():
    two = pair("llama")
    sequence = two.open(some_tokens(127))
    two.step(feed(sequence, [5, 6], [-1, -1]))
    with pytest.raises(ValueError, match="position 128 is beyond the context of 128"):
        two.engine.step([feed(sequence, [7], [1])])
    two.commit(sequence, [1])
    with pytest.raises(ValueError, match="position 128 is beyond the context of 128"):
        two.engine.step([feed(sequence, [7], [-1])])


def test_two_feeds_for_one_sequence_are_refused():
    two, first, second = two_sequences()
    with pytest.raises(ValueError, match="one Feed per step"):
        two.engine.step([feed(first, [4], [-1]), feed(second, [4], [-1]), feed(first, [5], [-1])])
    two.check()
    assert two.engine.step([]) == []


def test_running_out_of_blocks_changes_nothing():
    two, first, second = two_sequences()
    free = two.engine.pool.free_blocks
    with pytest.raises(OutOfBlocks, match=f"{free} are free"):
        two.engine.step([feed(second, [4], [-1]), feed(first, some_tokens(40), chain(40))])
    two.check()
    assert two.engine.pool.free_blocks == free
    two.truncate(second, 5)
    two.go_on()


def test_a_failing_forward_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    two, first, second = two_sequences()
    free = two.engine.pool.free_blocks
    passes = Counter[str]()

    def fail(*arguments: Any, **options: Any) -> Tensor:
        passes["failed"] += 1
        raise MemoryError("no memory for the scores")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "tree_attention", fail)
        with pytest.raises(MemoryError):
            two.engine.step([feed(second, [4] * 4, chain(4)), feed(first, [4], [-1])])
    assert passes["failed"] == 1
    two.check()
    assert two.engine.pool.free_blocks == free
    two.truncate(second, 5)
    two.go_on()


@pytest.mark.parametrize("path", [(), (1,), (0, 0), (1, 0), (0, 3), (-1,), (2,), (0, 2, 5)])
def test_a_path_that_is_no_chain_from_the_prefix_is_refused(path: tuple[int, ...]):
    two, first, _ = two_sequences()
    two.truncate(first, 14)
    two.step(feed(first, [5, 6, 7], (-1, 0, 1)))
    with pytest.raises(ValueError, match="empty path commits nothing" if not path else "no chain of pending slots"):
        two.engine.commit(first, path)
    two.check()


@pytest.mark.parametrize("length", [-1, 15])
def test_truncating_to_what_is_not_there_is_refused(length: int):
    two, first, _ = two_sequences()
    with pytest.raises(ValueError, match=f"14 committed positions, so not {length} to keep"):
        two.engine.truncate(first, length)
    two.check()


def test_a_cut_into_a_shared_block_needs_room_for_a_copy():
    two = pair("llama", kv_tokens=16, block_size=4)
    first, second = two.open(some_tokens(16), b""), two.adopt(some_tokens(16), b"")
    assert two.engine.length(second) == 12
    with pytest.raises(OutOfBlocks):
        two.truncate(second, 10)
    two.check()
    two.truncate(first, 12)
    two.truncate(second, 10)
    two.close(first)
    two.go_on()
    again = two.adopt(some_tokens(16), b"")
    assert two.engine.length(again) == 12, "the copy took nothing from what can be found"


def test_a_prompt_is_never_wholly_cached_and_a_salt_finds_only_its_own():
    two = pair("llama", kv_tokens=200, block_size=4)
    text = some_tokens(16)
    two.close(two.open(text, b"a"))
    two.close(two.open(text))
    lengths = [two.engine.length(two.adopt(tokens, b"a")) for tokens in (text, text[:13], text[:12], text[:4], [])]
    assert lengths == [12, 12, 8, 0, 0]
    assert [two.engine.length(two.adopt(text, salt)) for salt in (b"b", b"", None)] == [0, 0, 0]
    two.go_on()


def test_only_committed_tokens_are_ever_found():
    two = pair("llama", kv_tokens=200, block_size=4)
    text = some_tokens(12)
    sequence = two.open(text[:6], b"")
    two.step(feed(sequence, text[6:], chain(6)))
    assert two.engine.length(two.adopt([*text, 5], b"")) == 4
    two.commit(sequence, range(3))
    assert two.engine.length(two.adopt([*text, 5], b"")) == 8
    two.close(sequence)
    assert two.engine.length(two.adopt([*text, 5], b"")) == 8


def test_a_closed_sequence_is_gone_and_its_id_is_not_used_again():
    two, first, second = two_sequences()
    two.close(first)
    two.close(first)
    for call in (two.engine.length, two.engine.pending):
        with pytest.raises(ValueError, match=f"no open sequence {first}"):
            call(first)
    assert two.open(some_tokens(14)) not in (first, second)


def test_fits_counts_whole_blocks_of_the_whole_pool():
    engine = TorchEngine(hosted("llama"), kv_tokens=140, block_size=4)
    engine.step([feed(engine.open(), [5], [-1])])
    assert engine.fits([])
    assert engine.fits([128, 12])
    assert not engine.fits([127, 13])
    assert engine.fits([1] * 35)
    assert not engine.fits([1] * 36)
    assert engine.fits([130]), "pending slots may take more positions than the context has"


def test_what_fits_can_really_be_held():
    two = pair("llama", kv_tokens=40, block_size=4)
    lengths = [9, 12, 13]
    assert two.engine.fits(lengths)
    for length in lengths:
        two.open(some_tokens(length))


@pytest.mark.parametrize("padding", [1.0, 100.0])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_one_sequences_nan_never_reaches_another(name: str, padding: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "_PADDING_ALLOWED", padding)
    bad = 5
    # A tied head would hand the NaN to everybody by itself.
    models = [tiny_model(name, tie_word_embeddings=False) for _ in range(2)]
    for model in models:
        model.get_input_embeddings().weight[bad] = torch.nan
    two = Pair(*models, kv_tokens=60, block_size=4)
    # The pool's first row, and every row of this one, is NaN throughout.
    worst = two.engine.open()
    two.engine.step([feed(worst, [bad] * 3, chain(3))])
    good, ill = two.open([6, 7, 8, 9, 10, 11, 12]), two.open([6, 7, 8])
    steps = [feed(ill, [bad, 9], chain(2)), feed(good, [9, 10, 11], (-1, 0, 0))]
    results = two.engine.step(steps)
    assert results[0].isnan().all()
    assert results[1].isfinite().all()
    two.shadows[good].pending = [(9, -1), (10, 0), (11, 0)]
    two.shadows[ill].pending = [(bad, -1), (9, 0)]
    two.commit(ill, [0, 1])
    two.commit(good, [0, 1])
    # What is cut off stays in the cache as garbage, and so do the rows of a closed sequence.
    two.truncate(ill, 3)
    two.step(feed(ill, [9], [-1]), feed(good, [10, 11, 12], (-1, -1, 0)))
    two.engine.step([feed(ill, [bad] * 20, chain(20, after=0, first=1))])
    two.close(ill)
    heirs = [two.open(some_tokens(11)), two.open(some_tokens(6))]
    feeds = [feed(heir, [9, 10][: i + 1], chain(i + 1)) for i, heir in enumerate(heirs)]
    results = two.engine.step([*feeds, feed(good, [9], [-1]), feed(worst, [9], [2])])
    assert [bool(logits.isfinite().all()) for logits in results] == [True, True, True, False]


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_runs_close_to_the_plain_forward(name: str):
    model, plain = (tiny_model(name, dtype=torch.bfloat16) for _ in range(2))
    engine = TorchEngine(model, kv_tokens=128, block_size=4)
    engine.check_against_reference()
    tokens = some_tokens(30)
    feeds = [feed(engine.open(), tokens[:count], chain(count)) for count in (30, 11, 12)]
    for one, logits in zip(feeds, engine.step(feeds), strict=True):
        expected = plain_logits(plain, one.tokens)
        assert logits.dtype == torch.float32
        assert (logits - expected).norm() < 0.08 * expected.norm()
    engine.check()


def test_logits_are_the_callers_own():
    engine = TorchEngine(hosted("llama"), kv_tokens=64)
    logits = engine.step([feed(engine.open(), [5, 6], (-1, 0))])[0]
    logits += 1
    logits[0].zero_()
    assert not logits.requires_grad


def test_rows_come_in_the_order_asked_for():
    engine = TorchEngine(hosted("llama"), kv_tokens=64)
    a, b = engine.open(), engine.open()
    whole = plain_logits(reference("llama"), [5, 6, 7])
    some, none = engine.step([Feed(a, (5, 6, 7), (-1, 0, 1), (2, 0, 2)), Feed(b, (5, 6), (-1, 0), ())])
    torch.testing.assert_close(some, whole[[2, 0, 2]], atol=ATOL, rtol=0)
    assert none.shape == (0, VOCAB)
    assert engine.step([Feed(a, (8,), (0,), ())])[0].shape == (0, VOCAB)


def test_engines_in_one_process_do_not_meet():
    ours, others = pair("gemma2"), pair("llama")
    a, b = ours.open(some_tokens(9)), others.open(some_tokens(9))
    for _ in range(2):
        ours.step(feed(a, [5, 6], (-1, -1)))
        others.step(feed(b, [5, 6], (-1, 0)))


@pytest.mark.parametrize(("kv_tokens", "block_size"), [(0, 4), (64, 0), (-1, 4)])
def test_a_cache_without_room_is_refused(kv_tokens: int, block_size: int):
    with pytest.raises(ValueError, match="kv_tokens and block_size must be positive"):
        TorchEngine(hosted("llama"), kv_tokens, block_size)


# What the engine cannot run


def llama_with_rope(kind: str) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    return LlamaConfig(rope_parameters={**rope, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16})


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "Mamba": (MambaConfig, "mamba keeps a running state, which cannot be rewound"),
    "T5": (T5Config, "t5 is an encoder-decoder"),
    "dynamic RoPE": (lambda: llama_with_rope("dynamic"), "llama has dynamic RoPE, whose cached keys would change"),
    "longrope": (lambda: llama_with_rope("longrope"), "llama has longrope RoPE, whose cached keys would change"),
    "Qwen3-Next": (Qwen3NextConfig, "qwen3_next keeps a running state, which cannot be rewound"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_rewound_is_refused_with_the_reason_and_what_works(what: str):
    make, message = REFUSED[what]
    with pytest.raises(UnsupportedModel, match=message) as refused:
        refuse_unsupported(make())
    assert "such as Llama, Qwen, Mistral or Gemma" in str(refused.value)


def test_a_hybrid_is_refused_before_its_weights_are_read(tmp_path: Path):
    Qwen3NextConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="qwen3_next keeps a running state"):
        load_engine(tmp_path, torch.device("cpu"), torch.float32, kv_tokens=64)


def test_what_only_the_weights_tell_is_refused_too():
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedModel, match="layer 0 uses attention sinks"):
        TorchEngine(model, kv_tokens=64)


# The check of an engine against its own model


def nothing(*arguments: Any) -> None:
    return None


def ignoring(option: str, value: Any) -> Callable[..., Tensor]:
    def broken(*arguments: Any, **options: Any) -> Tensor:
        return kernel.tree_attention(*arguments, **{**options, option: value})

    return broken


def test_the_self_check_passes_and_leaves_nothing_behind():
    for name in CONFIGS:
        two = pair(name)
        sequence = two.open(some_tokens(9))
        two.engine.check_against_reference()
        two.go_on()
        two.close(sequence)
        assert two.engine.pool.free_blocks == two.engine.pool.blocks


@pytest.mark.parametrize(
    ("name", "option", "value"), [("gemma2", "softcap", None), ("mistral", "window", None), ("llama", "scaling", 0.2)]
)
def test_the_self_check_finds_a_broken_attention(name: str, option: str, value: Any, monkeypatch: pytest.MonkeyPatch):
    engine = TorchEngine(hosted(name), kv_tokens=64)
    monkeypatch.setattr(engine_module, "tree_attention", ignoring(option, value))
    with pytest.raises(UnsupportedModel, match="computes other logits through paged attention than by itself"):
        engine.check_against_reference()
    assert engine.pool.free_blocks == engine.pool.blocks


def test_the_self_check_needs_room():
    engine = TorchEngine(hosted("llama"), kv_tokens=16)
    engine.step([feed(engine.open(), [5], [-1])])
    with pytest.raises(OutOfBlocks, match="self-check needs free blocks"):
        engine.check_against_reference()


@pytest.mark.parametrize(("place", "name"), [(kernel._Group, "_mask"), (engine_module, "kv_compact")])
def test_the_self_check_finds_what_is_left_out(place: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    engine = TorchEngine(hosted("llama"), kv_tokens=64)
    monkeypatch.setattr(place, name, nothing)
    with pytest.raises(UnsupportedModel, match="computes other logits"):
        engine.check_against_reference()


def test_a_saved_checkpoint_is_loaded_and_a_directory_without_one_is_not(tmp_path: Path):
    reference("qwen3").save_pretrained(tmp_path / "model")
    engine = load_engine(tmp_path / "model", torch.device("cpu"), torch.float32, kv_tokens=64)
    logits = engine.step([feed(engine.open(), [5, 6, 7], chain(3))])[0]
    torch.testing.assert_close(logits, plain_logits(reference("qwen3"), [5, 6, 7]), atol=ATOL, rtol=0)
    with pytest.raises((OSError, ValueError)):
        load_engine(tmp_path, torch.device("cpu"), torch.float32, kv_tokens=64)


# A real model


@pytest.mark.slow
def test_smollm2_has_the_logits_of_the_plain_forward(smollm2_dir: Path):
    engine = load_engine(smollm2_dir, torch.device("cpu"), torch.float32, kv_tokens=1024)
    plain = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32, attn_implementation="eager")
    # Thirty layers round more than the tiny models' three, and the logits are ten times as large.
    two = Pair(engine.model, plain, kv_tokens=1024, block_size=16, atol=1e-3)
    rng = random.Random(0)
    tokens = [rng.choices(range(engine.vocab_size), k=count) for count in (150, 40, 61)]
    chained = two.open(tokens[0])
    two.step(feed(chained, tokens[1][:8], chain(8)))
    two.commit(chained, range(5))
    bushy, short = two.open(tokens[1]), two.open(tokens[2])
    two.step(feed(bushy, tokens[2][: len(BUSHY)], BUSHY))
    two.commit(bushy, [0, 2, 6])
    two.step(feed(short, tokens[0][:4], (-1, -1, 0, 1)), feed(bushy, [7, 8], (-1, 0)), feed(chained, [9], [-1]))
