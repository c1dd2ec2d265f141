"""`kvflash demo`: the project on one screen."""

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pyllama_kvflash import native
from pyllama_kvflash.cli import kinds
from pyllama_kvflash.cli.memory import mib
from pyllama_kvflash.cli.needles import QUESTION_ROOM, Answers, ask_all, positions, read
from pyllama_kvflash.cli.output import Output
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command, Prints, reads
from pyllama_kvflash.engine.engine import KVFlash
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.events import stats_dict
from pyllama_kvflash.needle import BUNDLED_MODEL, NeedlePrompt, make_prompt

_TOKENS, _NEEDLES = 16_384, 16
HELP = """Run a long prompt through a pool, and then with the full cache.

It writes a text with secret codes hidden at even depths, lets the bundled needle-7m read it, and asks for every code. First
comes a pool with the default policy (fresh), in which the model's attention brings text back; its answers are shown at once.
For comparison, the same text and questions go through a pool of the same size that keeps only the most recent text (lru), to
show what a small cache forgets, and through the full cache, to show what the model finds with all of the text in memory, and
at what cost. The full cache takes most of the time: Ctrl-C leaves the pool's answers on the screen.

\b
  kvflash demo                              16K tokens through a pool of 2K; on 2 cores about 10 seconds to the
                                            answers of the pool, a minute to the end
  kvflash demo --tokens 32K                 the full cache then takes over two minutes
  kvflash demo --tokens 8K --kvflash 1K     about 10 seconds
"""


@click.command(cls=Command, help=HELP, short_help="A long prompt, full cache against pool.")
@click.option("--tokens", type=kinds.TokenCount(), default=_TOKENS, show_default=True, help="Length of the text.")
@click.option("--kvflash", "pool", type=kinds.TokenCount(), default=2048, show_default=True, help="Pool in tokens.")
@click.option("--needles", type=int, default=_NEEDLES, show_default=True, help="Codes to hide, and to ask for.")
@click.option("-s", "--seed", type=int, default=1, show_default=True, help="Seed of the text.")
@click.option("-t", "--threads", "n_threads", type=int, default=None, help="CPU threads.  [default: all cores]")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=Prints(),
    default=None,
    help="Write the text to this file, with the first question at its end.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")  # fmt: skip
def demo(
    tokens: int, pool: int, needles: int, seed: int, n_threads: int | None, output: str | None, *, as_json: bool
) -> None:
    """Run the demonstration."""
    reporter = Reporter()
    options: dict[str, Any] = {"n_ctx": tokens + QUESTION_ROOM, "n_threads": n_threads, "opening": 0}
    # with codes of the rest, or a lossless opening, lru would find everything, too
    alone: dict[str, Any] = {"policy": "lru", "coarse": "off"}
    reads("the bundled model", BUNDLED_MODEL)
    with native.interruptible():
        with KVFlash.from_file(BUNDLED_MODEL, pool=pool, **options) as kv:
            prompt = _make(kv, tokens, needles, seed)
            if output:
                with Output(output) as out:
                    out.write(prompt.text + prompt.needles[0].question + "\n")
                reporter.note(f"wrote {output}: {prompt.n_tokens:,} tokens, {needles} codes, one question")
            at = [start for start, _ in positions(kv, prompt)]
            recalled = _run(kv, prompt, reporter)
        if not as_json:
            _print(prompt, at, [recalled])
            reporter.note("for comparison, the same with lru and with the full cache; Ctrl-C ends it")
        with KVFlash.from_file(BUNDLED_MODEL, pool=pool, **alone, **options) as kv:
            recent = _run(kv, prompt, reporter)
        with KVFlash.from_file(BUNDLED_MODEL, pool="off", **options) as kv:
            full = _run(kv, prompt, reporter)
    runs = [full, recent, recalled]
    if as_json:
        click.echo(json.dumps(_as_dict(prompt, runs)))
        return
    _print(prompt, at, runs)
    usual = ("--tokens", tokens, _TOKENS), ("--needles", needles, _NEEDLES), ("-s", seed, 1)
    same = "".join(f" {option} {value}" for option, value, default in usual if value != default)
    hint = "" if output else f"kvflash demo -o codes.txt{same}  keeps the text, then  "
    click.echo(f"\nTry it:  {hint}kvflash run -f {output or 'codes.txt'} --kvflash {pool} -n 8 --temp 0")


def _make(kv: KVFlash, tokens: int, needles: int, seed: int) -> NeedlePrompt:
    if kv.options.n_ctx > kv.model.n_ctx_train:
        msg = f"--tokens is {tokens}: the bundled model reads {kv.model.n_ctx_train - QUESTION_ROOM} at most"
        raise UsageError(msg)
    try:
        prompt = make_prompt(tokens, lambda s: len(kv.tokenize(s, add_special=False)), n_needles=needles, seed=seed)
    except ValueError as err:
        raise UsageError(str(err)) from None
    if kv.n_pool is None:
        msg = f"a pool of {kv.options.pool:,} tokens covers the text of {tokens:,}: take a smaller --kvflash, or more --tokens"
        raise UsageError(msg)
    return prompt


def _run(kv: KVFlash, prompt: NeedlePrompt, reporter: Reporter) -> Answers:
    reporter.opened(kv)
    name, total = "full cache" if kv.n_pool is None else kv.policy, len(prompt.needles)
    with reporter.prefilling(name) as reading:
        seconds = read(kv, prompt, reading)
    with reporter.counting(f"{name} answers", total) as asking:

        def answered(n: int) -> None:
            asking.done()
            reporter.plain(f"{name} answers {n}/{total}")

        return ask_all(kv, prompt, seconds, answered)


def _print(prompt: NeedlePrompt, at: list[int], runs: list[Answers]) -> None:
    table = Table(title=f"{prompt.n_tokens:,} tokens, {len(prompt.needles)} questions", title_justify="left")
    table.add_column("code of the", overflow="fold")
    table.add_column("position", justify="right")
    for run in runs:
        table.add_column(run.name, justify="right")
    for i, needle in enumerate(prompt.needles):
        cells = [f"{run.answers[i].rstrip('.')} {'✓' if needle.answer in run.answers[i] else '✗'}" for run in runs]
        table.add_row(needle.key, f"{at[i]:,}", *cells)
    table.add_section()
    found = [sum(run.found(prompt.needles)) for run in runs]
    table.add_row("found", "", *(f"{n} of {len(prompt.needles)}" for n in found))
    if any(run.stats.gpu_bytes for run in runs):
        table.add_row("KV on the GPU", "", *(mib(run.stats.device_kv_bytes) for run in runs))
        table.add_row("records in RAM", "", *(mib(run.stats.host_bytes) for run in runs))
    else:
        table.add_row("KV in RAM", "", *(mib(run.stats.device_kv_bytes + run.stats.host_bytes) for run in runs))
    table.add_row("prefill", "", *(f"{run.stats.prefill_rate:,.0f} tok/s" for run in runs))
    table.add_row("decode", "", *(f"{run.stats.decode_rate:,.0f} tok/s" for run in runs))
    Console(highlight=False).print(table)


def _as_dict(prompt: NeedlePrompt, runs: list[Answers]) -> dict[str, Any]:
    return {
        "n_tokens": prompt.n_tokens,
        "seed": prompt.seed,
        "keys": [n.key for n in prompt.needles],
        "expected": [n.answer for n in prompt.needles],
        "runs": [
            {"name": r.name, "answers": r.answers, "found": sum(r.found(prompt.needles)), "stats": stats_dict(r.stats)}
            for r in runs
        ],
    }
