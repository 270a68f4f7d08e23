"""The engine for Hugging Face models: paged keys and values, and a whole batch of trees in one forward."""

from __future__ import annotations

import itertools
import logging
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from paceline.actors.attention import ATTENTION, Layer, UnsupportedModel, probe_layers, refuse_unsupported
from paceline.actors.blocks import BlockPool, OutOfBlocks, PoolBroken, block_keys
from paceline.actors.engine import Feed
from paceline.actors.graphs import Capture, CudaCapture, Graphs
from paceline.actors.packed import speed_up
from paceline.actors.vocabulary import trim_head
from paceline.kernels.kv_compact import kv_compact
from paceline.kernels.native import Kernels, Workspace
from paceline.kernels.paged_attention import PagedAttention, describe, refuse_shape
from paceline.kernels.tree_attention import TreeBatch, TreeSequence, flatten, tree_attention
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

log = logging.getLogger(__name__)

# Largest |difference| / |reference| that rounding explains; a wrong mask or position is far beyond it.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.int8: 0.25}
_CHECK_TOKENS = 24


@dataclass(slots=True)
class _Sequence:
    """A sequence's cache.  ancestors[p] has bit a set when slot p follows slot a, directly or not, or is a itself.

    tokens: of the committed positions, then of the pending slots.  keys: of the whole committed blocks, which are never
    written again and may have other holders; empty without a salt.
    """

    salt: bytes | None = None
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.length + len(self.parents)


@dataclass(frozen=True, slots=True)
class _Growth:
    """A checked Feed: the tree that the sequence will have once the pass has succeeded."""

    feed: Feed
    sequence: _Sequence
    depths: tuple[int, ...]  # of all pending slots
    ancestors: tuple[int, ...]  # of the new ones

    def view(self, taken: Sequence[int]) -> TreeSequence:
        blocks = (*self.sequence.blocks, *taken)
        return TreeSequence(blocks, self.sequence.length, self.depths, self.ancestors)

    def apply(self, taken: Sequence[int]) -> None:
        self.sequence.blocks.extend(taken)
        self.sequence.tokens.extend(self.feed.tokens)
        self.sequence.parents.extend(self.feed.parents)
        self.sequence.depths[:] = self.depths
        self.sequence.ancestors.extend(self.ancestors)


