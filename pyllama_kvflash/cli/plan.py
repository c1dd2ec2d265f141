"""`kvflash plan`: which options suit a machine and a context, the memory they take, and the speed and answers to expect."""

import json
import shlex
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pyllama_kvflash.cli import kinds, params
from pyllama_kvflash.cli.fetch import outlined
from pyllama_kvflash.cli.memory import about, sum_line
from pyllama_kvflash.cli.report import Reporter
from pyllama_kvflash.cli.roles import Command
from pyllama_kvflash.errors import UsageError, number
from pyllama_kvflash.loading import expected
from pyllama_kvflash.loading.bits import SMALL_BATCH
from pyllama_kvflash.loading.load import check_file
from pyllama_kvflash.loading.need import DRIVER
from pyllama_kvflash.loading.offers import Offer, Rank, best, offers, rank, usable
from pyllama_kvflash.loading.warned import untrained
from pyllama_kvflash.native import Model, devices
from pyllama_kvflash.text import printable

HELP = """Compare the ways to run a model on a machine: how much GPU memory and RAM each way takes, how fast it answers, and how close its
answers are to the full cache's.

Only the model's metadata is read, and no weights are loaded. For a model on the Hub (-hf), only the header is downloaded, some MB. --memory
and --ram describe the machine; --memory 0 stands for one without a GPU. The ways are the full cache in f16, q8_0 and q4_0, the full cache in
RAM (llama.cpp's --no-kv-offload), pools, and lossless decoding through pools. If a card is too small for the weights, there are also ways with
small batches (-ub), and with the weights of some layers in RAM (-ncmoe). Memory is computed. Speed and answers are those of the models that
were measured (docs/results/choices.md, coarse.md); yours may differ.

A pool keeps codes of 4 bits a value for all other tokens. If these do not fit, it has codes of 2 bits, and if those do not fit either, none.

The last line is the command for the recommended way: the full f16 cache if it fits, else the way closest to it whose answers are as good as
q8_0's, else lossless decoding, else the best of the rest. A way for which each token reads a quarter more of the experts from RAM is not
recommended. Without a GPU, it is a pool for contexts above 4K, since that is faster. The line before the command says why. Put your own text in place of long.txt.

\b
  full, q8_0              --kvflash off -ctk q8_0 -ctv q8_0
  full, q8_0 in RAM       the same, and --set kv_offload=false
  pool 4K, f16, 4 bits    --kvflash 4K --kvflash-coarse 4
  pool 4K, f16            --kvflash 4K --kvflash-coarse off
  pool 4K, f16, lossless  --kvflash 4K --kvflash-mode lossless, with codes or without

\b
  kvflash plan model.gguf --memory 12G -c 128K
  kvflash plan -hf ggml-org/Qwen3-8B-GGUF:Q4_K_M --memory 8G --ram 32G -c 64K
  kvflash plan model.gguf --memory 0 --ram 16G -c 32K    without a GPU
  kvflash plan model.gguf -c 32K --json                  for this machine
"""


@click.command(cls=Command, help=HELP, short_help="Say which options suit a card and a context.")
@params.MODEL
@click.option(
    "--memory",
    metavar="SIZE",
    type=kinds.ByteSize(),
    default=None,
    help="Memory of the GPU, 0: no GPU.  [default: that of this machine's GPU, if any]",
)
@click.option(
    "--headroom",
    metavar="SIZE",
    type=kinds.ByteSize(),
    default="512M",
    show_default=True,
    help="Part of --memory that the desktop and other programs take; 0 if the card does nothing else.",
)
@click.option(
    "--ram",
    metavar="SIZE",
    type=kinds.ByteSize(),
    default=None,
    help="Free RAM: the machine's, less what the system and other programs take.  [default: what is free here]",
)
@click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=kinds.TokenCount(),
    default=0,
    show_default=True,
    help="Context size in tokens, 0: loaded from the model.",
)
@click.option(
    "-ub",
    "--ubatch-size",
    "n_ubatch",
    type=kinds.TokenCount(),
    default=None,
    help=f"Physical batch size: prompt tokens computed at once.  [default: 512, or {SMALL_BATCH} where memory is short]",
)
@params.ROPE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    model_arg: str | None,
    model: str | None,
    *,
    memory: int | None,
    headroom: int,
    ram: int | None,
    n_ctx: int,
    n_ubatch: int | None,
    as_json: bool,
    **rope_options: Any,
) -> None:
    """Print the ways to run a model, and the command for the best one."""
    reporter = Reporter()
    gpu, ram = _machine(memory, headroom, ram)
    rope = params.rope(rope_options)
    with outlined(model_arg, model, reporter) as (path, named):
        check_file(path)
        with Model.load(path, no_alloc=True, rope=rope) as loaded:
            n_ctx, name = n_ctx or loaded.n_reach, loaded.description
            warnings = untrained(loaded, n_ctx)
        found = offers(path, n_ctx, gpu, ram, n_ubatch)
    choice = best(found, n_ctx)
    typed = [*params.rope_flags(rope), *(["-ub", str(n_ubatch)] if n_ubatch else [])]
    command = partial(command_of, named=named, n_ctx=n_ctx, typed=typed)
    for warning in warnings:
        reporter.warn(warning)
    if as_json:
        ways = [{**_as_dict(offer, n_ctx), "command": command(offer)} for offer in found]
        taken = None if choice is None else found.index(choice)
        asked = {"model": printable(path), "n_ctx": n_ctx, "gpu": gpu, "ram": ram}
        click.echo(json.dumps({**asked, "ways": ways, "best": taken}))
    else:
        free = f", of which {about(headroom)} are for other programs (--headroom)" if memory and headroom else ""
        card = f"a GPU with {about(memory or gpu)}{free}" if gpu else "no GPU"
        _show(f"{name}, context {n_ctx:,}; {card}; {about(ram)} of RAM", found, choice, n_ctx)
    if choice is None:
        raise UsageError(too_small(found))
    if not as_json:
        click.echo(f"\n{_why(choice, found, n_ctx)}")
        click.echo(command(choice))


