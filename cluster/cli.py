"""The command line: what can be said on it, and what it says when something is wrong.

Nothing heavy is imported here, so that `--help` and a mistyped option answer at once; `commands` does the work.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

log = logging.getLogger(__name__)

app = typer.Typer(
    name="paceline",
    help="Speculative decoding with drafters and verifiers on separate devices.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")
vocab = typer.Typer(help="Choose the tokens that a drafter guesses.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(vocab, name="vocab")


def _unsigned(bits: int) -> Callable[[str], int]:
    """What reads a number that has to fit a field of the protocol; its user checks the rest."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a whole number.") from None
        if not 0 <= value < 1 << bits:
            raise typer.BadParameter(f"{value} is not in the range 0 to {(1 << bits) - 1}.")
        return value

    return number


_U32, _U64 = _unsigned(32), _unsigned(64)

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help='The prompt; "-" reads it from standard input.')]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Call the server there (see `paceline up`) and start nothing."),
]
ServeAt = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve gRPC; port 0 takes a free one.")]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The target: a directory, a .gguf file, a hub id or an alias (see `paceline models`). "
        "[default: smollm2-135m]",
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="MODEL",
        help='A drafter: a model, or "ngram" (prompt lookup), or "int8" (the target in int8), or "foreign:MODEL" (with '
        "a tokenizer of its own, whose vocabulary is not to be chosen); may be given several times. "
        '"none": no drafter. [default: ngram]',
    ),
]
DraftersPerSession = Annotated[
    int | None,
    typer.Option(metavar="N", help="How many of several drafters draft for one request together. [default: 1]"),
]
DrafterVocab = Annotated[
    str | None,
    typer.Option(
        metavar="N|FILE",
        help="Tokens that model drafters guess: the N most frequent ones, or those of a file (see `paceline vocab "
        "rank`). Fewer make a small drafter faster. [default: all]",
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where the models run. [default: auto]"),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"] | None,
    typer.Option(help="Number format of the weights; auto is bfloat16 where the device has it. [default: auto]"),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="S",
        help="Who works when: plain, sync, pearl, amusd, saguaro, swiftspec, or auto, which picks one of these by what "
        "is measured. [default: auto, or the server's]",
    ),
]
K = Annotated[
    int | None,
    typer.Option(parser=_U32, metavar="K", help="Depth of the draft, 1 to 32. [default: 4, or the server's]"),
]
Fanout = Annotated[
    int | None,
    typer.Option(
        parser=_U32,
        metavar="F",
        help="saguaro: outcomes readied per position, 1 to 8. [default: 3, or the server's]",
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        parser=_U32, metavar="W", help="swiftspec: leaves grown per step, 1 to 16. [default: 4, or the server's]"
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        parser=_U32, metavar="B", help="swiftspec: nodes verified per pass, 1 to 64. [default: 12, or the server's]"
    ),
]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 is greedy; 1 leaves the model's odds as they are.")]
TopP = Annotated[float, typer.Option(metavar="X", help="Keep the likeliest tokens of this much probability; 1: all.")]
TopK = Annotated[int, typer.Option(parser=_U32, metavar="N", help="Keep the N likeliest tokens; 0: all.")]
MinP = Annotated[float, typer.Option(metavar="X", help="Drop tokens below X times the likeliest one; 0: none.")]
Seed = Annotated[
    int | None,
    typer.Option(parser=_U64, metavar="N", help="Fixes all randomness. [default: drawn, and shown at the end]"),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        parser=_U32, metavar="N", help="The most tokens to generate. [default: what the context and the server allow]"
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="S", help="End where this string is complete; may be given up to 16 times."),
]
MaxDepth = Annotated[
    int | None,
    typer.Option(
        "--max-k", parser=_U32, metavar="K", help="No draft is deeper, under any schedule, 1 to 32. [default: no bound]"
    ),
]
PresencePenalty = Annotated[
    float, typer.Option(metavar="X", help="Taken from the logit of tokens that were written already, -2 to 2.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(metavar="X", help="Taken from it as often as they were written, -2 to 2.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(metavar="X", help="Divides the logit of tokens that stand in prompt or answer; 1: off.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=X", help="Add X, -100 to 100, to this token's logit; may be given several times."),
]
Choices = Annotated[
    int | None, typer.Option("--n", parser=_U32, metavar="N", help="How many answers to write, 1 to 64. [default: 1]")
]
MinTokens = Annotated[int, typer.Option(parser=_U32, metavar="N", help="End with none of the first N tokens.")]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id", parser=_U32, metavar="ID", help="End after this token; may be given several times."
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end.")]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="Show the stop string that ended the answer, too.")]
Logprobs = Annotated[
    int | None,
    typer.Option(
        parser=_U32, metavar="N", help="With --json: each token's log-probability, and the N likeliest tokens, 0 to 20."
    ),
]
PromptLogprobs = Annotated[
    int | None, typer.Option(parser=_U32, metavar="N", help="With --json: the same for the prompt's tokens.")
]
BadWords = Annotated[
    list[str] | None,
    typer.Option("--bad-word", metavar="S", help="Never complete this word; may be given up to 64 times."),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(metavar="JSON|@FILE", help="Write JSON that follows this schema; {} is any JSON."),
]
Regex = Annotated[str | None, typer.Option(metavar="S|@FILE", help="Write what this regular expression matches.")]
Grammar = Annotated[
    str | None,
    typer.Option(metavar="S|@FILE", help="Write what this grammar allows: EBNF, as GBNF or Lark writes it."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")]
Raw = Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")]
KvTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Cached positions over all requests, in each actor. [default: 16384]"),
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        show_default=False,
        help="Record passes of the same shape on GPUs and launch each as one. [default: yes]",
    ),
]
DefaultMaxTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="The most tokens of a request that names no limit. [default: 2048]"),
]
MaxSessions = Annotated[
    int | None,
    typer.Option(metavar="N", help="Requests that run at once; more wait. [default: 16]"),
]
MaxQueue = Annotated[
    int | None,
    typer.Option(metavar="N", help="Requests that may wait; more are refused. [default: 256]"),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write what every device did when to FILE at the end, as Chrome trace JSON; open it in ui.perfetto.dev.",
    ),
]
Grace = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long running requests may go on after Ctrl-C.")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("paceline"))
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens inside, to stderr.")] = False,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Speculative decoding with drafters and verifiers on separate devices."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format=form)
    logging.getLogger("paceline").setLevel(logging.DEBUG if verbose else logging.WARNING)
    # What goes wrong in a call is said by us; gRPC would add a traceback for each call that is cut off by the end.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)


