"""Write docs/REFUSALS.md from the error messages; with --check, fail if it is out of date."""

import sys
from collections.abc import Mapping
from pathlib import Path

from pyllama_kvflash.cli.flags import spelled
from pyllama_kvflash.cli.run import run
from pyllama_kvflash.loading.refusals import CALLS, CODES, MEMORIES, MODELS, ON_DISK, SHIFT, WINDOWS, Refusal

TARGET = Path(__file__).with_name("REFUSALS.md")

HEAD = """# What is refused

Made from `pyllama_kvflash/loading/refusals.py` by `make docs`. A refusal is an error (`UnsupportedError` unless it says otherwise)
before anything is changed, and its sentence says what is said here. `N` stands for a number.
"""


def table(first: str, refusals: Mapping[str, Refusal]) -> str:
    """Return the table of one kind of refusal."""
    rows = [f"| {name} | {r.reason} | {r.alternative} |".replace("{}", "N") for name, r in refusals.items()]
    return "\n".join([f"| {first} | Why | Instead |", "|---|---|---|", *rows])


def render() -> str:
    """Return the page."""
    memories = {f"`{name}`": refusal for name, refusal in MEMORIES.items()}
    memories["`llama_kv_cache_iswa`, `llama_memory_hybrid_iswa` without a layer of full attention"] = WINDOWS
    parts = [
        HEAD,
        "## Models that are not run\n\nWith a pool or without.\n",
        table("Model", MODELS),
        "\n## Memories that are not pooled\n\n`kvflash inspect` names the memory of a model.\n",
        table("Memory", memories),
        "\n## Pools that have no codes (`--kvflash-coarse`)\n\n`--kvflash-policy fresh` is refused there; the default, `auto`, is `qk`.\n",
        table("Pool", CODES | {"records on disk, with a layer on a GPU": ON_DISK}),
        "\n## Calls that a pool does not take\n\nOf the native library; Python makes only the first two.\n",
        table("Call", CALLS),
        "\n## Context shift\n\nA `UsageError` when tokens do not fit.\n",
        table("Call", {"going on in a full context": SHIFT}),
    ]
    return spelled("\n".join(parts) + "\n", run)


if __name__ == "__main__":
    text = render()
    if "--check" in sys.argv:
        sys.exit("docs/REFUSALS.md is out of date: run `make docs`" if TARGET.read_text() != text else 0)
    TARGET.write_text(text)
