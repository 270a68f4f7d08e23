"""Text out of a stream equals the one-shot decode, and ends where the first stop string starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paceline.actors.text import TextCodec, load_tokenizer
from table_models import random_table
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|user|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It doesn't stop, does it?",
    "Stop here. STOP there! ###\n\nUser: hello world",
    "héllo wörld, 你好世界 🙂🙃 👩‍👩‍👧 naïve café",
] * 3


def byte_level() -> Tokenizer:
    """Like GPT-2's, Llama 3's, Qwen's and SmolLM2's: a character may be spread over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2's: pieces with a leading space, and one token per byte for what has no piece."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "▁▁", "a", "b", "s", "t", "o", "p", ".", "▁a", "▁stop", "é", "▁the", "\n", "\ufffd"]
    tokens = [*SPECIAL, *bytes_, *pieces]
    tokenizer = Tokenizer(
        models.BPE(dict(zip(tokens, range(len(tokens)), strict=True)), [], unk_token="<s>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Like Mistral's and Gemma's unigrams."""
    tokens = [*SPECIAL, "▁", "▁▁", "▁stop", "st", "op", "▁a", "é", "你", "🙂", "##"]
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """Words, their continuations, and spaces that only a following token brings."""
    tokens = [*SPECIAL, "stop", "##ping", "##s", "it", "'", "s", ".", "do", "not", "n't", "a"]
    tokenizer = Tokenizer(models.WordPiece(dict(zip(tokens, range(len(tokens)), strict=True)), unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}"
    "<|user|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"
)


def write_tokenizer(directory: Path, kind: str, **options: Any) -> Path:
    """Save a tokenizer as a checkpoint has it."""
    options = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": ["<|user|>"], **options}
    PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), **options).save_pretrained(directory)
    return directory


@cache
def codec_of(kind: str) -> tuple[TextCodec, Any]:
    """A codec and, as the reference, the tokenizer that it wraps."""
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), kind)
        return TextCodec.load(directory), load_tokenizer(directory)


def one_shot(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def blocks(ids: Sequence[int], cuts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """`ids` in blocks of these sizes, and the rest in one."""
    start = 0
    for size in cuts:
        yield tuple(ids[start : start + size])
        start += size
    yield tuple(ids[start:])


def collect(
    codec: TextCodec, pieces: Iterator[tuple[int, ...]], stop: Sequence[str] = (), **options: Any
) -> tuple[str, int | None]:
    """All text of a stream, and how many ids it took to a complete stop string."""
    stream, text, taken = codec.stream(stop, **options), "", 0
    for piece in pieces:
        more, used = stream.push(piece)
        text += more
        if used is not None:
            assert 1 <= used <= len(piece)
            assert stream.flush() == ""
            return text, taken + used
        taken += len(piece)
    return text + stream.flush(), None


def naive(
    tokenizer: Any, ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0, include: bool = False
) -> tuple[str, int | None]:
    """What `collect` must give, by decoding everything again after every id."""
    early = len(one_shot(tokenizer, ids[:min_tokens]).rstrip("\ufffd"))
    for used in range(1 + min_tokens, len(ids) + 1):
        text = one_shot(tokenizer, ids[:used])
        complete = text.rstrip("\ufffd")
        places = [(start, s) for s in stop for start in range(len(complete)) if complete.startswith(s, start)]
        found = min(((start, s) for start, s in places if start + len(s) > early), default=None)
        if found:
            return text[: found[0] + len(found[1]) * include], used
    return one_shot(tokenizer, ids), None


CUTS = st.lists(st.integers(0, 5), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_of_any_ids_make_up_the_one_shot_decode(kind: str, data: st.DataObject) -> None:
    codec, tokenizer = codec_of(kind)
    # Two ids beyond the vocabulary, as a model with a padded one may draw them.
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 1), max_size=24))
    assert collect(codec, blocks(ids, data.draw(CUTS))) == (one_shot(tokenizer, ids), None)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_stop_string_ends_the_text_wherever_it_lies(kind: str, data: st.DataObject) -> None:
    codec, tokenizer = codec_of(kind)
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 1), min_size=1, max_size=20))
    text = one_shot(tokenizer, ids).strip("\ufffd") or "x"
    start = data.draw(st.integers(0, len(text) - 1))
    inside = text[start : start + data.draw(st.integers(1, 6))]
    stop = data.draw(st.lists(st.sampled_from([inside, "st", "stop", "op.", " ", "aa", "é", "\U0001f642"]), min_size=1))
    stop = [s.replace("\ufffd", "") or "a" for s in stop]
    min_tokens, include = data.draw(st.sampled_from([0, 0, 1, 2, 5])), data.draw(st.booleans())
    found = collect(codec, blocks(ids, data.draw(CUTS)), stop, min_tokens=min_tokens, include=include)
    assert found == naive(tokenizer, ids, stop, min_tokens, include)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), cuts=CUTS)