@app.command()
def up(
    address: ServeAt = "127.0.0.1:50051",
    target: Target = None,
    drafter: Drafters = None,
    device: Device = None,
    dtype: Dtype = None,
    schedule: Schedule = None,
    k: K = None,
    fanout: Fanout = None,
    width: Width = None,
    budget: Budget = None,
    drafters_per_session: DraftersPerSession = None,
    drafter_vocab: DrafterVocab = None,
    kv_tokens: KvTokens = None,
    default_max_tokens: DefaultMaxTokens = None,
    cuda_graphs: CudaGraphs = None,
    max_sessions: MaxSessions = None,
    max_queue: MaxQueue = None,
    grace: Grace = 10.0,
    trace: Trace = None,
) -> None:
    """Start a verifier and its drafters, and serve them over gRPC until Ctrl-C.

    The first Ctrl-C (or SIGTERM) takes no more calls and lets the running ones end within the grace time; the second
    one ends them at once.  --schedule and its numbers are for requests that do not choose for themselves.

    \b
    Examples:
      paceline up
      paceline up --target ./my-model --drafter ./my-drafter --schedule sync --k 6
      paceline up --drafter ./my-drafter --drafter ngram --schedule saguaro
      paceline up --address 0.0.0.0:50051 --dtype float32
    """
    with _reported():
        from paceline.cluster import commands

        settings = {"schedule": schedule, "k": k, "fanout": fanout, "width": width, "budget": budget}
        settings |= {"kv_tokens": kv_tokens, "max_sessions": max_sessions, "max_queue": max_queue}
        settings |= {"drafters_per_session": drafters_per_session, "drafter_vocab": drafter_vocab}
        settings |= {"cuda_graphs": cuda_graphs, "default_max_tokens": default_max_tokens}
        config = commands.configure(target, drafter, device, dtype, **settings)
        commands.up(config, address, grace, trace)


