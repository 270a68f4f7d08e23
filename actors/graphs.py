"""Passes of a fixed shape, recorded once as a CUDA graph and from then on launched as one.

A pass over a few tokens is hundreds of small kernels, and to launch them takes longer than to run them.  A graph fixes
every size and address, so a pass is padded up to one of few shapes, by a sequence of its own in a block that nobody
holds, and what changes from pass to pass is copied to where the graph reads it.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from paceline.kernels.tree_attention import (
    StaticBatch,
    Tables,
    TreeBatch,
    TreeSequence,
    flatten,
    pack_tables,
    words_for,
)
from torch import Tensor

log = logging.getLogger(__name__)

MAX_TOKENS = 256
"""Passes over more are bound by their arithmetic, and not by their launches."""

_LISTS = 1 << 18
"""Most blocks and pending slots of a pass, all sequences together."""

_GRAPHS = 64
"""As many shapes are remembered; each costs some megabytes of the device's memory."""

_SIGHTINGS = 3
"""How often a shape has come by when it is recorded, which takes as long as many passes."""

_TOLERANCE = 3e-2
"""Of the largest logit.  Padding may change which kernels compute a product, and so the last bits."""

_INPUTS = 3  # tokens, positions, slots


class Capture(Protocol):
    """Records what a function launches on a device."""

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns what launches the same again, on the same memory, and gives the same tensor with what came out."""
        ...


class CudaCapture:
    """Records CUDA graphs.  They share their memory, so what one puts out lasts until any of them is launched again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # the handle of their common memory

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Capture."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            # What is set up at first use (workspaces, compiled kernels) can't be set up while recording.
            run()
            graph = torch.cuda.CUDAGraph()
            # Other threads of this process, those of the link, may go on using the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                output = run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True, slots=True)
class Shape:
    """What passes have in common that share a graph.

    tokens, sequences: of the padded pass.  longest: most tokens that one of its sequences may have.  words: see Tables.
    """

    tokens: int
    sequences: int
    longest: int
    words: int

    @classmethod
    def of(cls, sequences: Sequence[TreeSequence]) -> Shape | None:
        """The shape that these are padded to, or None if they are too many."""
        count = sum(one.new for one in sequences)
        if count > MAX_TOKENS:
            return None
        tokens = _round_up(count)
        longest = max(tokens - count, *(one.new for one in sequences))
        words = max(words_for(sequences), (tokens - count + 63) // 64)
        return cls(tokens, _power(len(sequences) + (tokens > count)), _power(longest), _power(words))

    @property
    def fixed(self) -> int:
        """Integers that a pass of this shape takes up beside its lists: inputs, rows, facts and bits."""
        return self.tokens * (_INPUTS + 1 + self.words) + 6 * self.sequences


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _round_up(count: int) -> int:
    """To a power of two or, above 8, half-way to the next, so that no more than a third is padding."""
    power = _power(count)
    middle = power * 3 // 4
    return middle if count <= middle and power > 8 else power


class Graphs:
    """The recorded passes of one model.

    compute: (inputs, rows, batch) to the logits [rows, vocab] of one pass; see TorchEngine.  It must do nothing but
    launch kernels, in the same way for each pass of a shape.
    spare: a block that no sequence holds.
    """

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor, TreeBatch], Tensor],
        capture: Capture,
        device: torch.device,
        block_size: int,
        spare: int,
    ) -> None:
        self._compute, self._capture = compute, capture
        self._block_size, self._spare = block_size, spare
        largest = Shape(MAX_TOKENS, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS // 64).fixed
        self._memory = torch.zeros(largest + _LISTS, dtype=torch.int64, device=device)
        self._seen: Counter[Shape] = Counter()
        self._graphs: OrderedDict[Shape, Callable[[], Tensor]] = OrderedDict()  # the longest unused first
        self._broken = False

    def run(self, tokens: Sequence[int], rows: Sequence[int], sequences: Sequence[TreeSequence]) -> Tensor | None:
        """Logits [len(rows), vocab], to be read before the next call; None where the pass has to be computed otherwise.

        Without an effect in that case, apart from what the pass itself writes to its cache.
        """
        shape = None if self._broken else Shape.of(sequences)
        if shape is None or len(rows) > shape.tokens:
            return None
        replay = self._graphs.get(shape)
        if replay is None and not self._worth_recording(shape):
            return None
        data = self._data(shape, tokens, rows, sequences)
        if len(data) > len(self._memory):
            return None
        self._memory[: len(data)].copy_(torch.frombuffer(data, dtype=torch.int64))
        if replay is None:
            replay = self._record(shape, len(rows))
            if replay is None:
                return None
        self._graphs.move_to_end(shape)
        return replay()[: len(rows)]

    def _worth_recording(self, shape: Shape) -> bool:
        self._seen[shape] += 1
        return self._seen[shape] >= _SIGHTINGS

    def _data(
        self, shape: Shape, tokens: Sequence[int], rows: Sequence[int], sequences: Sequence[TreeSequence]
    ) -> array[int]:
        """All that a graph of this shape reads, in the order of its memory."""
        padding = shape.tokens - len(tokens)
        if padding:
            blocks = (self._spare,) * -(-padding // self._block_size)
            alone = tuple(1 << slot for slot in range(padding))
            sequences = (*sequences, TreeSequence(blocks, 0, (0,) * padding, alone))
        positions, slots = flatten(sequences, self._block_size)
        data = array("q", itertools.chain(tokens, itertools.repeat(0, padding), positions, slots, rows))
        data.extend(itertools.repeat(0, shape.tokens - len(rows)))
        return data + pack_tables(sequences, shape.sequences, shape.words)

    def _record(self, shape: Shape, rows: int) -> Callable[[], Tensor] | None:
        """A graph of the pass that lies in the memory; None, now and for ever, if it does not compute that pass."""
        inputs, wanted, tables = self._cut(shape)

        def run() -> Tensor:
            return self._compute(inputs, wanted, StaticBatch(tables, shape.longest, self._block_size))

        try:
            expected = run()[:rows].clone()
            replay = self._capture(run)
            found = replay()[:rows]
        except Exception as error:
            self._give_up(f"{shape} could not be recorded: {error}")
            return None
        if not _close(found, expected):
            self._give_up(f"{shape} came out otherwise when it was launched again")
            return None
        log.debug("recorded %s", shape)
        self._graphs[shape] = replay
        if len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)
        return replay

    def _cut(self, shape: Shape) -> tuple[Tensor, Tensor, Tables]:
        """Where a graph of this shape reads its inputs [3, tokens], its rows [tokens] and its tables."""
        ends = [_INPUTS * shape.tokens, (_INPUTS + 1) * shape.tokens]
        inputs, rows, tables = self._memory.tensor_split(ends)
        return inputs.view(_INPUTS, -1), rows, Tables.cut(tables, shape.sequences, shape.tokens, shape.words)

    def _give_up(self, why: str) -> None:
        log.warning("CUDA graphs stay off, since %s", why)
        self._broken = True
        self._graphs.clear()


def _close(found: Tensor, expected: Tensor) -> bool:
    """Up to rounding, and whatever a broken model computes: the same."""
    found, expected = found.float(), expected.float()
    largest = float(expected[expected.isfinite()].abs().amax()) if expected.isfinite().any() else 0.0
    return torch.allclose(found, expected, rtol=0, atol=_TOLERANCE * largest, equal_nan=True)