class _Cache:
    """The paged keys and values of all layers: [planes, rows, heads, dim], one pool per row shape."""

    def __init__(self, layers: Sequence[Layer], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        planes: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
        for index, layer in enumerate(layers):
            planes[layer.key_shape].append((index, "key"))
            planes[layer.value_shape].append((index, "value"))
        self.pools: list[Tensor] = []
        states: dict[tuple[int, str], Tensor] = {}
        for shape, owners in planes.items():
            # Left as it is: every row is written before it is read.
            pool = torch.empty((len(owners), rows, *shape), dtype=dtype, device=device)
            self.pools.append(pool)
            states.update(zip(owners, pool.unbind(0), strict=True))
        self.keys = [states[index, "key"] for index in range(len(layers))]
        self.values = [states[index, "value"] for index in range(len(layers))]
        self.windows = [layer.window for layer in layers]

    def compact(self, source: Sequence[int], target: Sequence[int]) -> None:
        device = self.pools[0].device
        rows = torch.tensor([source, target], dtype=torch.int64, device=device)
        for pool in self.pools:
            kv_compact(pool, rows[0], rows[1])


class _Native:
    """The attention of the layers that the native library attends for."""

    def __init__(self, kernels: Kernels, block_size: int) -> None:
        self._kernels, self._block_size, self._workspace = kernels, block_size, Workspace()
        self._layers: dict[int, PagedAttention | None] = {}

    def attention(
        self, cache: _Cache, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> PagedAttention | None:
        """That of one layer, which asks for the same at every call, or None if it has to be attended otherwise."""
        if layer not in self._layers:
            why = refuse_shape(query, key, value)
            if why is not None:
                log.info("layer %d is attended by PyTorch, since %s", layer, why)
            self._layers[layer] = (
                None
                if why is not None
                else PagedAttention(
                    self._kernels,
                    self._workspace,
                    cache.keys[layer],
                    cache.values[layer],
                    query.shape[1],
                    self._block_size,
                    scaling=_scaling(query, options),
                    softcap=options.get("softcap"),
                    window=cache.windows[layer],
                )
            )
        return self._layers[layer]


def _scaling(query: Tensor, options: dict[str, Any]) -> float:
    scaling: float | None = options.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


@dataclass(frozen=True, slots=True)
class _Pass:
    """The context of one forward: where its keys and values go, and what its queries see."""

    cache: _Cache
    slots: Tensor  # int64 [N], the pool row of each new token
    batch: TreeBatch
    native: _Native | None
    described: array[int]  # the batch, for the native library

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Write the new keys and values, then attend; see attention.Context."""
        layer: Any = module.layer_idx
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.native is not None and (
            attention := self.native.attention(self.cache, layer, query, key, value, options)
        ):
            return attention(query, key, value, len(self.batch.sequences), self.described)
        keys.index_copy_(0, self.slots, key[0].transpose(0, 1))
        values.index_copy_(0, self.slots, value[0].transpose(0, 1))
        output = tree_attention(
            query[0].transpose(0, 1),
            keys,
            values,
            self.batch,
            scaling=_scaling(query, options),
            softcap=options.get("softcap"),
            window=self.cache.windows[layer],
        )
        return output[None]


class TorchEngine:
    """A Hugging Face causal language model behind the Engine protocol.

    model: loaded, on its device, in its dtype; its attention is replaced by ours.
    kv_tokens: cached positions over all sequences, rounded up to whole blocks.
    block_size: positions per block.
    kernels: the native library's, for a model on the CPU; without them PyTorch attends.
    capture: what records passes of a fixed shape, for a model whose passes are nothing but launches on a device.
    Raises UnsupportedModel for a model that would not be computed exactly.  Not thread-safe.
    """

    def __init__(
        self,
        model: Any,
        kv_tokens: int,
        block_size: int = 16,
        kernels: Kernels | None = None,
        capture: Capture | None = None,
    ) -> None:
        if kv_tokens < 1 or block_size < 1:
            raise ValueError(f"kv_tokens and block_size must be positive, got {kv_tokens} and {block_size}")
        refuse_unsupported(model.config)
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.block_size = block_size
        self.model = model.eval()
        self._device: torch.device = model.device
        self.pool = BlockPool(-(-kv_tokens // block_size))
        spare = self.pool.blocks  # one block beyond those of the pool
        self._cache = _Cache(probe_layers(model), (spare + 1) * block_size, model.dtype, self._device)
        self._native = None if kernels is None else _Native(kernels, block_size)
        self._graphs = None if capture is None else Graphs(self._compute, capture, self._device, block_size, spare)
        self._sequences: dict[int, _Sequence] = {}
        self._ids = itertools.count()

    @property
    def free_blocks(self) -> int:
        """See Engine.free_blocks."""
        return self.pool.free_blocks

    def open(self, tokens: Sequence[int] = (), salt: bytes | None = None) -> int:
        """See Engine.open."""
        sequence = next(self._ids)
        keys = self._findable(tokens, salt)
        blocks = self.pool.adopt(keys)
        length = len(blocks) * self.block_size
        self._sequences[sequence] = _Sequence(salt, length, blocks, list(tokens[:length]), keys[: len(blocks)])
        return sequence

    def cost(self, tokens: Sequence[int], salt: bytes | None = None) -> int:
        """See Engine.cost."""
        return self._blocks_for(len(tokens)) - self.pool.in_use(self._findable(tokens, salt))

    def _findable(self, tokens: Sequence[int], salt: bytes | None) -> list[bytes]:
        """Keys of the whole blocks before the last token, which is always computed, since its logits are wanted."""
        return [] if salt is None else list(block_keys(tokens[:-1], self.block_size, salt))

    def close(self, sequence: int) -> None:
        """See Engine.close."""
        state = self._sequences.pop(sequence, None)
        if state is not None:
            self.pool.free(state.blocks)

    def forget(self, sequence: int) -> None:
        """See Engine.forget."""
        for block in self._state(sequence).blocks:
            self.pool.retract(block)

    def length(self, sequence: int) -> int:
        """See Engine.length."""
        return self._state(sequence).length

    def pending(self, sequence: int) -> int:
        """See Engine.pending."""
        return len(self._state(sequence).parents)

    def spare(self, sequence: int) -> int:
        """See Engine.spare."""
        state = self._state(sequence)
        return len(state.blocks) * self.block_size - state.total

    def fits(self, lengths: Sequence[int]) -> bool:
        """See Engine.fits."""
        return sum(self._blocks_for(length) for length in lengths) <= self.pool.blocks

    def step(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """See Engine.step."""
        growths = [self._growth(feed) for feed in feeds]
        if len({feed.sequence for feed in feeds}) != len(feeds):
            raise ValueError("a sequence may have one Feed per step")
        if not growths:
            return []
        taken = self._reserve(growths)
        try:
            logits = self._forward(growths, taken)
        except BaseException:
            for blocks in taken:
                self.pool.free(blocks)
            raise
        for growth, blocks in zip(growths, taken, strict=True):
            growth.apply(blocks)
        return list(torch.split(logits, [len(feed.rows) for feed in feeds]))

    def commit(self, sequence: int, path: Sequence[int]) -> dict[int, int]:
        """See Engine.commit."""
        state = self._state(sequence)
        _check_path(state, sequence, path)
        last = path[-1]
        kept = [p for p in range(last + 1, len(state.parents)) if state.ancestors[p] >> last & 1]
        self._move(state, [*path, *kept])
        state.tokens[state.length :] = [state.tokens[state.length + p] for p in (*path, *kept)]
        renamed = {old: new for new, old in enumerate(kept)}
        parents = [renamed.get(state.parents[p], -1) for p in kept]
        state.length += len(path)
        state.parents, state.depths, state.ancestors = [], [], []
        for parent in parents:
            _append_slot(state.parents, state.depths, state.ancestors, parent)
        self._release(state)
        self._publish(state)
        return renamed

    def truncate(self, sequence: int, length: int) -> None:
        """See Engine.truncate.  Raises ValueError unless 0 <= length <= the committed length.

        OutOfBlocks if the last block that stays is shared, will have to be written, and there is no room for a copy.
        """
        state = self._state(sequence)
        if not 0 <= length <= state.length:
            raise ValueError(f"sequence {sequence} has {state.length} committed positions, so not {length} to keep")
        self._unshare(state, length)
        state.length = length
        del state.tokens[length:]
        state.parents, state.depths, state.ancestors = [], [], []
        self._release(state)

    def check(self) -> None:
        """Raise PoolBroken unless every block is free or held by those that need it, and holds what its key says."""
        self.pool.check({sequence: state.blocks for sequence, state in self._sequences.items()})
        for sequence, state in self._sequences.items():
            if len(state.blocks) != self._blocks_for(state.total):
                raise PoolBroken(f"sequence {sequence} holds {len(state.blocks)} blocks for {state.total} positions")
            if len(state.tokens) != state.total:
                raise PoolBroken(f"sequence {sequence} has {len(state.tokens)} tokens for {state.total} positions")
            self._check_keys(sequence, state)
        self._check_sharing()

    def _check_keys(self, sequence: int, state: _Sequence) -> None:
        committed = state.tokens[: state.length]
        if state.keys != ([] if state.salt is None else list(block_keys(committed, self.block_size, state.salt))):
            raise PoolBroken(f"sequence {sequence} has keys of other tokens than its committed ones")
        for index, block in enumerate(state.blocks):
            # One of two equal blocks goes without a key.
            if self.pool.key(block) not in (None, *state.keys[index : index + 1]):
                raise PoolBroken(f"block {block} of sequence {sequence} is found by other tokens than it holds")

    def _check_sharing(self) -> None:
        """Who holds the same block must have the same tokens in it, and all up to it, for good."""
        holders: dict[int, tuple[int, bytes | None]] = {}
        for sequence, state in self._sequences.items():
            for block, key in itertools.zip_longest(state.blocks, state.keys):
                other, known = holders.setdefault(block, (sequence, key))
                if other != sequence and (key is None or key != known):
                    raise PoolBroken(f"block {block} has other tokens in sequence {sequence} than in sequence {other}")

    def check_against_reference(self, reference: Tensor | None = None, weights: torch.dtype | None = None) -> None:
        """Compare a few tokens, decoys beside them, with the model's own eager attention, in the model's dtype.

        reference: what `reference_logits` gave before the model's layers were replaced; None: what it gives now.
        weights: the type of its weights where that is not the model's.
        Raises UnsupportedModel when they disagree by more than rounding, and OutOfBlocks when the pool is full.
        """
        count = min(_CHECK_TOKENS, self.context_length, self.pool.free_blocks * self.block_size // 2)
        if count < 1:
            raise OutOfBlocks(f"the self-check needs free blocks and {self.pool.free_blocks} are free")
        reference = (reference_logits(self.model) if reference is None else reference)[:count]
        ours = self._paged_logits(_check_tokens(self.model)[:count].tolist())
        error = float((ours - reference).norm() / reference.norm().clamp_min(1e-12))
        allowed = _TOLERANCE.get(weights or self.model.dtype, _TOLERANCE[torch.bfloat16])
        log.debug("engine self-check: relative error %.2g, %.2g allowed", error, allowed)
        if not error <= allowed:
            raise UnsupportedModel(
                f"{type(self.model).__name__} computes other logits through paged attention than by itself "
                f"(relative error {error:.2g}, {allowed:.2g} allowed)"
            )

    def _paged_logits(self, tokens: Sequence[int]) -> Tensor:
        """The same logits through the cache: in three parts, so that all of mask, commit and compaction take part."""
        sequence = self.open()
        third = -(-len(tokens) // 3)
        try:
            parts = [tokens[start : start + third] for start in range(0, len(tokens), third)]
            return torch.cat([self._commit_among_decoys(sequence, part) for part in parts])
        finally:
            self.close(sequence)

    def _commit_among_decoys(self, sequence: int, tokens: Sequence[int]) -> Tensor:
        """Commit a chain of which each token had a sibling before it."""
        both = [token for right in tokens for token in ((right + 1) % self.vocab_size, right)]
        path = tuple(range(1, len(both), 2))
        parents = [parent for right in (-1, *path[:-1]) for parent in (right, right)]
        logits = self.step([Feed(sequence, tuple(both), tuple(parents), path)])[0]
        self.commit(sequence, path)
        return logits

    def _state(self, sequence: int) -> _Sequence:
        state = self._sequences.get(sequence)
        if state is None:
            raise ValueError(f"there is no open sequence {sequence}")
        return state

    def _growth(self, feed: Feed) -> _Growth:
        """Check a Feed completely.  Raises ValueError."""
        state = self._state(feed.sequence)
        where = f"sequence {feed.sequence}"
        if not feed.tokens or len(feed.tokens) != len(feed.parents):
            raise ValueError(f"{where}: {len(feed.tokens)} tokens and {len(feed.parents)} parents")
        for token in feed.tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{where}: token {token} is outside the vocabulary of {self.vocab_size}")
        for row in feed.rows:
            if not 0 <= row < len(feed.tokens):
                raise ValueError(f"{where}: row {row} of {len(feed.tokens)} tokens")
        parents, depths, ancestors = list(state.parents), list(state.depths), list(state.ancestors)
        for parent in feed.parents:
            if not -1 <= parent < len(parents):
                raise ValueError(f"{where}: slot {len(parents)} cannot follow slot {parent}")
            _append_slot(parents, depths, ancestors, parent)
        deepest = state.length + max(depths)
        if deepest >= self.context_length:
            raise ValueError(f"{where}: position {deepest} is beyond the context of {self.context_length}")
        return _Growth(feed, state, tuple(depths), tuple(ancestors[len(state.ancestors) :]))

    def _reserve(self, growths: Sequence[_Growth]) -> list[list[int]]:
        """Blocks for every growth, or OutOfBlocks and none at all."""
        needed = [self._blocks_for(g.sequence.total + len(g.feed.tokens)) - len(g.sequence.blocks) for g in growths]
        if sum(needed) > self.pool.free_blocks:
            raise OutOfBlocks(f"the step needs {sum(needed)} blocks and {self.pool.free_blocks} are free")
        taken = []
        for growth, count in zip(growths, needed, strict=True):
            held = growth.sequence.blocks
            taken.append(self.pool.alloc(count, after=held[-1] if held else None))
        return taken

    def _forward(self, growths: Sequence[_Growth], taken: Sequence[Sequence[int]]) -> Tensor:
        """Logits of all wanted rows, in the order of the growths: float32 [rows, vocab]."""
        views = [growth.view(blocks) for growth, blocks in zip(growths, taken, strict=True)]
        # Sequences of one shape stand together, so that attention can take them in one call.
        order = sorted(range(len(views)), key=lambda i: (views[i].new, views[i].total))
        ordered = [views[i] for i in order]
        starts = dict(zip(order, itertools.accumulate((view.new for view in ordered), initial=0), strict=False))
        rows = [starts[i] + row for i, growth in enumerate(growths) for row in growth.feed.rows]
        tokens = [token for i in order for token in growths[i].feed.tokens]
        with torch.inference_mode():
            logits = None if self._graphs is None else self._graphs.run(tokens, rows, ordered)
            if logits is None:
                inputs = torch.tensor([tokens, *flatten(ordered, self.block_size)], device=self._device)
                wanted = torch.tensor(rows, dtype=torch.int64, device=self._device)
                logits = self._compute(inputs, wanted, TreeBatch(ordered, self.block_size, self._device))
        # The caller may change them in place, which it could not with a tensor that was made in inference mode.
        return logits.to(torch.float32, copy=logits.is_inference())

    def _compute(self, inputs: Tensor, rows: Tensor, batch: TreeBatch) -> Tensor:
        """Logits [len(rows), vocab] of one pass.  inputs: int64 [3, N], its tokens, their positions and pool rows."""
        described = array("q") if self._native is None else describe(batch.sequences)
        logits: Tensor = self.model(
            input_ids=inputs[:1],
            position_ids=inputs[1:2],
            use_cache=False,
            logits_to_keep=rows,
            paceline=_Pass(self._cache, inputs[2], batch, self._native, described),
        ).logits
        return logits[0]

    def _move(self, state: _Sequence, slots: Sequence[int]) -> None:
        """Bring the rows of pending slots to the front, in this order."""
        moves = [(old, new) for new, old in enumerate(slots) if old != new]
        if moves:
            source, target = (list(self._rows(state, side)) for side in zip(*moves, strict=True))
            self._cache.compact(source, target)

    def _rows(self, state: _Sequence, slots: Sequence[int]) -> Iterator[int]:
        for slot in slots:
            block, offset = divmod(state.length + slot, self.block_size)
            yield state.blocks[block] * self.block_size + offset

    def _release(self, state: _Sequence) -> None:
        """Give back the blocks beyond the last cached position."""
        needed = self._blocks_for(state.total)
        self.pool.free(state.blocks[needed:])
        del state.blocks[needed:]

    def _publish(self, state: _Sequence) -> None:
        """Let the blocks that have become whole, all of committed tokens, be found from now on."""
        first = len(state.keys)
        if state.salt is None or state.length < (first + 1) * self.block_size:
            return
        above = state.keys[-1] if state.keys else None
        committed = state.tokens[first * self.block_size : state.length]
        state.keys += block_keys(committed, self.block_size, state.salt, above)
        for block, key in zip(state.blocks[first:], state.keys[first:], strict=False):
            self.pool.publish(block, key)

    def _unshare(self, state: _Sequence, length: int) -> None:
        """Before a cut: the rest of a block that was whole and is cut will be written again, unseen by others."""
        whole, rest = divmod(length, self.block_size)
        if rest and whole < len(state.keys):
            block = state.blocks[whole]
            if self.pool.holders(block) > 1:
                (copy,) = self.pool.alloc(1)
                source, target = (range(b * self.block_size, b * self.block_size + rest) for b in (block, copy))
                self._cache.compact(source, target)
                state.blocks[whole] = copy
                self.pool.free([block])
            else:
                self.pool.retract(block)
        del state.keys[whole:]

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)


def reference_logits(model: Any) -> Tensor:
    """The logits of the self-check's tokens by the model's own eager attention, float32; leaves ours in place."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=_check_tokens(model)[None].to(model.device), use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION)
    return logits[0].float()


def _check_tokens(model: Any) -> Tensor:
    config = model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (_CHECK_TOKENS,), generator=generator)
    return tokens[: config.max_position_embeddings]


def load_engine(
    directory: str | os.PathLike[str],
    device: torch.device,
    dtype: torch.dtype,
    kv_tokens: int,
    block_size: int = 16,
    head: Sequence[int] | None = None,
    int8: bool = False,
    graphs: bool = True,
) -> TorchEngine:
    """Load a Hugging Face checkpoint directory and check that the engine computes what the model does.

    Only safetensors are read, from this directory alone, and code that a checkpoint carries is never run.
    head: the token ids that logits are wanted of, None for all; see vocabulary.trim_head.
    int8: hold its linear layers in int8 where the native library computes them: twice as fast as bfloat16, and near the
    model, not equal to it.
    graphs: record passes of a fixed shape where the device can; see graphs.py.
    Raises UnsupportedModel, ValueError for a wrong head, and what transformers raises for a directory that holds no
    such checkpoint.
    """
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    refuse_unsupported(AutoConfig.from_pretrained(directory, **options))
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True, **options
    )
    if head is not None:
        trim_head(model, head)
    model = model.to(device).requires_grad_(False).eval()
    reference = reference_logits(model)
    capture = CudaCapture(device) if graphs and tree_attention.has_twin_on(device) else None
    engine = TorchEngine(model, kv_tokens, block_size, speed_up(model, int8), capture)
    engine.check_against_reference(reference, torch.int8 if int8 else dtype)
    return engine


def _append_slot(parents: list[int], depths: list[int], ancestors: list[int], parent: int) -> None:
    own = 1 << len(parents)
    parents.append(parent)
    depths.append(0 if parent < 0 else depths[parent] + 1)
    ancestors.append(own if parent < 0 else own | ancestors[parent])


def _check_path(state: _Sequence, sequence: int, path: Sequence[int]) -> None:
    if not path:
        raise ValueError(f"sequence {sequence}: an empty path commits nothing; truncate drops pending slots")
    previous = -1
    for slot in path:
        if not 0 <= slot < len(state.parents) or state.parents[slot] != previous:
            raise ValueError(f"sequence {sequence}: {list(path)} is no chain of pending slots from the committed ones")
        previous = slot
