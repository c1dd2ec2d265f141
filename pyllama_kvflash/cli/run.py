"""`kvflash run`: answer a prompt."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pyllama_kvflash import native
from pyllama_kvflash.cli import params
from pyllama_kvflash.cli.chat import asked_of, converse
from pyllama_kvflash.cli.fetch import model_path
from pyllama_kvflash.cli.figures import stats_table
from pyllama_kvflash.cli.messages import is_typed
from pyllama_kvflash.cli.output import Answer, Output
from pyllama_kvflash.cli.prompt import PROMPT, Prompt
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Prints, reads_scorer_model
from pyllama_kvflash.cli.trace import TraceWriter
from pyllama_kvflash.cli.warm import SNAPSHOT, Warm
from pyllama_kvflash.engine.answer import check_max_tokens
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import DeviceLostError, Interrupted, KVFlashError, OutputError, SnapshotError, UsageError
from pyllama_kvflash.events import Done, Event, Prefill, Token, Warn, as_dict, stats_dict
from pyllama_kvflash.loading.need import peak_bytes
from pyllama_kvflash.text import printable, to_json

LAYERS_EVERY = 16
"""Positions between two lines of a trace that say how many layers hold each chunk. Layers choose for every token."""

HELP = """Answer a prompt.

A model with a chat template gets the prompt as a message. A model without one, or with --no-chat-template, completes the prompt
as it is. Without a prompt, on a terminal, a conversation begins as in `kvflash chat`. Only the answer goes to stdout; progress,
notes and the closing line go to stderr. Without MODEL.gguf, the bundled needle-7m runs: a 7 MB model that knows nothing but
secret codes hidden in long texts, good for a first try.

\b
  kvflash run model.gguf -p "Why is the sky blue?"
  kvflash run model.gguf -f book.txt -p "Who is the captain?" --kvflash 4K
  kvflash run model.gguf -f one.txt -f two.txt -p "What do these do?" -sys "You are terse." --temp 0
  kvflash run model.gguf -f half-a-story.txt --no-chat-template -n 200
  cat book.txt | kvflash run model.gguf -f - -p "Who is the heir?" --json > answer.json
  kvflash run model.gguf -f book.txt --kvflash 4K --trace out.jsonl && kvflash plot out.jsonl
  kvflash run model.gguf -f book.txt -no-cnv --save-snapshot book.kvsnap -n 1
  kvflash run model.gguf --restore book.kvsnap --append -p "The heir is"