def _machine(memory: int | None, headroom: int, ram: int | None) -> tuple[int, int]:
    """Return how many bytes of a GPU (0: no GPU) and of RAM may be used. Raises UsageError."""
    here = devices()
    gpu = memory if memory is not None else next((d.free + DRIVER for d in here if d.gpu), 0)
    ram = ram if ram is not None else next(d.free for d in here if not d.gpu)
    for name, size, least in (("--memory", gpu, 0), ("--headroom", headroom, 0), ("--ram", ram, 1)):
        if size < least:
            msg = f"{name} is {size}: give a size such as 12G"
            raise UsageError(msg)
    if memory:
        if memory <= headroom:
            msg = (
                f"--memory is {memory:,} bytes, and --headroom leaves nothing of it: give more, or a smaller --headroom"
            )
            raise UsageError(msg)
        gpu = memory - headroom
    return gpu, ram


_REASONS = {
    Rank.CLOSE: "of the ways that fit, its answers are the closest to the full f16 cache's",
    Rank.CODED: "the most bits that fit; answers of so small a pool were not measured",
    Rank.LOSSLESS: "its answers are the full cache's; other ways that fit are faster, with worse answers (leave --kvflash-mode out)",
    Rank.FAR: "nothing that fits is closer to the full f16 cache",
    Rank.BLIND: "no way fits that sees more than its pool: long answers are worse",
}
_LOST = 1.0  # nats of divergence at which the texts have nothing in common
_BROKEN = "broken"
_SLOW = 0.1  # times the full cache's speed
_ON_GPU = "times the full f16 cache's on the same GPU (8B shape, H100 and H200; pools: of 4,096 tokens)"
_HYBRID = (
    "times the full f16 cache's on the same GPU (27B with 16 attention layers of 64, H200; pools: of 4,096 tokens)"
)
_ON_CPU = "times the full f16 cache's on the same CPU (Qwen2.5-Coder-0.5B, two cores; a larger model gains less)"
_WORDS = (
    "answers: long ones, compared with the full f16 cache's (Qwen2.5-Coder-1.5B at 16K; --json has the figures)",
    "4 bits, 2 bits: bits a value of the codes for the text outside the pool",
    "avoid: less than a tenth of the speed, or broken answers",
)
_OF_RAM = "≤: an upper bound, not measured: some weights are read from RAM, at 50 GB/s"


def _show(head: str, found: list[Offer], choice: Offer | None, n_ctx: int) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("GiB", "GPU", "RAM", "fits", "speed", "answers"):
        table.add_column(name, no_wrap=name != "answers")
    for offer in found:
        row = (
            f"{'> ' if offer is choice else '  '}{label(offer)}",
            *(f"{offer.bytes_of(gpu=gpu) / 2**30:.1f}" for gpu in (True, False)),
            _fits(offer, n_ctx),
            speed(offer, n_ctx),
            answers(offer, n_ctx),
        )
        table.add_row(*row)
    console.print(head, markup=False, soft_wrap=True)
    console.print(table)
    how = (_HYBRID if found[0].recurrent else _ON_GPU) if found[0].on_gpu else _ON_CPU
    more = [_OF_RAM] if any(map(_of_ram, found)) else []
    for line in (f"speed: of an answer, {how}", *_WORDS, *more):
        console.print(line, markup=False, soft_wrap=True)
    if choice is not None:
        for need in choice.needs:
            console.print(f"{need.name if need.gpu else 'RAM'}: {sum_line(need)}", markup=False, soft_wrap=True)


def label(offer: Offer) -> str:
    """Return a way's name in the table."""
    name = "full" if offer.n_pool is None else f"pool {offer.options['pool'] // 1024}K"
    kind = f"{offer.options.get('type_k', 'f16')}{' in RAM' if offer.kind == 'RAM' else ''}"
    bits = "" if offer.coarse == "off" else f", {offer.coarse} bits"
    layers = f", -ncmoe {offer.n_on_cpu}" if offer.n_on_cpu else ""
    batch = f", -ub {offer.options['n_ubatch']}" if "n_ubatch" in offer.options and not layers else ""
    return f"{name}, {kind}{bits}{', lossless' if offer.lossless else ''}{layers}{batch}"


