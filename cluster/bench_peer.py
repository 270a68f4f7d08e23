"""What runs in the process of a peer: another system that answers the benchmark's prompts, on cores of its own.

Only greedy decoding, one prompt at a time: the one thing that all of them do in the same way.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.cluster.bench_stats import Answer

Generate = Callable[[Sequence[int], int], Answer]

TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
LOOKUP_TOKENS = 10
"""What transformers' documentation suggests for `prompt_lookup_num_tokens`."""


_CONTEXT = 8192
"""Tokens of a prompt and its answer that llama.cpp makes room for: more than any of the benchmark's."""


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """A peer.  model: a checkpoint directory; of llama.cpp, a .gguf file.  threads: of its own, each on its core.

    device: "cpu" or "cuda".  assistant: the drafter's directory, for assisted generation.  lookup: whether it drafts by
    prompt lookup.
    """

    system: str
    model: str
    dtype: str
    device: str
    threads: int
    assistant: str = ""
    lookup: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """It failed; why."""

    reason: str


def main() -> None:
    """The process's main; its only argument is the file descriptor of a connection, which brings a PeerSpec first.

    It says None once it is ready, then an Answer for every (prompt, tokens); Broken, and it ends.
    """
    with Connection(int(sys.argv[1])) as connection:
        try:
            spec: PeerSpec = connection.recv()
            _settle(spec.threads)
            generate = (_llama_cpp if spec.system == LLAMA_CPP else _transformers)(spec)
            connection.send(None)
            while True:
                connection.send(generate(*connection.recv()))
        except (EOFError, BrokenPipeError):
            pass  # nobody listens any more
        except Exception as error:  # What other systems raise is their own affair.
            connection.send(Broken(" ".join(f"{type(error).__name__}: {error}".split())))


def _settle(threads: int) -> None:
    """Keep this process on its first cores, which are the verifier's and the drafter's too."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))


def _transformers(spec: PeerSpec) -> Generate:
    import torch
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(spec.threads)
    torch.set_grad_enabled(False)
    model = load_transformers(spec.model, spec.dtype, spec.device)
    more: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if spec.lookup else {}
    if spec.assistant:
        more["assistant_model"] = load_transformers(spec.assistant, spec.dtype, spec.device)

    class Pieces(BaseStreamer):  # type: ignore[misc]
        """Notes what comes when.  The first thing that comes is the prompt."""

        def __init__(self) -> None:
            self.pieces: list[tuple[float, list[int]]] = []
            self.started = time.perf_counter()

        def put(self, value: torch.Tensor) -> None:
            self.pieces.append((time.perf_counter() - self.started, value.flatten().tolist()))

        def end(self) -> None:
            pass

    def generate(prompt: Sequence[int], tokens: int) -> Answer:
        ids = torch.tensor([list(prompt)], device=spec.device)
        streamer = Pieces()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            streamer=streamer,
            **more,
        )
        seconds = time.perf_counter() - streamer.started
        made = streamer.pieces[1:]
        answer = tuple(token for _, piece in made for token in piece)
        return Answer(answer, tuple((at, len(piece)) for at, piece in made if piece), seconds)

    return generate


def load_transformers(directory: str | Path, dtype: str, device: Any) -> Any:
    """A checkpoint as transformers itself runs it."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = {"trust_remote_code": False, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), **plain)
    return model.to(device).eval()


def _llama_cpp(spec: PeerSpec) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = spec.model
    params.n_ctx = _CONTEXT
    params.n_parallel = params.n_threads_http = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec.threads
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)

    def generate(prompt: Sequence[int], tokens: int) -> Answer:
        events: list[tuple[float, dict[str, Any]]] = []
        started = time.perf_counter()

        def event(data: dict[str, Any]) -> None:
            events.append((time.perf_counter() - started, data))

        ask = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True, "cache_prompt": False}
        server.handle_completions(ask, event)
        return llama_answer(events)

    return generate


def llama_answer(events: Sequence[tuple[float, dict[str, Any]]]) -> Answer:
    """The answer in llama.cpp's stream of (seconds, event): text in pieces, at the end how many tokens it was.

    It sends a piece per token, but holds back half a character; those tokens count where the last piece came.
    The ids themselves are not told.  Raises RuntimeError for an error instead of an answer.
    """
    if not events or "error" in events[-1][1]:
        raise RuntimeError(str(events[-1][1]["error"] if events else "no answer"))
    seconds, last = events[-1]
    times = [at for at, event in events if event["choices"][0]["text"]]
    count = int(last["usage"]["completion_tokens"])
    pieces = [1] * len(times)
    if pieces:
        pieces[-1] += max(0, count - len(times))
    return Answer((), tuple(zip(times, pieces, strict=True)), seconds)


def gguf_quantisation(file: Path) -> str:
    """What a .gguf file keeps most of its weights in, such as "Q4_1"."""
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(str(file)).fields.get("general.file_type")
    return LlamaFileType(int(field.contents())).name.removeprefix("MOSTLY_") if field is not None else "GGUF"
