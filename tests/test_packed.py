"""Models whose layers the native library computes: the same logits as their own forward, row by row to the last bit."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from paceline.actors import packed
from paceline.actors.anatomy import dissect, trace
from paceline.actors.attention import UnsupportedModel
from paceline.actors.engine import Feed
from paceline.actors.packed import Block, PackedLinear, PackedNorm, PackedTable, pack_model, products, speed_up
from paceline.actors.torch_engine import TorchEngine
from paceline.kernels import native
from paceline.kernels.native import Kernels
from tiny_models import CONFIGS, VOCAB, WINDOW, tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GraniteConfig,
    HeliumConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    SmolLM3Config,
)

FLOATS = [torch.float32, torch.bfloat16]
TOKENS = torch.randint(3, VOCAB, (4 * WINDOW,), generator=torch.Generator().manual_seed(0)).tolist()

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="needs the native library")


def best() -> Kernels:
    library = native.kernels()
    assert library is not None
    return library


def packed_engine(model: Any, library: Kernels | None = None, int8: bool = False) -> TorchEngine:
    pack_model(model, library or best(), int8)
    return TorchEngine(model, kv_tokens=256, block_size=4, kernels=library or best())


def plain_logits(model: Any, tokens: Sequence[int] = TOKENS) -> Tensor:
    """By the model's own forward, float32 [len(tokens), vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0].float()


def read(engine: TorchEngine, size: int = len(TOKENS), tokens: Sequence[int] = TOKENS) -> Tensor:
    """The logits of a text that is read in passes of this many tokens."""
    sequence, parts = engine.open(), []
    for start in range(0, len(tokens), size):
        part = tuple(tokens[start : start + size])
        rows = tuple(range(len(part)))
        parts += engine.step([Feed(sequence, part, (-1, *rows[:-1]), rows)])
        engine.commit(sequence, rows)
    engine.close(sequence)
    return torch.cat(parts)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def kinds(model: Any) -> Counter[str]:
    """How many modules there are of ours, and how many linear layers of PyTorch's."""
    ours = (Block, PackedLinear, PackedNorm, PackedTable, nn.Linear)
    return Counter(type(module).__name__ for module in model.modules() if isinstance(module, ours))


# Models of which every layer is computed


@pytest.mark.parametrize("level", native.levels(), ids=lambda level: f"panel{level.panel}")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_model_has_the_logits_of_its_own_forward(name: str, level: Kernels):
    expected, model = plain_logits(tiny_model(name)), tiny_model(name)
    found = read(packed_engine(model, level), 10)
    assert kinds(model) == {
        "Block": 3,
        "PackedNorm": 1,
        "PackedLinear": 1,
        **({"PackedTable": 1} if tied(model) else {}),
    }
    assert error(found, expected) < 1e-4
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def tied(model: Any) -> bool:
    answer: bool = model.config.tie_word_embeddings
    return answer


@pytest.mark.parametrize("level", native.levels(), ids=lambda level: f"panel{level.panel}")
@pytest.mark.parametrize("name", CONFIGS)
def test_in_bfloat16_a_packed_model_is_nearer_to_the_exact_logits_than_its_own_forward(name: str, level: Kernels):
    models = [tiny_model(name, dtype=torch.bfloat16) for _ in range(3)]
    exact = plain_logits(models[0].float())
    found = read(packed_engine(models[1], level), 10)
    assert error(found, exact) < error(plain_logits(models[2]), exact) < 0.05


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_int8_is_near(name: str, dtype: torch.dtype):
    exact, model = plain_logits(tiny_model(name, dtype=dtype).float()), tiny_model(name, dtype=dtype)
    found = read(packed_engine(model, int8=True), 10)
    assert kinds(model) == {"Block": 3, "PackedNorm": 1, "PackedLinear": 1}
    assert {one.packed.dtype for one in products(model)} == {torch.int8}
    assert 1e-3 < error(found, exact) < 0.1


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_is_the_same_to_the_last_bit_however_many_tokens_are_in_the_pass(
    name: str, dtype: torch.dtype, int8: bool
):
    engine = packed_engine(tiny_model(name, dtype=dtype), int8=int8)
    at_once = read(engine)
    for size in (1, 8, 16):
        assert torch.equal(read(engine, size), at_once)
    # Each token after a sibling that nothing follows, beside another sequence.
    both = tuple(token for right in TOKENS for token in (VOCAB - 1 - right, right))
    path = tuple(range(1, len(both), 2))
    parents = [parent for right in (-1, *path[:-1]) for parent in (right, right)]
    other = Feed(engine.open(), (5, 6), (-1, 0), (0, 1))
    assert torch.equal(engine.step([other, Feed(engine.open(), both, tuple(parents), path)])[1], at_once)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_the_logits_of_a_bfloat16_model_are_not_rounded(name: str):
    engine = packed_engine(tiny_model(name, dtype=torch.bfloat16))
    logits = read(engine)
    assert (logits != logits.bfloat16()).float().mean() > 0.9
    hidden = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    head = engine.model.get_output_embeddings()
    assert head(hidden).dtype == torch.float32
    weight = tiny_model(name, dtype=torch.bfloat16).get_output_embeddings().weight
    torch.testing.assert_close(head(hidden), hidden.float() @ weight.float().T)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_a_tied_table_reads_the_rows_of_the_head(name: str, dtype: torch.dtype):
    own, model = tiny_model(name, dtype=dtype), tiny_model(name, dtype=dtype)
    pack_model(model, best())
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    ids = torch.tensor([[0, VOCAB - 1, 7, 7]])
    assert torch.equal(table(ids), own.get_input_embeddings()(ids))
    assert torch.equal(table(ids[:, :1]), own.get_input_embeddings()(ids[:, :1]))
    assert table._packed is head.products[0].packed
    assert (table.num_embeddings, table.embedding_dim) == (VOCAB, 32)


