"""Write what models of several sizes take on cards of several sizes, by `kvflash plan`: tables of docs/MODELS.md and docs/results/choices.md.

    python bench/cards.py

The models are shapes without weights, which takes no room and no GPU. It takes four minutes on one core.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import gguf

from kvflash_bench.shape_tensors import Shape
from kvflash_bench.shapes import SHAPES, write_outline
from kvflash_bench.tables import line, markdown
from pyllama_kvflash.cli.plan import answers, command_of, label, speed, too_small
from pyllama_kvflash.loading.offers import Offer, best, offers

DOCS = Path(__file__).parent.parent / "docs"
QWEN3, QWEN35 = 151_936, 248_320  # tokens of their vocabularies
CONTEXTS, CARDS = (32_768, 131_072), (0, 8, 12, 16, 24)
RAM = 64  # GiB
HEADROOM = 512 << 20  # of a card, for a desktop
NO_GPU = 16 << 30  # bytes of RAM without a card
Q4_0, SMALLER = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.IQ3_S
WITH_YARN = "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768"
SCALED = f"""The model was trained for 32,768 tokens. For 128K add `{WITH_YARN}`
([why](FAQ.md#can-a-text-be-longer-than-what-the-model-was-trained-for))."""
UNSCALED = "The model was trained for 262,144 tokens."


class Named(NamedTuple):
    """A model. about: what docs/MODELS.md says of it, which has only models of which there is something to say."""

    name: str
    shape: Shape
    about: str = ""


MODELS = (
    Named("8B (Qwen3-8B)", replace(SHAPES["8b"], n_vocab=QWEN3), SCALED),
    Named(
        "14B (Qwen3-14B)",
        Shape(n_layer=40, n_embd=5120, n_ff=17408, n_head=40, n_head_kv=8, n_head_dim=128, n_vocab=QWEN3),
        SCALED,
    ),
    Named(
        "27B (dense, Gemma 3's shape)",
        Shape(n_layer=62, n_embd=5376, n_ff=21504, n_head=32, n_head_kv=16, n_head_dim=128, n_vocab=QWEN3),
    ),
    Named("27B hybrid (Qwen3.5-27B)", replace(SHAPES["27b-hybrid"], n_vocab=QWEN35), UNSCALED),
    Named(
        "30B-A3B (Qwen3-30B-A3B)",
        Shape(
            n_layer=48, n_embd=2048, n_ff=768, n_head=32, n_head_kv=4, n_head_dim=128,
            n_expert=128, n_used=8, n_vocab=QWEN3,
        ),
        SCALED,
    ),
    Named("35B-A3B (Qwen3.5-35B-A3B)", replace(SHAPES["35b-a3b"], n_vocab=QWEN35), UNSCALED),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Planned:
    """What there is for a model and a context on a card of so many GiB, and for a file of fewer bits if layers are on the CPU else."""

    context: int
    card: int
    found: list[Offer]
    smaller: list[Offer]

    @property
    def choice(self) -> Offer | None:
        """The way to take."""
        return best(self.found, self.context)


#
# plans
#


def plans(model: Named, folder: Path) -> Iterator[Planned]:
    """Yield the plans of a model for all contexts and cards."""
    path, smaller = folder / "model.gguf", folder / "smaller.gguf"
    for each in (path, smaller):
        write_outline(model.shape, each)
    requantise(smaller)
    for context in CONTEXTS:
        for card in CARDS:
            gpu, ram = max(0, (card << 30) - HEADROOM), RAM << 30 if card else NO_GPU
            planned = Planned(context, card, offers(path, context, gpu, ram), [])
            if card and model.about and on_cpu(planned.choice):
                found = offers(smaller, context, gpu, ram)
                planned = replace(planned, smaller=[] if on_cpu(best(found, context)) else found)
            print(f"{model.name}, {context // 1024}K", f"{card} GiB", *taken(planned.choice), sep=" | ", flush=True)
            yield planned


def on_cpu(offer: Offer | None) -> bool:
    """Return whether nothing fits, or the CPU computes with weights of a model."""
    return offer is None or offer.n_on_cpu > 0


def requantise(path: Path) -> None:
    """Make the matrices of an outline SMALLER."""
    reader, end = gguf.GGUFReader(path, "r+"), 0
    for tensor in reader.tensors:
        *_, kind, offset = tensor.field.parts
        n_bytes = tensor.n_bytes
        if kind[0] == Q4_0:
            block, size = gguf.GGML_QUANT_SIZES[SMALLER]
            kind[0], n_bytes = int(SMALLER), tensor.n_elements // block * size
        offset[0] = end
        end += -(-int(n_bytes) // reader.alignment) * reader.alignment
    size = int(reader.data_offset) + end
    del reader, tensor, kind, offset  # they have the file mapped
    with path.open("r+b") as file:
        file.truncate(size)


#
# docs/MODELS.md
#


def commands(model: Named, planned: list[Planned]) -> str:
    """Return the part about a model: for each card and context what to type, and what it takes and gives."""
    head = ("card", "context", f"`{run()}` and", "GPU, GiB", "RAM, GiB", "speed", "answers")
    ordered = sorted((each for each in planned if each.card), key=lambda each: (each.card, each.context))
    rows = [
        (f"{each.card} GiB{more}", f"{each.context // 1024}K", *given(found, each.context))
        for each in ordered
        for more, found in (("", each.found), (f", {SMALLER.name}", each.smaller))
        if found
    ]
    lines = (head, ("---:", "---:", "---", "---:", "---:", "---:", "---"), *rows)
    table = "".join(map(line, lines))
    size = f"A file in {Q4_0.name} has {model.shape.n_bytes / 2**30:.1f} GiB."
    parts = [f"## {model.name}", f"{size} {model.about}", table.rstrip(), *ways_out(model, ordered)]
    return "\n\n".join(parts) + "\n"


def ways_out(model: Named, planned: list[Planned]) -> Iterator[str]:
    """Yield what to do where the file leaves layers to the CPU."""
    slow = [each for each in planned if on_cpu(each.choice)]
    helped = [each for each in slow if each.smaller]
    left = [each for each in slow if not each.smaller]
    if helped:
        n_bytes = model.shape.n_bytes * bits(SMALLER) / bits(Q4_0)
        yield (
            f"**Take a file of fewer bits for {in_words(helped)}.** One in {SMALLER.name} has {n_bytes / 2**30:.1f} GiB, and the GPU"
            " computes all of its layers."
        )
    if left:
        yield (
            f"**Nothing worth running fits {in_words(left)}.** The CPU computes some of the layers, which is slow, with a file in"
            f" {SMALLER.name}, too. Take a file of still fewer bits, a smaller model, or one with experts."
        )


def in_words(planned: list[Planned]) -> str:
    """Return the cards, and the contexts if not all of a card are meant."""
    contexts: dict[int, list[str]] = {}
    for each in planned:
        contexts.setdefault(each.card, []).append(f"{each.context // 1024}K")
    return " and ".join(
        f"{card} GiB" if len(names) == len(CONTEXTS) else f"{card} GiB at {names[0]}"
        for card, names in contexts.items()
    )


def bits(kind: gguf.GGMLQuantizationType) -> float:
    """Return the bits of a weight."""
    n, size = gguf.GGML_QUANT_SIZES[kind]
    return 8 * size / n


def run(offer: Offer | None = None, context: int = 0) -> str:
    """Return the command for an offer; None: how all begin."""
    model = "model.gguf"
    return f"kvflash run {model} -f long.txt" if offer is None else command_of(offer, [model], context, [])


def given(found: list[Offer], context: int) -> tuple[str, ...]:
    """Return the options of the way to take, what it takes and what it gives."""
    offer = best(found, context)
    if offer is None:
        return too_small(found), "", "", "", ""
    options = run(offer, context).removeprefix(run()).strip()
    return f"`{options}`", gib(offer, gpu=True), gib(offer, gpu=False), speed(offer, context), answers(offer, context)


#
# docs/results/choices.md
#


COLUMNS = ["model, context", "card", "full f16", "full q8_0", "full q4_0", "full q8_0 in RAM", "pool", "take", "RAM"]


def ways(model: Named, planned: list[Planned]) -> list[list[str]]:
    """Return the rows of a model: what each way takes."""
    rows = []
    for each in planned:
        by_kind = {offer.kind: offer for offer in reversed(each.found) if not offer.lossless}
        rows.append(
            [
                f"{model.name}, {each.context // 1024}K",
                f"{each.card} GiB" if each.card else "none",
                *(cell(by_kind.get(kind)) for kind in ("f16", "q8_0", "q4_0", "RAM", "pool")),
                *taken(each.choice),
            ]
        )
    return rows


def cell(offer: Offer | None) -> str:
    """Return what a way takes of the card, or of RAM without one, struck through if it does not fit."""
    if offer is None:
        return ""
    size = gib(offer, gpu=offer.on_gpu)
    return f"~~{size}~~" if offer.lacking else size


def taken(offer: Offer | None) -> list[str]:
    """Return the way to take, and what it takes of RAM."""
    if offer is None:
        return ["-", "-"]
    return [label(offer), gib(offer, gpu=False)]


def gib(offer: Offer, *, gpu: bool) -> str:
    """Return what an offer takes of the GPU's memory or of RAM."""
    return f"{offer.bytes_of(gpu=gpu) / 2**30:.1f}"


#
# pages
#


def write(page: Path, part: str) -> None:
    """Write the part of a page between the marks."""
    begin, end = (f"<!-- bench/cards.py: {where} -->\n" for where in ("begin", "end"))
    before, _, rest = page.read_text("utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}{part}{end}{after}", "utf-8")


def main() -> None:
    """Write both tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    parts, rows = [], []
    for model in MODELS:
        with TemporaryDirectory() as folder:
            planned = list(plans(model, Path(folder)))
        rows += ways(model, planned)
        parts += [commands(model, planned)] if model.about else []
    write(DOCS / "MODELS.md", "\n".join(parts))
    write(DOCS / "results" / "choices.md", markdown(COLUMNS, rows))


if __name__ == "__main__":
    main()
