"""What models of several sizes take on cards of several sizes, by `kvflash plan`: a table of Markdown.

    python bench/cards.py --ram 64

The models are shapes in Q4_0 without weights, which takes no room and no GPU.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pyllama_kvflash.bench.grid import markdown
from pyllama_kvflash.bench.shapes import SHAPES, Shape, write_outline
from pyllama_kvflash.engine.offers import Offer, best, offers

MODELS = {
    "8B (Qwen3-8B)": SHAPES["8b"],
    "14B (Qwen3-14B)": Shape(n_layer=40, n_embd=5120, n_ff=17408, n_head=40, n_head_kv=8, n_head_dim=128),
    "27B (dense, Gemma 3's shape)": Shape(n_layer=62, n_embd=5376, n_ff=21504, n_head=32, n_head_kv=16, n_head_dim=128),
    "27B hybrid (Qwen3.5-27B)": SHAPES["27b-hybrid"],
    "30B-A3B (Qwen3-30B-A3B)": Shape(
        n_layer=48, n_embd=2048, n_ff=768, n_head=32, n_head_kv=4, n_head_dim=128, n_expert=128, n_used=8
    ),
}
N_VOCAB = 151_936
CONTEXTS, CARDS = (32_768, 131_072), (0, 8, 12, 16, 24)
HEADROOM = 512 << 20  # of a card, for a desktop
NO_GPU = 16 << 30  # bytes of RAM without a card
COLUMNS = ["model, context", "card", "full f16", "full q8_0", "full q4_0", "full q8_0 in RAM", "pool", "take", "RAM"]


def cell(offer: Offer | None) -> str:
    """Return what a way takes of the card, or of RAM without one, struck through if it does not fit."""
    if offer is None:
        return ""
    size = f"{offer.bytes_of(gpu=offer.on_gpu) / 2**30:.1f}"
    return f"~~{size}~~" if offer.lacking else size


def taken(offer: Offer | None) -> list[str]:
    """Return the way to take, and what it takes of RAM."""
    if offer is None:
        return ["-", "-"]
    pool = "full" if offer.n_pool is None else f"pool {offer.n_pool // 1024}K"
    bits = "" if offer.coarse == "off" else f", {offer.coarse} bits"
    layers = f", -ngl {offer.options['n_gpu_layers']}" if offer.n_on_cpu else ""
    more = (", lossless" if offer.lossless else "") + (
        f", -ub {offer.options['n_ubatch']}" if "n_ubatch" in offer.options and not layers else ""
    )
    return [
        f"{pool}, {offer.options.get('type_k', 'f16')}{bits}{more}{layers}",
        f"{offer.bytes_of(gpu=False) / 2**30:.1f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", type=int, default=64, help="GiB of RAM")
    args = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        for name, shape in MODELS.items():
            path = Path(folder, f"{name.split()[0]}.gguf")
            write_outline(replace(shape, n_vocab=N_VOCAB), path)
            for context in CONTEXTS:
                for card in CARDS:
                    found = offers(path, context, max(0, (card << 30) - HEADROOM), args.ram << 30 if card else NO_GPU)
                    by_kind = {offer.kind: offer for offer in reversed(found) if not offer.lossless}
                    cells = [cell(by_kind.get(kind)) for kind in ("f16", "q8_0", "q4_0", "RAM", "pool")]
                    row = [
                        f"{name}, {context // 1024}K",
                        f"{card} GiB" if card else "none",
                        *cells,
                        *taken(best(found, context)),
                    ]
                    print(*row, sep=" | ", flush=True)
                    rows.append(row)
    print(
        f"\nGiB of the card's memory, less {HEADROOM >> 20} MiB for a desktop; struck through: more than there is. RAM: {args.ram} GiB."
    )
    print(f"Without a card: of {NO_GPU >> 30} GiB of RAM.\n")
    print(markdown(COLUMNS, rows))


if __name__ == "__main__":
    main()