@app.command()
def generate(
    prompt: Prompt,
    address: Address = None,
    target: Target = None,
    drafter: Drafters = None,
    device: Device = None,
    dtype: Dtype = None,
    schedule: Schedule = None,
    k: K = None,
    fanout: Fanout = None,
    width: Width = None,
    budget: Budget = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    n: Choices = None,
    max_tokens: MaxTokens = None,
    min_tokens: MinTokens = 0,
    stop: Stop = None,
    stop_token_id: StopTokenIds = None,
    ignore_eos: IgnoreEos = False,
    include_stop: IncludeStop = False,
    bad_word: BadWords = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    max_k: MaxDepth = None,
    json: Json = False,
    raw: Raw = False,
    trace: Trace = None,
) -> None:
    """Answer one prompt: the text goes to stdout as it comes, a line of statistics to stderr.

    Without --address, a verifier and its drafters are started for this prompt and stopped again.

    \b
    Examples:
      paceline generate "Why is the sky blue?"
      paceline generate --address 127.0.0.1:50051 --temperature 0.7 --seed 1 "Tell me a story."
      paceline generate --target ./my-model --drafter none --raw --max-tokens 32 "Once upon a time"
      paceline generate --json "Count to five." | python -m json.tool
      paceline generate --drafter ngram --trace trace.json "Count to five."
      paceline generate --json-schema '{"type": "object", "required": ["name"]}' "Invent a river, as JSON."
      cat question.txt | paceline generate -
    """
    with _reported():
        from paceline.cluster import commands

        speculation = {"schedule": schedule, "k": k, "fanout": fanout, "width": width, "budget": budget}
        speculation |= {"max_k": max_k}
        sampling: dict[str, object] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        sampling |= {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty, "seed": seed}
        sampling |= {"repetition_penalty": repetition_penalty, "logit_bias": commands.biases(logit_bias or [])}
        fields: dict[str, object] = {"n": n, "max_tokens": max_tokens, "min_tokens": min_tokens}
        fields |= {"stop_token_ids": stop_token_id, "stop": stop, "bad_words": bad_word}
        fields |= {"ignore_eos": ignore_eos, "include_stop": include_stop}
        fields |= {"logprobs": logprobs is not None, "top_logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        fields |= {"response_format": commands.response_format(json_schema, regex, grammar)}
        request = commands.options(speculation, sampling, fields)
        where = commands.where(address, target, drafter, device, dtype)
        commands.generate(where, request, commands.read_prompt(prompt), raw=raw, as_json=json, trace=trace)


@app.command()
def chat(
    address: Address = None,
    target: Target = None,
    drafter: Drafters = None,
    device: Device = None,
    dtype: Dtype = None,
    schedule: Schedule = None,
    k: K = None,
    fanout: Fanout = None,
    width: Width = None,
    budget: Budget = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
) -> None:
    """Talk with a model, line by line; it remembers what was said.

    /reset begins anew, /exit or Ctrl-D ends.  Ctrl-C cancels the running answer; at the prompt it ends.

    \b
    Examples:
      paceline chat
      paceline chat --address 127.0.0.1:50051 --temperature 0.7 --max-tokens 512
    """
    with _reported():
        from paceline.cluster import commands

        speculation = {"schedule": schedule, "k": k, "fanout": fanout, "width": width, "budget": budget}
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        request = commands.options(speculation, sampling, {"max_tokens": max_tokens, "stop": stop})
        commands.chat(commands.where(address, target, drafter, device, dtype), request)


@app.command()
def models() -> None:
    """List the models that can be named by an alias, and those in the cache.

    \b
    Example:
      paceline models
    """
    with _reported():
        from paceline.cluster import commands

        commands.models()


@app.command()
def picture(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A file that --trace wrote.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the picture, an SVG.")],
    start: Annotated[
        float | None,
        typer.Option("--from", min=0, metavar="MS", help="Where to begin. [default: in the middle]"),
    ] = None,
    length: Annotated[float, typer.Option(min=1, metavar="MS", help="How much to show.")] = 200.0,
) -> None:
    """Draw a stretch of a trace: verify passes, draft steps, verdicts, hits and misses, a lane per device.

    \b
    Examples:
      paceline generate --drafter ngram --trace trace.json "Count to five."
      paceline picture trace.json --out trace.svg --length 300
    """
    with _reported():
        from paceline.cluster import commands

        commands.picture(trace, out, start, length)


@app.command("verify-exact")
def verify_exact(
    target: Target = None,
    drafter: Drafters = None,
    device: Device = None,
    dtype: Dtype = None,
    schedule: Schedule = None,
    k: K = None,
    temperature: Temperature = 0.0,
    seed: Annotated[
        int, typer.Option(parser=_U64, metavar="N", help="Of the first prompt; each further one has the next.")
    ] = 0,
    prompts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="How many of the 84 prompts of `bench run`, from all classes in turn."),
    ] = 80,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The most tokens per answer.")] = 64,
    batch: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="How many requests run at once.")] = 4,
    margin: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="How far a token may be behind the preferred one. [default: 0.001 in float32, 0.5 in bfloat16; over "
            "the temperature]",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the results.")] = None,
) -> None:
    """Check that answers which were drafted for are the target's own: it reads each of them again and judges it.

    The target goes over prompt and answer in one large pass, where nothing is drafted.  Each position at which it
    prefers another token than the one that came is shown, with the margin: by how much, in nats of the scores that a
    token is chosen by.  The exit code is 1 if a margin is above the allowed one; rounding explains smaller ones, see
    docs/EXACTNESS.md.  Ctrl-C ends it with what is known by then.

    \b
    Examples:
      paceline verify-exact
      paceline verify-exact --drafter int8 --schedule saguaro --temperature 0.8 --json exact.json
      paceline verify-exact --target ./my-model --drafter ./my-drafter --dtype float32 --prompts 12
    """
    with _reported():
        from paceline.cluster import commands

        config = commands.configure(target, drafter, device, dtype, schedule=schedule, k=k, max_sessions=batch)
        plan = commands.exact_plan(config, prompts, temperature, seed, tokens, margin)
        commands.verify_exact(config, plan, json)


