"""The peers of `paceline bench run`: other systems on the same weights, prompts and cores, each in its own process."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.bench_peer import LLAMA_CPP, TRANSFORMERS, Broken, PeerSpec, gguf_quantisation
from paceline.cluster.bench_report import Report, drafter_label
from paceline.cluster.bench_run import Ask, PeerFailed
from paceline.cluster.bench_stats import Answer, Case, Group
from paceline.cluster.config import FOREIGN, INT8, NGRAM, ORACLE, CellConfig
from paceline.cluster.models import ModelError, Progress, original_gguf, resolve

_LOAD_AT_MOST, _ANSWER_AT_MOST, _END_AT_MOST = 300.0, 600.0, 5.0  # seconds
_REPORT_EVERY = 1.0
# Not -m, which would make its classes those of another module than the ones that we know.
_MAIN = "from paceline.cluster.bench_peer import main; main()"


@dataclass(frozen=True, slots=True)
class Weights:
    """What the cell of a benchmark runs on, for whoever is to run on the same.

    directory: the target's.  cell: the name of its drafters.  assistant: a drafter's directory, if one is a model on
    disk.
    """

    directory: Path
    dtype: str
    device: str
    cell: str
    assistant: Path | None


class Peer:
    """A peer and its process; see bench_run.Contestant."""

    def __init__(self, spec: PeerSpec, case: Case) -> None:
        self.case = case
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal is not for it; we end it ourselves
        )
        theirs.close()
        self._connection.send(spec)

    def await_ready(self, progress: Progress) -> None:
        """Wait until its model is loaded.  Raises PeerFailed."""
        started = time.monotonic()
        while not self._connection.poll(_REPORT_EVERY):
            waited = time.monotonic() - started
            progress(f"loading {self.case.label}, {waited:.0f} s")
            if waited > _LOAD_AT_MOST:
                raise PeerFailed(f"it did not load within {_LOAD_AT_MOST:.0f} s")
        self._receive(0)

    def run(self, asks: Sequence[Ask]) -> Group:
        """See Contestant.run.  One after the other."""
        started = time.perf_counter()
        answers = tuple(self._answer(ask) for ask in asks)
        return Group(answers, time.perf_counter() - started)

    def _answer(self, ask: Ask) -> Answer:
        try:
            self._connection.send((ask.prompt, ask.tokens))
        except OSError as error:
            raise PeerFailed(f"its process is gone: {error}") from error
        answer: Answer = self._receive(_ANSWER_AT_MOST)
        return answer

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                raise PeerFailed(f"it did not answer within {seconds:.0f} s")
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise PeerFailed(f"its process ended with exit code {self._process.wait(_END_AT_MOST)}") from error
        if isinstance(message, Broken):
            raise PeerFailed(message.reason)
        return message

    def close(self) -> None:
        """End its process."""
        self._connection.close()
        self._process.kill()
        self._process.wait(_END_AT_MOST)


@contextmanager
def running(
    specs: Sequence[tuple[PeerSpec, Case]], note: Callable[[str], None], progress: Progress
) -> Iterator[list[Peer]]:
    """Those of the peers that can be loaded, one after the other; of the others, a note says why not."""
    with ExitStack() as stack:
        ready = []
        for spec, case in specs:
            peer = Peer(spec, case)
            stack.callback(peer.close)
            try:
                peer.await_ready(progress)
                ready.append(peer)
            except PeerFailed as failure:
                note(f"{case.label} is left out: {failure}")
        yield ready


def wanted(
    config: CellConfig, dtype: str, gguf: Path | None, report: Report, progress: Progress
) -> list[tuple[PeerSpec, Case]]:
    """The peers to run beside a cell that runs in `dtype`; those without a drafter beside the first cell only.

    gguf: the target's weights for llama.cpp, where they are known.  What cannot be run is noted in the report.
    """
    # Imported here, since it brings torch along, which takes seconds.
    from paceline.actors.device import Device

    first = not report.rows
    weights = Weights(
        resolve(config.target, progress=progress).directory,
        dtype,
        Device.resolve(config.device).kind,
        drafter_label(config.drafters),
        _assistant(config.drafters, progress),
    )
    found: list[tuple[PeerSpec, Case]] = []
    for threads in _threads(weights.device):
        if first:
            found.append(_transformers(weights, threads, "generate", "none"))
            found.append(_transformers(weights, threads, "prompt lookup", "prompt lookup", lookup=True))
        if weights.assistant is not None:
            assistant = str(weights.assistant)
            found.append(_transformers(weights, threads, "assisted", weights.cell, assistant=assistant))
    return found + (_llama_cpp(weights, config.target, gguf, report, progress) if first else [])


def _assistant(drafters: Sequence[str], progress: Progress) -> Path | None:
    """The first drafter that is a model on disk, which transformers can draft with too."""
    models = [name for name in drafters if name not in (NGRAM, INT8) and not name.startswith((ORACLE, FOREIGN))]
    return resolve(models[0], progress=progress).directory if models else None


def _threads(device: str) -> Sequence[int]:
    """A peer is run on the verifier's core, and on as many as verifier and drafter have together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (1, 2) if device == "cpu" and cores > 1 else (1,)


def _transformers(weights: Weights, threads: int, way: str, drafter: str, **more: Any) -> tuple[PeerSpec, Case]:
    directory = str(weights.directory)
    spec = PeerSpec(TRANSFORMERS, directory, weights.dtype, weights.device, threads, **more)
    return spec, _case(weights, TRANSFORMERS, way, drafter, threads, weights.dtype)


def _llama_cpp(
    weights: Weights, target: str, gguf: Path | None, report: Report, progress: Progress
) -> list[tuple[PeerSpec, Case]]:
    try:
        file = _llama_cpp_weights(weights, target, gguf, progress)
        kept = gguf_quantisation(file)
    except (PeerFailed, ModelError, OSError, ValueError) as failure:
        report.note(f"llama.cpp is left out: {failure}")
        return []
    return [
        (
            PeerSpec(LLAMA_CPP, str(file), kept, "cpu", threads),
            _case(weights, LLAMA_CPP, kept, "none", threads, kept),
        )
        for threads in _threads("cpu")
    ]


def _llama_cpp_weights(weights: Weights, target: str, gguf: Path | None, progress: Progress) -> Path:
    """Raises PeerFailed, ModelError."""
    if weights.device != "cpu":
        raise PeerFailed("it is compared on CPUs only")
    if importlib.util.find_spec("xllamacpp") is None:
        raise PeerFailed("xllamacpp is not installed (pip install 'paceline[bench]')")
    file = gguf or original_gguf(target, progress=progress)
    if file is None:
        raise PeerFailed("no .gguf file of the target is known; name one with --gguf")
    return file


def _case(weights: Weights, system: str, way: str, drafter: str, threads: int, dtype: str) -> Case:
    return Case(
        system=system,
        schedule=way,
        drafter=drafter,
        cell=weights.cell,
        batch=1,
        temperature=0.0,
        devices=threads,
        dtype=dtype,
    )