def test_an_int8_head_leaves_a_tied_table_as_it_was():
    own, model = tiny_model("llama_tied"), tiny_model("llama_tied")
    pack_model(model, best(), int8=True)
    assert torch.equal(model.get_input_embeddings().weight, own.get_input_embeddings().weight)


@pytest.mark.parametrize(("name", "kept"), [("llama", 1), ("llama_tied", 0), ("qwen3", 1), ("gemma2", 0)])
def test_the_loaded_weights_are_not_kept(name: str, kept: int):
    model = tiny_model(name)
    weights = [weakref.ref(one) for one in model.parameters() if one.dim() == 2]
    pack_model(model, best())
    gc.collect()
    assert sum(weight() is not None for weight in weights) == kept, "but for an input table of its own"


def test_the_products_come_in_the_order_of_their_use():
    model = tiny_model("llama")
    pack_model(model, best())
    layer = [(64, 32), (32, 32), (96, 32), (32, 48)]
    assert [(one.packed.rows, one.packed.columns) for one in products(model)] == [*layer * 3, (VOCAB, 32)]


class Largest(TorchDispatchMode):
    """Notes how many bytes the largest tensor that PyTorch makes meanwhile has."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in inputs:
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_step_makes_nothing_of_a_weights_size(dtype: torch.dtype, int8: bool):
    engine = packed_engine(tiny_model("llama_tied", dtype=dtype), int8=int8)
    smallest = min(one.packed.words.nbytes for one in products(engine.model))
    read(engine, 1)
    sequence = engine.open()
    for token in TOKENS[:3]:
        with Largest() as largest:
            engine.step([Feed(sequence, (token,), (-1,), (0,))])
        engine.commit(sequence, [0])
        assert 0 < largest.bytes < smallest / 2


def test_a_models_buffers_stay_where_they_are_from_step_to_step():
    engine = packed_engine(tiny_model("gemma3", dtype=torch.bfloat16))
    read(engine)
    assert engine._native is not None
    spaces = {id(space): space for space in (layer._workspace for layer in engine.model.model.layers)}
    assert len(spaces) == 1, "the layers share one"

    def addresses() -> list[dict[str, int]]:
        used = (*spaces.values(), engine._native._workspace)
        return [{name: buffer.data_ptr() for name, buffer in space._buffers.items()} for space in used]

    before = addresses()
    assert all(before)
    for size in (1, 8, 3):
        read(engine, size)
    assert addresses() == before


# Models that are built otherwise

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}


def other_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


# Each with how many of its layers the native library computes as a whole, and how many linear layers beside them.
OTHERS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "queries, keys and values in one": (lambda: Phi3Config(**SIZES), 0, 9),
    "another layout altogether": (lambda: GPTNeoXConfig(**SIZES), 0, 9),
    "norms after the parts only": (lambda: Olmo2Config(**SIZES), 0, 15),
    "another activation": (lambda: LlamaConfig(**SIZES, hidden_act="relu"), 0, 15),
    "a rotation of neighbours": (lambda: HeliumConfig(**SIZES), 0, 15),
    "what a layer adds is scaled": (lambda: GraniteConfig(**SIZES, residual_multiplier=0.22), 0, 15),
    "no rotation in the second layer": (lambda: SmolLM3Config(**SIZES, no_rope_layer_interval=2), 1, 8),
    "biases everywhere": (lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), 2, 1),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("what", OTHERS)
def test_a_layer_of_another_kind_stays_as_it_is(what: str, dtype: torch.dtype):
    make, blocks, linears = OTHERS[what]
    exact, plain = plain_logits(other_model(make(), dtype).float()), plain_logits(other_model(make(), dtype))
    model = other_model(make(), dtype)
    found = read(packed_engine(model), 10)
    assert (kinds(model)["Block"], kinds(model)["PackedLinear"], kinds(model)["Linear"]) == (blocks, linears, 0)
    assert error(found, exact) < max(1e-4, 1.2 * error(plain, exact))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("magnitude", [0.02, 0.1])
def test_a_layer_that_adds_little_is_compared_by_what_it_adds(magnitude: float, dtype: torch.dtype, int8: bool):
    sizes = {**SIZES, "initializer_range": magnitude, "tie_word_embeddings": False}
    model = other_model(SmolLM3Config(**sizes, no_rope_layers=[1, 0]), dtype)
    model.get_input_embeddings().weight.mul_(30)
    pack_model(model, best(), int8)
    assert [isinstance(layer, Block) for layer in model.model.layers] == [True, False]


def test_a_layer_that_is_called_otherwise_is_not_taken_apart():
    model = tiny_model("llama")
    traced, layer = trace(model), model.model.layers[1]
    call = traced.calls[layer]
    assert dissect(layer, traced) is not None
    unturned = replace(call, kwargs={**call.kwargs, "position_embeddings": None})
    for other in (unturned, replace(call, args=(*call.args, None))):
        assert dissect(layer, replace(traced, calls={**traced.calls, layer: other})) is None


def scaled(module: Any) -> None:
    """Let a module give a tenth more than its class says."""
    original = module.forward
    module.forward = lambda *arguments, **options: 1.1 * original(*arguments, **options)


def hooked(module: Any) -> None:
    """The same by a hook."""
    module.register_forward_hook(lambda module, arguments, output: 1.1 * output)


class Lowered(nn.Linear):
    """A linear layer with something of its own, as adapters are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 0.1 * x.mean(-1, keepdim=True)