@vocab.command("rank")
def vocab_rank(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXTS...", help="Text files, UTF-8.")],
    tokenizer: Annotated[str, typer.Option(metavar="MODEL", help="The model whose tokens are counted.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the ids, a JSON list.")],
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most ids to write. [default: all that occur]")
    ] = None,
) -> None:
    """Rank a model's tokens by how often they occur in texts, for --drafter-vocab.

    Texts like those that the model is to write serve best, a few megabytes of them.  A ranking that lies beside a
    drafter's checkpoint under the name draft_vocab.json is found there by --drafter-vocab N.

    \b
    Examples:
      paceline vocab rank --tokenizer smollm2-135m --out frequent.json --keep 8192 answers/*.txt
      paceline vocab rank --tokenizer ./my-model --out ./my-drafter/draft_vocab.json answers.txt
    """
    with _reported():
        from paceline.cluster import commands

        commands.vocab_rank(tokenizer, texts, out, keep)


@bench.command("link")
def bench_link() -> None:
    """Measure the link between drafter and verifier against Ray actor calls.

    \b
    Example:
      paceline bench link
    """
    with _reported():
        from paceline.cluster import commands

        commands.bench_link()


@bench.command("engine")
def bench_engine(
    target: Target = None,
    device: Device = None,
    dtype: Dtype = None,
    nodes: Annotated[
        str, typer.Option(metavar="N,...", help="Draft tokens that a pass verifies, below one root.")
    ] = "0,1,2,4,8,16,32",
    cached: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens that are cached before the pass.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="How often everything is timed, in turns.")] = 20,
    int8: Annotated[
        bool, typer.Option("--int8/--no-int8", help="Measure it with int8 weights too, as a drafter may hold them.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Measure transformers' own forward in the same turns.")
    ] = True,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the results.")] = None,
) -> None:
    """Measure one model's passes, against the time in which its weights are read once by the same linear kernel.

    A pass over few tokens should cost little more than that.  On a CPU it runs on one core, as an actor does.

    \b
    Examples:
      paceline bench engine
      paceline bench engine --target smollm2-135m --dtype float32 --nodes 0,8 --no-peers
    """
    with _reported():
        from paceline.cluster import commands

        config = commands.configure(target, ["none"], device, dtype)
        commands.bench_engine(config, nodes, cached, rounds, int8, peers, json)