def _flags(offer: Offer) -> list[str]:
    """Return a way's options on the command line."""
    o = offer.options
    flags = ["--kvflash", "off" if o["pool"] == "off" else f"{o['pool'] // 1024}K"]
    flags += ["--kvflash-coarse", o["coarse"]] if "coarse" in o else []
    flags += ["-ctk", o["type_k"], "-ctv", o["type_v"]] if "type_k" in o else []
    flags += ["--set", "kv_offload=false"] if "kv_offload" in o else []
    flags += ["--kvflash-mode", "lossless"] if offer.lossless else []
    return flags + (["-ub", str(o["n_ubatch"])] if "n_ubatch" in o else [])


def command_of(offer: Offer, named: list[str], n_ctx: int, typed: list[str]) -> str:
    """Return the command for a way. typed: options that were given to `plan`, and apply to every way."""
    context = f"{n_ctx // 1024}K" if n_ctx % 1024 == 0 else str(n_ctx)
    moe = ["--n-cpu-moe", "auto"] if offer.moves else []
    return shlex.join(["kvflash", "run", *named, "-f", "long.txt", "-c", context, *typed, *_flags(offer), *moe])


def speed(offer: Offer, n_ctx: int) -> str:
    """Return a way's speed, for the table."""
    if offer.lossless:
        return f"{number(expected.LOSSLESS[0])}-{number(expected.LOSSLESS[1])} x"
    times = offer.speed(n_ctx)
    if _of_ram(offer):
        return f"≤ {number(float(f'{offer.most_speed:.2g}'))} tok/s"
    return "not measured" if times is None else f"{times:.2g} x"


def _of_ram(offer: Offer) -> bool:
    """Return whether a way uses a GPU and also reads weights from RAM for each token."""
    return offer.on_gpu and offer.host_read > 0 and not offer.lossless and offer.kind != "RAM"


def _why(choice: Offer, found: list[Offer], n_ctx: int) -> str:
    """Return why a way is recommended."""
    if not choice.on_gpu:
        pool = "it answers faster than the full cache on a CPU, and keeps what it read"
        return (
            f"taken: {pool if choice.n_pool else 'the full cache, because a pool would take more RAM for a long text'}"
        )
    if choice.n_on_cpu:
        weights = (
            f"the CPU reads {about(choice.host_read)} of weights, of {choice.n_on_cpu} layers, from RAM for each token"
        )
        return f"taken: nothing that is worth running fits the GPU alone; {weights}"
    if choice.kind == "f16":
        return "taken: the full f16 cache fits"
    if any(offer.kind == "f16" and not offer.lacking for offer in found):
        return "taken: its answers are as good as q8_0's, and with the full f16 cache each token would read more experts from RAM"
    return f"taken: {_REASONS[rank(choice, n_ctx)]}"


def _fits(offer: Offer, n_ctx: int) -> str:
    if offer.lacking:
        return f"no: {', '.join(offer.lacking)}"
    slow = (offer.speed(n_ctx) or 1) < _SLOW
    return "avoid" if slow or answers(offer, n_ctx) == _BROKEN else "yes"


def answers(offer: Offer, n_ctx: int) -> str:
    """Return how good a way's long answers are. They are compared with the full f16 cache's, by mean KL divergence."""
    far = offer.divergence(n_ctx)
    if far is None:
        return "not measured"
    if not any(far.values()):
        return "full cache's"
    if offer.is_close(n_ctx):
        return "as good as q8_0"
    return "worse" if max(far.values()) < _LOST else _BROKEN


def _as_dict(offer: Offer, n_ctx: int) -> dict[str, Any]:
    return {
        "kind": offer.kind,
        "options": offer.options,
        "n_pool": offer.n_pool,
        "gpu_bytes": offer.bytes_of(gpu=True),
        "ram_bytes": offer.bytes_of(gpu=False),
        "fits": not offer.lacking,
        "lacking": offer.lacking,
        "needs": [need.as_dict() for need in offer.needs],
        "speed": offer.speed(n_ctx),
        "layers_on_cpu": offer.n_on_cpu,
        "answers": answers(offer, n_ctx),
        "kld": offer.divergence(n_ctx),
    }


def too_small(found: list[Offer]) -> str:
    """Return the sentence for a machine on which no way fits."""
    least = min(usable(found), key=lambda offer: sum(offer.lacking.values()))
    weights = sum(need.weights for need in least.needs if need.gpu == least.on_gpu)
    lacks = " and ".join(f"{where} lacks {about(n)}" for where, n in least.lacking.items())
    return (
        f"nothing that is worth running fits: for the nearest ({label(least)}), {lacks}, with {about(weights)} of"
        f" weights{' on the GPU' if least.on_gpu else ''}; take a smaller quantisation or a shorter context (-c)"
    )
