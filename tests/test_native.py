"""The native library by itself: what it computes with every instruction set that is here, against plain PyTorch."""

from __future__ import annotations

import ctypes
import logging
import math
import random
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paceline.kernels import native
from paceline.kernels.linear import Packed, Plain, Product, join, linear, pack, quantise
from paceline.kernels.native import HEAD_LIMIT, TYPES, Kernels, Layer, Norm, Workspace
from paceline.kernels.paged_attention import PagedAttention, describe, refuse_shape
from paceline.kernels.tree_attention import TreeBatch, TreeSequence, tree_attention
from torch import Tensor
from triton_twins import random_sequences

WEIGHTS = [torch.float32, torch.bfloat16, torch.int8]
FLOATS = [torch.float32, torch.bfloat16]
SILU, GELU_TANH = 0, 1
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    SILU: F.silu,
    GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}
NORMS = ("input", "attention", "mlp", "output", "query", "key")
# How far a number may be from one that is rounded once, where a value in between is rounded too.
STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
MARGIN = 64


@pytest.fixture(params=native.levels(), ids=lambda level: f"panel{level.panel}")
def level(request: pytest.FixtureRequest) -> Kernels:
    chosen: Kernels = request.param
    return chosen


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def written(shape: tuple[int, ...], call: Callable[[int], Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """What a call writes to the address that it gets.  It may touch nothing beside a tensor of this shape."""
    size = math.prod(shape)
    buffer = torch.full((size + 2 * MARGIN,), torch.nan, dtype=dtype)
    call(buffer[MARGIN:].data_ptr())
    assert buffer[:MARGIN].isnan().all()
    assert buffer[MARGIN + size :].isnan().all()
    return buffer[MARGIN : MARGIN + size].view(shape)


# Linear layers


def random_layer(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, bias: bool = True, seed: int = 0
) -> Plain:
    make = generator(seed + 1000 * rows + columns)
    weight = torch.randn(rows, columns, generator=make)
    added = torch.randn(rows, generator=make) if bias else None
    return quantise(Plain(weight, added)) if dtype == torch.int8 else Plain(weight.to(dtype), added)


def packed(level: Kernels, plain: Plain) -> Packed:
    (one,) = pack(level, [plain])
    return one


def unrounded_rows(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows that no instruction set has to round before it multiplies them by weights of this type."""
    x = torch.randn(count, columns, generator=generator())
    if dtype == torch.bfloat16:
        return x.bfloat16().float()
    if dtype == torch.int8:
        # Of 15 bits, of which the largest element uses all.
        x = (x * 4000).round().clamp(-16256, 16256)
        x[:, 0] = 16256
        return x / 4096
    return x


def exact(x: Tensor, plain: Plain) -> tuple[Tensor, Tensor]:
    """The layer's output in float64, and how far from it a sum in float32, one product after another, can be."""
    weight = plain.weight.double()
    if plain.scale is not None:
        weight = weight * plain.scale.double()[:, None]
    bias = torch.zeros(len(weight)).double() if plain.bias is None else plain.bias.double()
    magnitude = F.linear(x.double().abs(), weight.abs(), bias.abs())
    return F.linear(x.double(), weight, bias), (x.shape[-1] + 4) * 2.0**-24 * magnitude


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", WEIGHTS)
def test_a_product_is_as_near_the_exact_one_as_float32_allows(level: Kernels, dtype: torch.dtype, bias: bool):
    panel = level.panel
    for rows in (1, 2, 3, panel - 1, panel, panel + 1, 2 * panel + 3):
        for columns in (1, 2, 3, 4, 5, 6, 7, panel - 1, panel + 1, 131, 519):
            plain, x = random_layer(rows, columns, dtype, bias), unrounded_rows(7, columns, dtype)
            product = Product(packed(level, plain), Workspace())
            found = written((7, rows), lambda y, product=product, x=x: product(x.data_ptr(), 7, y))
            expected, error = exact(x, plain)
            assert ((found - expected).abs() <= error).all(), (rows, columns)


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_a_product_keeps_to_its_scratch(level: Kernels, dtype: torch.dtype):
    for columns in (1, 3, 70):
        layer = packed(level, random_layer(level.panel + 1, columns, dtype))
        for count in (1, 15, 17, 33):
            x, y = torch.randn(count, columns, generator=generator()), torch.empty(count, layer.rows)
            arguments = (ctypes.byref(layer.struct), x.data_ptr(), count, y.data_ptr())
            written((count * (columns + 64),), lambda scratch, arguments=arguments: level.linear(*arguments, scratch))
            assert torch.equal(y, linear(x, layer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_rows_are_rounded_no_more_than_to_bfloat16_or_15_bits(level: Kernels, dtype: torch.dtype):
    plain, x = random_layer(level.panel + 1, 203, dtype), torch.randn(33, 203, generator=generator())
    x[1, 7], x[2] = 100.0, 0.0
    expected, error = exact(x, plain)
    weight = plain.weight.double().abs() * (1.0 if plain.scale is None else plain.scale.double()[:, None])
    steps = x.abs().double() * 2.0**-8 if dtype == torch.bfloat16 else x.abs().amax(dim=1, keepdim=True) / 16256
    rounding = F.linear(steps.double().expand(x.shape) / 2, weight)
    assert ((linear(x, packed(level, plain)) - expected).abs() <= error + rounding).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", WEIGHTS)
def test_a_row_that_is_not_finite_stays_so(level: Kernels, dtype: torch.dtype, bad: float):
    plain, x = random_layer(level.panel + 1, 70, dtype), torch.randn(3, 70, generator=generator())
    expected = linear(x, packed(level, plain))
    x[1, 69] = bad
    found = linear(x, packed(level, plain))
    # What is not finite times zero is no number.
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_a_row_is_multiplied_alike_to_the_last_bit_whatever_stands_beside_it(level: Kernels, dtype: torch.dtype):
    layer, x = packed(level, random_layer(level.panel + 3, 37, dtype)), torch.randn(33, 37, generator=generator())
    alone = torch.cat([linear(row[None], layer) for row in x])
    x[0] = torch.nan
    for count in range(1, 34):
        assert torch.equal(linear(x[-count:], layer)[-min(count, 32) :], alone[-min(count, 32) :])


def test_a_product_takes_any_shape_and_type_of_input(level: Kernels):
    plain = random_layer(11, 6, torch.float32)
    layer = packed(level, plain)
    for shape in [(6,), (2, 3, 6), (4, 1, 6), (0, 6), (2, 0, 6)]:
        x = torch.randn(shape, generator=generator())
        torch.testing.assert_close(linear(x, layer), F.linear(x, plain.weight, plain.bias))
    x = torch.randn(6, 5, generator=generator()).bfloat16().T
    assert torch.equal(linear(x, layer), linear(x.float().contiguous(), layer))


def test_layers_that_share_a_storage_keep_apart(level: Kernels):
    plains = [random_layer(rows, columns, torch.bfloat16) for rows, columns in ((3, 5), (1, 1), (40, 3), (2, 64))]
    layers = pack(level, plains)
    assert len({layer.words.untyped_storage().data_ptr() for layer in layers}) == 1
    assert [layer.words.data_ptr() % 64 for layer in layers] == [0] * len(layers)
    for layer, plain in zip(layers, plains, strict=True):
        assert torch.equal(layer.table(torch.arange(layer.rows)), plain.weight)
        x = unrounded_rows(2, layer.columns, torch.bfloat16)
        expected, error = exact(x, plain)
        assert ((linear(x, layer) - expected).abs() <= error).all()
    with pytest.raises(ValueError, match=r"must be float32, bfloat16 or int8, got torch\.float16"):
        pack(level, [plains[0], Plain(torch.zeros(2, 2, dtype=torch.float16))])


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_rows_of_a_packed_weight_are_read_back_as_they_were(level: Kernels, dtype: torch.dtype):
    plain = random_layer(2 * level.panel + 1, 13, dtype)
    layer = packed(level, plain)
    last = 2 * level.panel
    for ids in (
        torch.tensor([[0, last, 3], [level.panel, 3, level.panel - 1]]),
        torch.tensor([[last]]),
        torch.arange(0),
    ):
        found = layer.table(ids)
        assert found.dtype == dtype
        assert torch.equal(found, plain.weight[ids])


def test_int8_is_within_half_a_step_of_each_weight():
    weight = torch.randn(9, 40, generator=generator()).bfloat16()
    weight[3] = 0
    weight[4] *= 1e-30
    plain = quantise(Plain(weight))
    assert plain.scale is not None
    assert plain.scale.dtype == torch.float32
    restored = plain.weight.double() * plain.scale.double()[:, None]
    assert ((restored - weight.double()).abs() <= 0.5001 * plain.scale[:, None]).all()
    assert plain.weight.abs().amax(dim=1).tolist() == [127, 127, 127, 0, *[127] * 5]


def test_joined_layers_give_their_outputs_side_by_side(level: Kernels):
    plains = [random_layer(rows, 5, torch.bfloat16, bias) for rows, bias in ((3, False), (level.panel, True))]
    x = torch.randn(4, 5, generator=generator())
    apart = torch.cat([linear(x, packed(level, plain)) for plain in plains], dim=1)
    assert torch.equal(linear(x, packed(level, join(plains))), apart)
    assert join(plains[:1]).bias is None


# What lies between the products


def rows_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def normed(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """By PyTorch; as it is where there is no weight."""
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), epsilon)


def norm_struct(weight: Tensor | None, epsilon: float) -> Norm:
    return Norm(None if weight is None else weight.data_ptr(), epsilon)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("magnitude", [1.0, 1e-3])
def test_a_norm_is_that_of_pytorch(level: Kernels, dtype: torch.dtype, magnitude: float):
    for size in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 100):
        x, weight = rows_of(dtype, 3, size) * magnitude, rows_of(torch.float32, size, seed=1)

        def norm(y: int, x: Tensor = x, weight: Tensor = weight, size: int = size) -> None:
            level.norm(ctypes.byref(norm_struct(weight, 1e-5)), x.data_ptr(), TYPES[dtype], 3, size, y)

        found = written((3, size), norm)
        torch.testing.assert_close(found.double(), normed(x.double(), weight, 1e-5), rtol=3e-6, atol=0)
        if dtype == torch.float32:
            norm(x.data_ptr())
            assert torch.equal(x, found), "in place it is the same"


class Decoder:
    """A random decoder layer, for the kernels and in float64."""

    def __init__(
        self,
        level: Kernels,
        shape: tuple[int, int, int, int] = (4, 2, 6, 6),
        *,
        dtype: torch.dtype = torch.float32,
        weights: torch.dtype = torch.float32,
        rotated: int = 0,
        norms: Sequence[str] = (),
        activation: int = SILU,
        hidden: int = 13,
        inner: int = 19,
    ) -> None:
        heads, key_heads, dim, value_dim = self.shape = shape
        self.level, self.dtype, self.rotated, self.activation = level, dtype, rotated, activation
        self.hidden, self.inner, self.width = hidden, inner, (heads + key_heads) * dim + key_heads * value_dim
        rows_and_columns = [(self.width, hidden), (hidden, heads * value_dim), (2 * inner, hidden), (hidden, inner)]
        self.plains = [random_layer(*size, weights, seed=seed) for seed, size in enumerate(rows_and_columns)]
        sizes = dict(zip(NORMS, (hidden, hidden, hidden, hidden, dim, dim), strict=True))
        chosen = ("input", "mlp", *norms)
        self.norms = {
            name: (rows_of(torch.float32, size, seed=seed) if name in chosen else None, 10.0**-seed)
            for seed, (name, size) in enumerate(sizes.items())
        }

    def struct(self) -> Layer:
        self.packed = [packed(self.level, plain) for plain in self.plains]
        norms = [norm_struct(*self.norms[name]) for name in NORMS]
        sizes = (self.activation, max(one.columns for one in self.packed), self.hidden, self.inner)
        pointers = [ctypes.pointer(one.struct) for one in self.packed]
        return Layer(*norms, *pointers, *sizes, *self.shape, self.rotated, TYPES[self.dtype])

    def run(self, function: Callable[..., int], shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
        """What one of the kernels writes, which gets the scratch that it asks for, and no more."""
        struct, addresses, count = self.struct(), [x.data_ptr() for x in inputs], len(inputs[0])
        needed = 0

        def ask(out: int) -> None:
            nonlocal needed
            needed = function(ctypes.byref(struct), *addresses, count, out, None, 0)

        assert written(shape, ask, self.dtype).isnan().all()

        def run(out: int) -> None:
            def with_scratch(scratch: int) -> None:
                assert function(ctypes.byref(struct), *addresses, count, out, scratch, needed) == 0

            written((needed,), with_scratch)

        return written(shape, run, self.dtype)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.run(self.level.before, (len(x), self.width), x, cos, sin)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        return self.run(self.level.after, tuple(x.shape), x, attended)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return normed(x, *self.norms[name])

    def multiply(self, index: int, x: Tensor) -> Tensor:
        return exact(x, self.plains[index])[0]

    def expected_before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, key_heads, dim, value_dim = self.shape
        product = self.multiply(0, self.norm("input", x.double()))
        query, key, value = product.split([heads * dim, key_heads * dim, key_heads * value_dim], dim=1)
        parts = [("query", query.unflatten(1, (heads, dim))), ("key", key.unflatten(1, (key_heads, dim)))]
        turned = [rotated(self.norm(name, part), cos.double(), sin.double()) for name, part in parts]
        return torch.cat([*(part.flatten(1) for part in turned), value], dim=1)

    def expected_after(self, x: Tensor, attended: Tensor) -> Tensor:
        middle = x.double() + self.norm("attention", self.multiply(1, attended))
        gate, up = self.multiply(2, self.norm("mlp", middle)).chunk(2, dim=1)
        return middle + self.norm("output", self.multiply(3, ACTIVATIONS[self.activation](gate) * up))


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[count, heads, dim], of which the first elements are rotated as Hugging Face's models do it."""
    size = cos.shape[-1]
    first, rest = heads[..., :size], heads[..., size:]
    low, high = first.chunk(2, dim=-1)
    return torch.cat([first * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None], rest], dim=-1)


@pytest.mark.parametrize("norms", [(), ("query", "key"), ("query",), ("key",)])
@pytest.mark.parametrize(
    ("shape", "turned"),
    [((4, 2, 8, 8), 8), ((3, 1, 10, 7), 10), ((2, 2, 80, 64), 32), ((5, 1, 36, 1), 6), ((2, 1, 24, 24), 0)],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_heads_are_normed_and_rotated_as_in_pytorch(
    level: Kernels, dtype: torch.dtype, shape: tuple[int, int, int, int], turned: int, norms: tuple[str, ...]
):
    decoder = Decoder(level, shape, dtype=dtype, rotated=turned, norms=norms)
    x = rows_of(dtype, 3, decoder.hidden)
    # Unlike those of models, other angles in either half.
    cos, sin = (rows_of(dtype, 3, turned, seed=seed) for seed in (1, 2))
    found, expected = decoder.before(x, cos, sin).double(), decoder.expected_before(x, cos, sin)
    torch.testing.assert_close(found, expected, rtol=STEP[dtype], atol=1e-5)


def test_the_largest_heads_are_normed(level: Kernels):
    decoder = Decoder(level, (1, 1, HEAD_LIMIT, HEAD_LIMIT), norms=("query", "key"), rotated=2)
    x, cos, sin = rows_of(torch.float32, 2, 13), *(rows_of(torch.float32, 2, 2, seed=seed) for seed in (1, 2))
    found, expected = decoder.before(x, cos, sin).double(), decoder.expected_before(x, cos, sin)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norms", [(), ("attention", "output"), ("attention",), ("output",)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_follows_attention_is_computed_as_in_pytorch(
    level: Kernels, dtype: torch.dtype, norms: tuple[str, ...], activation: int
):
    for hidden, inner in ((1, 1), (5, 3), (16, 33), (40, 31)):
        decoder = Decoder(level, dtype=dtype, norms=norms, activation=activation, hidden=hidden, inner=inner)
        x, attended = rows_of(dtype, 3, hidden), rows_of(torch.float32, 3, 24, seed=1)
        found, expected = decoder.after(x, attended).double(), decoder.expected_after(x, attended)
        assert (found - expected).norm() <= STEP[dtype] * expected.norm()


@pytest.mark.parametrize("count", [1, 17, 33])
@pytest.mark.parametrize(("shape", "hidden", "inner"), [((4, 2, 6, 6), 13, 19), ((1, 1, 6, 1), 1, 1)])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_layer_of_any_weights_keeps_to_its_scratch(
    level: Kernels, weights: torch.dtype, shape: tuple[int, int, int, int], hidden: int, inner: int, count: int
):
    decoder = Decoder(level, shape, weights=weights, norms=NORMS, rotated=6, hidden=hidden, inner=inner)
    x, attended = rows_of(torch.float32, count, hidden), rows_of(torch.float32, count, shape[0] * shape[3], seed=1)
    angles = [rows_of(torch.float32, count, 6, seed=seed) for seed in (2, 3)]
    pairs = [
        (decoder.before(x, *angles), decoder.expected_before(x, *angles)),
        (decoder.after(x, attended), decoder.expected_after(x, attended)),
    ]
    for found, expected in pairs:
        assert (found - expected).norm() <= STEP[torch.bfloat16] * expected.norm()


def test_a_layers_output_may_lie_where_its_input_did(level: Kernels):
    decoder = Decoder(level, norms=("attention", "output"))
    x, attended = rows_of(torch.float32, 3, 13), rows_of(torch.float32, 3, 24, seed=1)
    apart, scratch = decoder.after(x, attended), torch.empty(10_000)
    struct = ctypes.byref(decoder.struct())
    pointers = (x.data_ptr(), attended.data_ptr(), 3, x.data_ptr(), scratch.data_ptr(), len(scratch))
    assert level.after(struct, *pointers) == 0
    assert torch.equal(x, apart)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_layers_row_is_the_same_to_the_last_bit_whatever_stands_beside_it(level: Kernels, dtype: torch.dtype):
    decoder = Decoder(level, dtype=dtype, rotated=6, norms=NORMS)
    x, attended = rows_of(dtype, 33, 13), rows_of(torch.float32, 33, 24, seed=1)
    cos, sin = rows_of(dtype, 33, 6, seed=2), rows_of(dtype, 33, 6, seed=3)
    x[0] = torch.nan
    befores, afters = decoder.before(x, cos, sin), decoder.after(x, attended)
    assert befores[0].isnan().all()
    assert afters[0].isnan().all()
    assert torch.cat([befores[1:].flatten(), afters[1:].flatten()]).isfinite().all()
    for first in range(1, 33):
        assert torch.equal(decoder.before(x[first:], cos[first:], sin[first:]), befores[first:])
        assert torch.equal(decoder.after(x[first:], attended[first:]), afters[first:])


def silenced(plain: Plain, bias: Tensor) -> Plain:
    """A layer that gives its bias whatever it gets."""
    return Plain(torch.zeros_like(plain.weight), bias)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_rounded_to_the_nearest_and_ties_to_even(level: Kernels, dtype: torch.dtype):
    added = torch.tensor([2.0**-9, 3 * 2.0**-9, 2.0**-8, 2.0**-8 + 2.0**-20, 1e-40, -0.0, 1e30, -(2.0**-9), 0.1, 7.0])
    decoder = Decoder(level, dtype=dtype, hidden=len(added))
    decoder.plains[1] = silenced(decoder.plains[1], added)
    decoder.plains[3] = silenced(decoder.plains[3], torch.zeros(len(added)))
    for value in (1.0, 1.0 + 2.0**-7, -1.0, 0.0):
        x = torch.full((2, len(added)), value, dtype=dtype)
        assert torch.equal(decoder.after(x, torch.zeros(2, 24)), (x.float() + added).to(dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_is_right_far_from_zero_too(level: Kernels, activation: int):
    gate = torch.cat(
        [torch.tensor([-1e30, -1e4, -104.0, -88.5, -87.5, 87.5, 88.5, 1e4, 1e30]), torch.linspace(-12, 12, 53)]
    )
    size = len(gate)
    up = torch.linspace(0.5, 1.5, size)
    decoder = Decoder(level, activation=activation, hidden=size, inner=size)
    decoder.plains[1] = silenced(decoder.plains[1], torch.zeros(size))
    decoder.plains[2] = silenced(decoder.plains[2], torch.cat([gate, up]))
    decoder.plains[3] = Plain(torch.eye(size))
    found = decoder.after(torch.zeros(1, size), torch.zeros(1, 24))[0]
    expected = ACTIVATIONS[activation](gate.double()) * up
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


# Attention


class Scene:
    """Pools, and what a pass brings: queries, keys and values in the order of its sequences.

    What its sequences had cached is random; all other rows of the pools are NaN.
    """

    def __init__(
        self,
        sequences: Sequence[TreeSequence],
        shape: tuple[int, int, int, int] = (4, 2, 12, 12),
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
    ) -> None:
        self.sequences, self.block_size = list(sequences), block_size
        heads, key_heads, dim, value_dim = shape
        tokens = sum(one.new for one in sequences)
        self.query = rows_of(dtype, 1, heads, tokens, dim)
        self.key = rows_of(dtype, 1, key_heads, tokens, dim, seed=1)
        self.value = rows_of(dtype, 1, key_heads, tokens, value_dim, seed=2)
        rows = (max(block for one in sequences for block in one.blocks) + 2) * block_size
        self.keys = rows_of(dtype, rows, key_heads, dim, seed=3)
        self.values = rows_of(dtype, rows, key_heads, value_dim, seed=4)
        unused = torch.ones(rows, dtype=torch.bool)
        for one in sequences:
            unused[one.slots(block_size, 0, one.total - one.new)] = False
        self.keys[unused], self.values[unused] = torch.nan, torch.nan

    def attend(self, level: Kernels, workspace: Workspace | None = None, **options: Any) -> Tensor:
        """[tokens, heads, value dim]; the new keys and values are in the pools then."""
        options = {"scaling": self.query.shape[-1] ** -0.5, **options}
        pools, heads = (self.keys, self.values), self.query.shape[1]
        attention = PagedAttention(level, workspace or Workspace(), *pools, heads, self.block_size, **options)
        return attention(self.query, self.key, self.value, len(self.sequences), describe(self.sequences))[0].clone()

    def expected(self, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The reference's output, computed in float32, and what the pools hold after the pass."""
        rows = [row for one in self.sequences for row in one.slots(self.block_size, one.total - one.new, one.total)]
        keys, values = self.keys.clone(), self.values.clone()
        keys[rows], values[rows] = self.key[0].transpose(0, 1), self.value[0].transpose(0, 1)
        batch = TreeBatch(self.sequences, self.block_size, torch.device("cpu"))
        options = {"scaling": self.query.shape[-1] ** -0.5, **options}
        query = self.query[0].transpose(0, 1).float()
        return tree_attention.reference(query, keys.float(), values.float(), batch, **options), keys, values


@pytest.mark.parametrize(
    ("shape", "dtype", "block_size", "options"),
    [
        ((2, 2, 16, 16), torch.float32, 4, {}),
        ((6, 2, 64, 64), torch.bfloat16, 16, {}),
        ((3, 1, 24, 40), torch.float32, 3, {"softcap": 3.0}),
        ((1, 1, 5, 3), torch.float32, 1, {"scaling": 2.0}),
        ((4, 4, 1, 1), torch.bfloat16, 4, {"window": 3}),
        ((2, 1, 33, 80), torch.float32, 7, {"window": 5}),
        ((1, 1, 20, 20), torch.bfloat16, 4, {"window": 1}),
        ((20, 1, 12, 15), torch.float32, 5, {"window": 40, "softcap": 20.0}),
        ((8, 2, 100, 100), torch.bfloat16, 16, {"window": 70}),
    ],
)
def test_attention_is_that_of_the_reference(
    level: Kernels, shape: tuple[int, int, int, int], dtype: torch.dtype, block_size: int, options: dict[str, Any]
):
    # A prefill, many slots of which few are new, a single token, nothing committed, and more than fits one turn.
    shapes = [(0, 3, 3), (13, 130, 5), (70, 1, 1), (0, 66, 12), (149, 9, 7), (3, 90, 90)]
    scene = Scene(random_sequences(random.Random(shape[2]), shapes, block_size), shape, dtype, block_size)
    output, keys, values = scene.expected(**options)
    torch.testing.assert_close(scene.attend(level, **options), output, rtol=2e-5, atol=2e-5)
    for found, expected in ((scene.keys, keys), (scene.values, values)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_heads_may_lie_side_by_side_or_one_after_another(level: Kernels):
    scene = Scene(random_sequences(random.Random(0), [(5, 7, 7), (9, 2, 1)], 4), (4, 2, 6, 10))
    apart = scene.attend(level)
    # Now as views of one buffer that holds them token by token.
    states = [states.transpose(1, 2).flatten(2) for states in (scene.query, scene.key, scene.value)]
    parts = torch.cat(states, dim=2).split([part.shape[2] for part in states], dim=2)
    scene.query, scene.key, scene.value = (
        part.unflatten(2, (heads, -1)).transpose(1, 2) for part, heads in zip(parts, (4, 2, 2), strict=True)
    )
    assert not scene.key.is_contiguous()
    assert torch.equal(scene.attend(level), apart)


def chain(committed: int, pending: int, new: int, blocks: Sequence[int]) -> TreeSequence:
    ancestors = [(2 << slot) - 1 for slot in range(pending - new, pending)]
    return TreeSequence(tuple(blocks), committed, tuple(range(pending)), tuple(ancestors))


def decoyed(committed: int, count: int, blocks: Sequence[int]) -> TreeSequence:
    """A chain, each token of which comes right after a sibling that nothing follows."""
    depths, ancestors, path = [], [], 0
    for depth in range(count):
        for slot in (2 * depth, 2 * depth + 1):
            depths.append(depth)
            ancestors.append(path | 1 << slot)
        path = ancestors[-1]
    return TreeSequence(tuple(blocks), committed, tuple(depths), tuple(ancestors))


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 2.0}])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_token_is_attended_alike_to_the_last_bit_in_whatever_passes_it_is_read(
    level: Kernels, dtype: torch.dtype, options: dict[str, Any]
):
    length, workspace = 75, Workspace()
    numbers = random.Random(1).sample(range(30), 28)
    blocks, others = numbers[:25], numbers[25:]
    whole = Scene([chain(0, length, length, blocks)], dtype=dtype)
    at_once = whole.attend(level, workspace, **options)

    def read(sequences: Sequence[TreeSequence], tokens: Sequence[int]) -> Tensor:
        """In a pass over the same pools, which brings these of the tokens."""
        part = Scene(sequences, dtype=dtype)
        part.keys, part.values = whole.keys, whole.values
        part.query, part.key, part.value = (x[:, :, list(tokens)] for x in (whole.query, whole.key, whole.value))
        return part.attend(level, workspace, **options)

    singly = [read([chain(at, 1, 1, blocks)], [at]) for at in range(length)]
    assert torch.equal(torch.cat(singly), at_once)
    uncommitted = [read([chain(40, at - 39, 1, blocks)], [at]) for at in range(40, length)]
    assert torch.equal(torch.cat(uncommitted), at_once[40:])
    cuts = pairwise((0, 1, 9, 25, 58, length))
    parts = [read([chain(a, b - a, b - a, blocks)], range(a, b)) for a, b in cuts]
    assert torch.equal(torch.cat(parts), at_once)
    among = [token for at in range(50, length) for token in (3 * at % length, at)]
    assert torch.equal(read([decoyed(50, length - 50, blocks)], among)[1::2], at_once[50:])
    company = [chain(0, 11, 11, others), chain(50, length - 50, length - 50, blocks)]
    assert torch.equal(read(company, [*range(11), *range(50, length)]), torch.cat([at_once[:11], at_once[50:]]))


def test_a_sequences_nan_never_reaches_another(level: Kernels):
    scene = Scene(random_sequences(random.Random(2), [(5, 9, 4), (6, 3, 3), (70, 4, 2)], 4))
    healthy = scene.attend(level)
    for states in (scene.query, scene.key, scene.value):
        states[:, :, 4:7] = torch.nan
    rows = scene.sequences[1].slots(4, 0, 9)
    scene.keys[rows], scene.values[rows] = torch.nan, torch.nan
    found = scene.attend(level)
    assert found[4:7].isnan().all()
    assert torch.equal(torch.cat([found[:4], found[7:]]), torch.cat([healthy[:4], healthy[7:]]))


def test_heads_that_cannot_be_attended_are_refused():
    def why(query: Tensor, key: Tensor, value: Tensor | None = None) -> str | None:
        return refuse_shape(query, key, key if value is None else value)

    def heads(count: int, dim: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(1, count, 3, dim, dtype=dtype)

    assert why(heads(6), heads(2), heads(2, 5)) is None
    assert why(heads(6, HEAD_LIMIT, torch.bfloat16), heads(2, HEAD_LIMIT, torch.bfloat16)) is None
    assert why(*[heads(2, dtype=torch.float16)] * 2) == "its heads are in torch.float16"
    assert why(heads(2), heads(2, dtype=torch.bfloat16)) == "its heads are in torch.float32"
    for query, key, value in [
        (heads(5), heads(2), heads(2)),
        (heads(6), heads(2), heads(3)),
        (heads(2), heads(2, 6), None),
    ]:
        assert why(query, key, value) == "its heads do not fit together"
    assert why(heads(2), heads(2), heads(2, HEAD_LIMIT + 1)) == f"its heads have more than {HEAD_LIMIT} elements"


# Buffers, and the library itself


def test_a_buffer_stays_where_it_is_until_more_is_asked_for():
    workspace = Workspace()
    first = workspace.take("a", (3, 4))
    assert workspace.take("a", (3, 4)) is first
    assert workspace.take("a", (2, 5)).data_ptr() == workspace.take("a", (12,)).data_ptr() == first.data_ptr()
    assert workspace.take("b", (3, 4)).data_ptr() != first.data_ptr()
    assert workspace.take("a", (4, 4)).shape == (4, 4)
    assert workspace.take("a", (4, 4), torch.bfloat16).dtype == torch.bfloat16
    address = workspace.floats("c", 10)
    assert workspace.floats("c", 3) == workspace.floats("c", 10) == address


def test_the_best_instruction_set_is_the_one_that_is_used():
    assert native.kernels() is (native.levels()[-1] if native.levels() else None)
    assert [one.panel for one in native.levels()] == sorted(one.panel for one in native.levels())


def test_without_the_library_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with caplog.at_level(logging.WARNING):
        assert native._library.__wrapped__() is None
        assert not caplog.records
        (tmp_path / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
        assert native._library.__wrapped__() is None
    assert "the native library does not load" in caplog.text
    monkeypatch.setattr(native, "_library", lambda: None)
    assert native.levels.__wrapped__() == ()
    native.advise(torch.empty(9))