@bench.command("run")
def bench_run(
    target: Target = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X",
            help="The drafter of a cell; may be given several times, for a cell each. A model, ngram, int8 (the "
            "target's own weights in int8), oracle:alpha=0.8,cost=0.1 (synthetic), none, or several in one cell, "
            "joined by +. [default: ngram]",
        ),
    ] = None,
    drafter_vocab: DrafterVocab = None,
    device: Device = None,
    dtype: Dtype = None,
    schedules: Annotated[
        str | None, typer.Option(metavar="S,...", help="The schedules; plain is always among them. [default: all]")
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,...", help="How many requests run at once.")] = "1",
    temperature: Annotated[str, typer.Option(metavar="X,...", help="0 is greedy.")] = "0",
    k: Annotated[
        str, typer.Option(metavar="K,...", help="Draft depths; sync, pearl, amusd and saguaro are run at each.")
    ] = "4",
    fanout: Fanout = None,
    width: Width = None,
    budget: Budget = None,
    prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many of the 84 prompts, taken from all six classes in turn.")
    ] = 12,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="The most tokens per answer.")] = 64,
    link_delay: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Hold up every message between the actors by this.")
    ] = 0.0,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Measure transformers and llama.cpp beside the first drafter.")
    ] = True,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The target's weights for llama.cpp, if it cannot find them.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the results, as they come.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Save a page with charts.")] = None,
    trace: Trace = None,
) -> None:
    """Measure schedules and drafters side by side, on the same prompts, in turns, beside other systems.

    A cell is started per --drafter, and every prompt is answered under every schedule before the next one, so that
    slow minutes fall on all alike.  First of all everything answers one prompt unmeasured, to warm up.  Answers end
    where the model ends them.  Peers answer one prompt at a time, greedily, on the verifier's core, and on that of
    the drafter too.  Ctrl-C ends it, with the results up to the last complete prompt.

    \b
    Examples:
      paceline bench run
      paceline bench run --drafter ngram --drafter int8 --batch 1,8 --temperature 0,0.8 --json r.json --html r.html
      paceline bench run --drafter oracle:alpha=0.8,cost=0.1 --schedules sync,pearl,saguaro --k 2,4,6 --no-peers
    """
    with _reported():
        from paceline.cluster import commands

        settings: dict[str, object] = {"link_delay": link_delay / 1e3, "drafter_vocab": drafter_vocab}
        settings |= {"fanout": fanout, "width": width, "budget": budget}
        configs = commands.bench_configs(drafter, target, device, dtype, **settings)
        plan = commands.bench_plan(schedules, k, batch, temperature, tokens, prompts, configs[0].speculation)
        commands.bench_run(configs, plan, peers, commands.BenchFiles(json, html, trace, gguf))


@contextmanager
def _reported() -> Iterator[None]:
    """Every error as one line on stderr and an exit code: 2 what was asked is wrong, 1 it failed, 130 Ctrl-C."""
    # gRPC's own log lines would stand beside ours; it reads this when it is first imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="strict" if stream is sys.stdin else "backslashreplace")
    from paceline.cluster import commands, terminal

    with _terminable() as signalled:
        try:
            yield
        except commands.Failure as failure:
            terminal.error(str(failure))
            raise typer.Exit(failure.code) from failure
        except KeyboardInterrupt:
            raise typer.Exit(128 + signalled[-1]) from None
        except BrokenPipeError:
            # The reader has left, as `head` does; Python would complain about what it cannot flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except Exception as error:
            log.debug("unexpected", exc_info=True)
            terminal.error(f"unexpected {type(error).__name__}: {error} (paceline --verbose ... shows more)")
            raise typer.Exit(1) from error


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that all it started is taken down.  Yields what came."""
    signalled: list[int] = [signal.SIGINT]

    def interrupt(number: int, frame: FrameType | None) -> None:
        signalled.append(number)
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield signalled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """The console script `paceline`."""
    app()
