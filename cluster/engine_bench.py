"""How long a pass takes by its nodes: against the weights' way from memory, and against transformers' own forward.

All times of a table are measured in turns, so that slow moments fall on all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from paceline.actors.device import Device, torch_dtype
from paceline.actors.engine import Feed
from paceline.actors.packed import products
from paceline.actors.torch_engine import TorchEngine, load_engine
from paceline.cluster.bench_peer import load_transformers
from paceline.cluster.models import Progress
from torch import nn

_WARM_UP = 3

_Timed = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """A pass over a root and `nodes` draft tokens below it, a chain.  Medians, in milliseconds.

    over_stream: pass_ms over the time in which the weights are streamed once.  over_root: over a pass without drafts.
    peer_ms: transformers' own eager forward over as many tokens, with its own cache; None if it was not measured.
    """

    nodes: int
    pass_ms: float
    over_stream: float
    over_root: float
    peer_ms: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """weights: what they are held in.  cached: committed positions before the pass.  native: layers that the native
    library computes.  stream_ms: every weight once, through the same linear kernel, for one row of activations."""

    target: str
    device: str
    weights: str
    cached: int
    native: int
    stream_ms: float
    rows: tuple[Row, ...]

    def as_object(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured.  int8: with its linear layers in int8, as an int8 drafter holds them."""

    name: str
    directory: Path
    dtype: str
    int8: bool = False

    @property
    def weights(self) -> str:
        return "int8" if self.int8 else self.dtype


@torch.no_grad()
def measure(
    model: Model, device: Device, nodes: Sequence[int], cached: int, rounds: int, peer: bool, progress: Progress
) -> Result:
    """Measure in this process, which settles on the device.

    nodes: the first of them is what the others are compared with.  peer: measure transformers too.
    Raises UnsupportedModel, and ValueError where the context is too short.
    """
    device.claim()
    progress(f"loading {model.name} in {model.weights}")
    room = cached + max(nodes) + 2
    engine = load_engine(model.directory, device.torch, torch_dtype(model.dtype), room, int8=model.int8)
    if room > engine.context_length:
        raise ValueError(f"{room} positions are needed, but the context of {model.name} is {engine.context_length}")
    passes = _Passes(engine, cached)
    timed: dict[str, _Timed] = {"stream": _stream(engine.model, device)}
    timed |= {f"pass {count}": passes.over(count) for count in nodes}
    if peer:
        progress(f"loading {model.name} for transformers")
        theirs = _Eager(model, device, passes.tokens)
        timed |= {f"peer {count}": theirs.over(count) for count in nodes}
    median = _medians(timed, rounds, device, progress)
    stream, root = median["stream"], median[f"pass {nodes[0]}"]
    rows = [
        Row(
            count,
            1e3 * median[f"pass {count}"],
            median[f"pass {count}"] / stream,
            median[f"pass {count}"] / root,
            1e3 * median[f"peer {count}"] if peer else None,
        )
        for count in nodes
    ]
    native = len(products(engine.model))
    return Result(model.name, device.kind, model.weights, cached, native, 1e3 * stream, tuple(rows))


def _medians(timed: dict[str, _Timed], rounds: int, device: Device, progress: Progress) -> dict[str, float]:
    """Seconds of each, by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(_WARM_UP + rounds):
        progress(f"round {number + 1} of {_WARM_UP + rounds}")
        for name, call in timed.items():
            started = time.perf_counter()
            call()
            device.synchronise()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(of_all[_WARM_UP:]) for name, of_all in seconds.items()}


def _stream(model: nn.Module, device: Device) -> _Timed:
    """Read every weight once, by the linear kernels that the model's layers use, with one row of activations."""
    packed = products(model)
    plain = [module for module in model.modules() if isinstance(module, nn.Linear)]
    widest = max([one.packed.columns for one in packed] + [layer.in_features for layer in plain], default=1)
    longest = max((one.packed.rows for one in packed), default=1)
    x, y = torch.ones(widest), torch.empty(longest)
    dtype = next(model.parameters()).dtype
    rows = [torch.ones(1, layer.in_features, dtype=dtype, device=device.torch) for layer in plain]

    def run() -> None:
        for product in packed:
            product(x.data_ptr(), 1, y.data_ptr())
        for layer, row in zip(plain, rows, strict=True):
            F.linear(row, layer.weight)

    return run


def _chain(count: int, vocab_size: int) -> tuple[int, ...]:
    """The tokens of a pass; any will do."""
    return tuple((7 * i + 1) % vocab_size for i in range(count))


class _Passes:
    """Passes of our engine over one sequence."""

    def __init__(self, engine: TorchEngine, cached: int) -> None:
        self._engine = engine
        generator = torch.Generator().manual_seed(0)
        self.tokens: list[int] = torch.randint(engine.vocab_size, (cached,), generator=generator).tolist()
        self._sequence = engine.open()
        parents = tuple(range(-1, cached - 1))
        engine.step([Feed(self._sequence, tuple(self.tokens), parents, ())])
        engine.commit(self._sequence, range(cached))

    def over(self, nodes: int) -> _Timed:
        """One over a root and so many nodes below it, with the logits of all; they are dropped again."""
        count = nodes + 1
        tokens = _chain(count, self._engine.vocab_size)
        feed = Feed(self._sequence, tokens, tuple(range(-1, count - 1)), tuple(range(count)))

        def run() -> None:
            self._engine.step([feed])
            self._engine.truncate(self._sequence, len(self.tokens))

        return run


class _Eager:
    """transformers' own forward over the same."""

    def __init__(self, model: Model, device: Device, tokens: Sequence[int]) -> None:
        from transformers import DynamicCache

        self._model = load_transformers(model.directory, model.dtype, device.torch)
        self._device, self._vocab = device.torch, self._model.config.get_text_config(decoder=True).vocab_size
        self._cache = DynamicCache(config=self._model.config)
        self._forward(torch.tensor([list(tokens)], device=self._device))

    def _forward(self, ids: torch.Tensor) -> None:
        self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)

    def over(self, nodes: int) -> _Timed:
        """One over so many tokens and one more; they are dropped again."""
        ids = torch.tensor([_chain(nodes + 1, self._vocab)], device=self._device)

        def run() -> None:
            self._forward(ids)
            self._cache.crop(-(nodes + 1))

        return run


def render(results: Sequence[Result]) -> str:
    """The results as tables."""
    return "\n\n".join(_table(result) for result in results)


def _table(result: Result) -> str:
    title = (
        f"{result.target}, {result.weights} weights, {result.device}, {result.cached} cached tokens; "
        f"weights streamed once: {result.stream_ms:.1f} ms"
    )
    header = "nodes   pass ms   x stream   x plain pass   transformers ms"
    return "\n".join([title, header, *map(_line, result.rows)])


def _line(row: Row) -> str:
    peer = "-" if row.peer_ms is None else f"{row.peer_ms:.1f}"
    return f"{row.nodes:>5}   {row.pass_ms:7.1f}   {row.over_stream:8.2f}   {row.over_root:12.2f}   {peer:>15}"