def adapted(module: Any) -> None:
    module.__class__ = Lowered


CHANGED = [
    ("model.layers.1", scaled),
    ("model.layers.1", hooked),
    ("model.layers.1.mlp", scaled),
    ("model.layers.1.mlp", hooked),
    ("model.layers.1.input_layernorm", scaled),
    ("model.layers.1.input_layernorm", hooked),
    ("model.layers.1.self_attn.q_proj", scaled),
    ("model.layers.1.self_attn.q_proj", hooked),
    ("model.layers.1.self_attn.q_proj", adapted),
    ("model.layers.1.mlp.down_proj", scaled),
    ("model.norm", scaled),
    ("model.norm", hooked),
    ("lm_head", scaled),
    ("lm_head", hooked),
    ("lm_head", adapted),
    ("model.embed_tokens", scaled),
    ("model.embed_tokens", hooked),
]


@pytest.mark.parametrize(("name", "change"), CHANGED)
def test_what_computes_otherwise_than_its_class_is_left_alone(name: str, change: Callable[[Any], None]):
    own, model = tiny_model("llama_tied"), tiny_model("llama_tied")
    for one in (own, model):
        change(one.get_submodule(name))
    changed = model.get_submodule(name)
    expected = plain_logits(own)
    assert error(plain_logits(tiny_model("llama_tied")), expected) > 1e-3
    found = read(packed_engine(model), 10)
    assert error(found, expected) < 1e-4
    assert changed in model.modules()
    assert kinds(model)["Block"] == (2 if "layers" in name else 3)


def test_what_is_used_twice_in_a_pass_is_left_alone():
    own, model = tiny_model("llama"), tiny_model("llama")
    for one in (own, model):
        one.model.layers[2].mlp = one.model.layers[0].mlp
    found = read(packed_engine(model), 10)
    assert kinds(model) == {"Block": 1, "PackedLinear": 9, "Linear": 3, "PackedNorm": 5}
    assert error(found, plain_logits(own)) < 1e-4


def test_a_packed_layer_asks_for_the_context_of_its_pass():
    model = tiny_model("llama")
    pack_model(model, best())
    with pytest.raises(UnsupportedModel, match="a packed layer computes one pass at a time, and needs its context"):
        plain_logits(model)


# Whether there is anything to speed it up with


@pytest.mark.parametrize("int8", [False, True])
def test_a_model_on_the_cpu_is_sped_up_by_the_best_kernels(int8: bool, caplog: pytest.LogCaptureFixture):
    model = tiny_model("gemma2", dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, logger="paceline"):
        assert speed_up(model, int8) is native.kernels()
    assert "packed 3 layers, 1 linear layers and 1 norms beside them" in caplog.text
    assert {one.packed.dtype for one in products(model)} == {torch.int8 if int8 else torch.bfloat16}
    assert model.dtype == torch.bfloat16


def test_without_the_native_library_pytorch_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(packed, "kernels", lambda: None)
    model = tiny_model("llama")
    modules = list(model.modules())
    assert speed_up(model) is None
    assert list(model.modules()) == modules
    assert products(model) == []
    assert "the native library was not built, so PyTorch computes LlamaForCausalLM, and slower" in caplog.text
    engine = TorchEngine(model, kv_tokens=256, block_size=4)
    assert error(read(engine, 10), plain_logits(tiny_model("llama"))) < 1e-4


def test_a_model_on_another_device_is_left_alone(caplog: pytest.LogCaptureFixture):
    model = tiny_model("llama").to("meta")
    modules = list(model.modules())
    assert speed_up(model) is None
    assert list(model.modules()) == modules
    assert not caplog.records