@example(text="family 👩‍👩‍👧 naïve 你好", cuts=[1, 1, 1, 1, 1, 1])
def test_encoded_text_comes_back_whole(text: str, cuts: list[int]) -> None:
    codec, _ = codec_of("byte_level")
    # A lone surrogate has no UTF-8, so no bytes to spell.
    text = text.encode("utf-8", "ignore").decode()
    if not any(special in text for special in SPECIAL):
        assert collect(codec, blocks(codec.encode(text), cuts)) == (text, None)


def test_a_character_of_several_tokens_comes_out_once_it_is_whole() -> None:
    codec, _ = codec_of("byte_level")
    ids = codec.encode("🫠")
    assert len(ids) > 1
    stream = codec.stream()
    assert [stream.push((id,))[0] for id in ids] == [*[""] * (len(ids) - 1), "🫠"]


def test_half_a_character_is_not_a_stop_string_of_replacement_characters() -> None:
    codec, _ = codec_of("byte_level")
    ids = codec.encode("a🫠b")
    assert collect(codec, blocks(ids, [1] * len(ids)), ["\ufffd"]) == ("a🫠b", None)


def test_half_a_character_at_the_end_is_what_the_one_shot_decode_makes_of_it() -> None:
    codec, tokenizer = codec_of("byte_level")
    ids = codec.encode("a🫠")[:-1]
    stream = codec.stream()
    assert stream.push(ids) == ("", None)
    assert stream.flush() == one_shot(tokenizer, ids) == "a\ufffd"


def test_a_wrong_byte_spoils_its_whole_run_as_in_the_one_shot_decode() -> None:
    codec, tokenizer = codec_of("byte_fallback")
    euro = [3 + byte for byte in "€".encode()]
    good, bad = [*euro, codec.vocab_size - 3], [*euro, 3 + 0xFF, codec.vocab_size - 3]
    assert one_shot(tokenizer, good).startswith("€")
    assert one_shot(tokenizer, bad).startswith("\ufffd" * 4)
    for ids in (good, bad):
        assert collect(codec, blocks(ids, [1] * len(ids))) == (one_shot(tokenizer, ids), None)


def test_a_stop_string_of_byte_tokens_is_found_at_its_last_byte() -> None:
    codec, _ = codec_of("byte_fallback")
    stream = codec.stream(["€"])
    assert stream.push(tuple(3 + byte for byte in "€".encode())) == ("", 3)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_strings_in_a_block_and_over_several(size: int) -> None:
    codec, _ = codec_of("byte_level")
    ids = codec.encode("Say ###\n\nUser: no")
    text, used = collect(codec, blocks(ids, [size] * (len(ids) // size)), ["#\n\nUs", "never"])
    assert text == "Say ##"
    assert used is not None
    spelled = codec.stream()
    assert "#\n\nUs" in spelled.push(ids[:used])[0] + spelled.flush()
    fewer = codec.stream()
    assert "#\n\nUs" not in fewer.push(ids[: used - 1])[0] + fewer.flush()


def test_what_could_become_a_stop_string_is_held_back_and_let_go() -> None:
    codec, _ = codec_of("byte_level")
    stream = codec.stream(["STOP"])
    assert stream.push(codec.encode("go ST")) == ("go ", None)
    assert stream.push(codec.encode("ST")) == ("ST", None)
    assert stream.push(codec.encode("AY S")) == ("STAY ", None)
    assert stream.flush() == "S"


def test_of_two_stop_strings_the_one_that_is_complete_first_counts() -> None:
    codec, _ = codec_of("byte_level")
    ids = tuple(id for letter in "xabcd" for id in codec.encode(letter))
    assert collect(codec, blocks(ids, []), ["abcd", "bc"]) == ("xa", 4)
    whole = codec.encode("Stop here.")
    joined = next(id for id in whole if len(one_shot(codec_of("byte_level")[1], [id])) > 2)
    word = one_shot(codec_of("byte_level")[1], [joined])
    assert codec.stream([word[2:], word[1:]]).push((joined,)) == (word[:1], 1)


def test_special_tokens_give_no_text_and_do_not_part_a_stop_string() -> None:
    codec, _ = codec_of("byte_fallback")
    the, a = codec.vocab_size - 3, codec.vocab_size - 6
    assert collect(codec, blocks([0, the, 1, 2, a], [1, 1, 1, 1])) == ("the a", None)
    assert codec.stream(["the a"]).push((0, the, 1, 2, a, the)) == ("", 5)


def test_long_streams_take_the_same_time_per_token() -> None:
    codec, _ = codec_of("byte_level")
    ids = codec.encode("The quick brown fox jumps over the lazy dog. " * 8)

    def seconds(rounds: int) -> float:
        stream, start = codec.stream(["never said"]), time.perf_counter()
        for _ in range(rounds):
            stream.push(ids)
        return (time.perf_counter() - start) / rounds

    seconds(2)
    # Decoding everything again each time would make it 20 times as long.
    assert seconds(40) < 5 * seconds(2)


def test_a_prompt_gets_the_tokenizers_own_special_tokens_and_a_chat_gets_them_once(tmp_path: Path) -> None:
    codec = TextCodec.load(write_tokenizer(tmp_path, "byte_fallback", chat_template=TEMPLATE))
    assert codec.has_chat_template
    assert codec.encode("stop")[0] == 0
    ids = codec.encode_chat([{"role": "user", "content": "stop"}])
    assert ids.count(0) == 1
    assert (ids[0], ids[1], ids[-1]) == (0, 2, 1)


def test_a_refused_role_and_a_missing_template_are_value_errors(tmp_path: Path) -> None:
    codec = TextCodec.load(write_tokenizer(tmp_path, "byte_fallback", chat_template=TEMPLATE))
    with pytest.raises(ValueError, match="no system messages here"):
        codec.encode_chat([{"role": "system", "content": "be good"}])
    plain, _ = codec_of("byte_fallback")
    assert not plain.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "stop"}])