A pool too small for what it must hold (the first chunk, the last four, pins, one batch and two more chunks) is enlarged, with
a warning. Sizes take K and M. The environment can set options, such as LLAMA_ARG_CTX_SIZE and KVFLASH_POOL: see
docs/ENVIRONMENT.md.
"""


@click.command(cls=Command, help=HELP, short_help="Answer a prompt.", context_settings={"allow_extra_args": True})
@params.MODEL
@PROMPT
@click.option(
    "-n",
    "--predict",
    "--n-predict",
    "n_predict",
    type=int,
    default=256,
    show_default=True,
    envvar=params.env("N_PREDICT"),
    help="Most tokens to predict, -1: until the context is full, 0: only read the prompt.",
)
@click.option(
    "-r",
    "--reverse-prompt",
    "stop",
    multiple=True,
    metavar="TEXT",
    help="Stop at this text, which is not shown. It can be given several times.",
)
@params.POOL
@params.SPEC
@params.CONTEXT
@params.COMPUTE
@params.SAMPLING
@SNAPSHOT
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=Prints(),
    help="Write to this file instead of stdout (-). An existing file is replaced at the end of the answer; if the run fails,"
    " it stays. If the file cannot be written, as on a full disk, the answer goes to stdout.",
)
@click.option(
    "--trace",
    metavar="FILE",
    type=Prints(),
    help="Record which chunks are resident, their scores and their moves, for `kvflash plot FILE`. With -o, it may be"
    " stdout (-).",
)
@click.option("--stats", is_flag=True, help="Show all figures on stderr at the end.")
@click.option(
    "--json/--jsonl",
    "as_json",
    default=None,
    help="At the end, write one JSON object with text, reason and figures; or write every event as a line of JSON.",
)
@params.VERBOSITY
def run(
    model_arg: str | None,
    model: str | None,
    n_predict: int,
    stop: tuple[str, ...],
    output: str | None,
    trace: str | None,
    *,
    stats: bool,
    as_json: bool | None,
    quiet: bool | None,
    **options: Any,
) -> int:
    """Answer a prompt. Returns the exit code."""
    context = click.get_current_context()
    refuse_text(context.args)
    if _begins_talk(context):
        reporter = Reporter(quiet=quiet)
        options = {name: value for name, value in options.items() if name not in (*_OF_A_PROMPT, "conversation")}
        options |= {"n_predict": n_predict if _is_typed(context, "n_predict") else -1, "template_file": None}
        asked = asked_of(options, (), reporter)  # as llama-cli does
        return converse(model_path(model_arg, model, reporter), asked, options, reporter)
    check_max_tokens(n_predict)
    sampling = params.sampling(options, random.getrandbits(31))  # drawn here, so that --stats can show it
    options["spec"] = params.spec(options)
    cache_size = params.cache_size()
    options = params.resolve(options)
    reporter = Reporter(quiet=quiet)
    warm = Warm(options, reporter, cache_size)
    prompt = Prompt(options, reporter, appends=warm.appends)
    warm.expect(prompt.text)
    path = model_path(model_arg, model, reporter)
    if reporter.verbose:
        native.show_log()
    reads_scorer_model(options["policy"], options.get("scorer_model"), path)
    errors: list[KVFlashError] = []  # a file that fails costs neither the answer nor another file
    with Answer(output, errors.append) as out, _trace(trace, output, errors.append) as writer, native.interruptible():
        with reporter.loading(path.name) as bar:
            kv = KVFlash.from_file(path, progress=bar, **options)
        with kv:
            reporter.opened(kv)
            tokens, append = warm.begin(kv, partial(prompt.tokens, kv, reporter))
            stops = (*stop, *prompt.stop)
            events = kv.generate(tokens, max_tokens=n_predict, sampling=sampling, stop=stops, append=append)
            if writer:
                events = _traced(writer, kv, events)
            answer, done = _write(events, out, reporter, as_json=as_json is True, as_jsonl=as_json is False)
            if not answer.strip() and n_predict and done.reason != "interrupted":
                reporter.warn(f"the answer is empty: {prompt.hint()}")
            if as_json:
                _json_line(out, _summary(kv, path, answer, done))
            out.close()
            if writer:
                writer.close()
            try:
                warm.end(kv, done.stats.prefill_s)
            except SnapshotError as err:
                errors.append(err)
    reporter.answered(replace(done.stats, peak_bytes=peak_bytes()), done.reason)  # saving takes memory, too
    if stats:
        reporter.console.print(stats_table(done.stats))
    for error in errors[:-1]:
        reporter.warn(str(error))
    if errors:
        raise errors[-1]
    return Interrupted.exit_code if done.reason == "interrupted" else 0


_OF_A_PROMPT = ("prompt", "prompt_files", "save_snapshot", "restore", "append")
_OF_A_RUN = (*_OF_A_PROMPT, "stop", "output", "trace", "stats", "as_json")
"""Parameters that a conversation does not have."""


def _is_typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) == ParameterSource.COMMANDLINE


def _begins_talk(context: click.Context) -> bool:
    """Return whether to begin a conversation: there is no prompt, and a person can type one. -cnv alone is no prompt."""
    plain = context.params["conversation"] is False
    return is_typed() and not plain and not any(_is_typed(context, name) for name in _OF_A_RUN)


def refuse_text(words: list[str]) -> None:
    """Raise UsageError for words after the model: a prompt must be given with an option."""
    if words:
        msg = f'{words[0]!r} comes after the model: give a prompt with -p "text", or a file with -f FILE'
        raise UsageError(msg)


def _write(
    events: Iterator[Event], out: Output, reporter: Reporter, *, as_json: bool, as_jsonl: bool
) -> tuple[str, Done]:
    """Write the events to `out` as text or JSON lines, and progress to the reporter. Return the text and the last
    event.
    """
    plain = not as_json and not as_jsonl
    text = ""
    with (
        reporter.prefilling() as bar,
        reporter.answering(hidden=plain and out.is_seen) as line,
        _kept(lambda: text, out, as_json=as_json),
    ):
        for event in events:
            if as_jsonl:
                _json_line(out, as_dict(event))
            if isinstance(event, Prefill):
                bar(event)
            elif isinstance(event, Warn):
                reporter.warn(event.text)
            elif isinstance(event, Token | Done):
                bar.finish()
                text += event.text
                if plain:
                    out.write(event.text)
            line(event)
            if isinstance(event, Done):
                if plain and not text.endswith("\n") and (text or event.reason != "interrupted"):
                    out.write("\n")
                return text, event
    msg = "the engine stopped without a last event"
    raise AssertionError(msg)


@contextmanager
def _kept(text: Callable[[], str], out: Output, *, as_json: bool) -> Iterator[None]:
    """With --json, write the text so far if a device is lost, since the object at the end will not be written."""
    try:
        yield
    except DeviceLostError as err:
        if as_json:
            _json_line(out, {"text": text(), "reason": "error", "error": str(err)})
        raise


def _trace(
    name: str | None, output: str | None, on_error: Callable[[OutputError], None]
) -> AbstractContextManager[TraceWriter | None]:
    """Open the trace, if one is asked for. Raises UsageError and OutputError."""
    if name is None:
        return nullcontext()
    if name == "-" and output in {None, "-"}:
        msg = "--trace - and the answer both go to stdout: give a file for one of them"
        raise UsageError(msg)
    return TraceWriter(name, on_error)


def _traced(writer: TraceWriter, kv: KVFlash, events: Iterator[Event]) -> Iterator[Event]:
    """Yield the events, and write each to the trace."""
    o = kv.options
    writer.start(
        model=printable(kv.model.path), policy=kv.policy, n_ctx=o.n_ctx, n_pool=kv.n_pool, chunk=o.chunk, tau=o.interval
    )
    due = 0  # number of positions at which the layers are recorded again
    for event in events:
        if kv.policy == "fresh" and (kv.n_tokens >= due or isinstance(event, Prefill | Done)):
            writer.layers(kv.n_tokens, kv.ctx.pool_info().n_layer, kv.residency().layers)
            due = kv.n_tokens + (1 if isinstance(event, Prefill) else LAYERS_EVERY)
        writer.event(as_dict(event))
        yield event


def _json_line(out: Output, value: dict[str, Any]) -> None:
    out.write(to_json(value, ensure_ascii=False) + "\n")


def _summary(kv: KVFlash, path: Path, text: str, done: Done) -> dict[str, Any]:
    return {
        "model": printable(path),
        "description": kv.model.description,
        "policy": kv.policy,
        "text": text,
        "reason": done.reason,
        "notes": kv.notes,
        "warnings": kv.warnings,
        "stats": stats_dict(done.stats),
    }