def test_a_chat_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    codec = TextCodec.load(write_tokenizer(tmp_path, "byte_level", chat_template=template))
    with pytest.raises(ValueError, match="unsafe"):
        codec.encode_chat([{"role": "user", "content": "stop"}])


def test_a_stored_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "byte_level")
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    codec = TextCodec.load(tmp_path)
    assert codec.encode(CORPUS[0]) == codec_of("byte_level")[0].encode(CORPUS[0])
    assert load_tokenizer(tmp_path).backend_tokenizer.truncation is None


def test_eos_ids_come_from_every_file_that_names_some(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "byte_level")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert TextCodec.load(tmp_path).eos_ids == {1, 7, 8, 9}


def test_a_model_without_a_tokenizer_speaks_ids_only(table_model: Callable[..., Path]) -> None:
    codec = TextCodec.load(table_model(random_table(8, seed=0), eos=5))
    assert (codec.eos_ids, codec.vocab_size, codec.has_chat_template) == (frozenset({5}), 0, False)
    stream = codec.stream()
    assert stream.push((1, 2, 3)) == ("", None)
    assert stream.flush() == ""
    for refused in (
        lambda: codec.encode("hello"),
        lambda: codec.encode_chat([{"role": "user", "content": "hello"}]),
        lambda: codec.stream(["stop"]),
    ):
        with pytest.raises(ValueError, match="no tokenizer"):
            refused()


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        codec_of("byte_level")[0].stream(["ok", ""])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_smollm2_streams_what_it_decodes(smollm2_dir: Path, data: st.DataObject) -> None:
    codec, tokenizer = _smollm2(smollm2_dir)
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size - 1), min_size=1, max_size=40))
    cuts = data.draw(CUTS)
    assert collect(codec, blocks(ids, cuts)) == (one_shot(tokenizer, ids), None)
    stop = data.draw(st.lists(st.sampled_from([" the", "ing", "\n", "er t", "é"]), min_size=1, max_size=3))
    assert collect(codec, blocks(ids, cuts), stop) == naive(tokenizer, ids, stop)


@pytest.mark.slow
def test_smollm2_chats(smollm2_dir: Path) -> None:
    codec, tokenizer = _smollm2(smollm2_dir)
    assert codec.eos_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert codec.vocab_size == 49152
    prompt = tokenizer.decode(list(codec.encode_chat([{"role": "user", "content": "Hi 🙂"}])))
    assert prompt.endswith("<|im_start|>user\nHi 🙂<|im_end|>\n<|im_start|>assistant\n")


@cache
def _smollm2(directory: Path) -> tuple[TextCodec, Any]:
    return TextCodec.load(directory), load_tokenizer(directory)
