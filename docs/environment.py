"""Write docs/ENVIRONMENT.md from the command line's options; with --check, fail if it is out of date."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from pyllama_kvflash.cli import main

TARGET = Path(__file__).with_name("ENVIRONMENT.md")

HEAD = """# Environment variables

Made from the options of the commands by `make docs`.

An option that is typed takes precedence over its variable. Each option has one variable, and each variable sets one
option: llama.cpp's own options have llama.cpp's variables, all others `KVFLASH_` and the option's name. Options
about the input and output of one run have no variable, nor do those for which llama.cpp has none. A flag is set by 1,
and left out by 0.
"""

OTHERS = {
    "KVFLASH_DRAFT_DIR": "a folder in which policies `drafter` and `crosstok` look for a scorer model",
    "XDG_CACHE_HOME": "the folder above `kvflash/`, for the prefix cache and scorer models; `~/.cache` if it is not set",
    "HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE": "the Hugging Face Hub's own, for `-hf`",
    "NO_COLOR": "no colours on a terminal",
}
"""Variables that are not those of an option."""


def leaves(group: click.Group, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands with their names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, *names, name)
        elif command:
            yield " ".join((*names, name)), command


def variables() -> dict[str, tuple[str, list[str]]]:
    """Return the variables, each with its option and the commands that have it."""
    res: dict[str, tuple[str, list[str]]] = {}
    for name, command in leaves(main):
        for param in command.params:
            if isinstance(param, click.Option) and isinstance(param.envvar, str) and not param.hidden:
                res.setdefault(param.envvar, (", ".join((*param.opts, *param.secondary_opts)), []))[1].append(name)
    return res


def render() -> str:
    """Return the page."""
    found = variables()
    parts = [HEAD]
    for title, prefix in (("llama.cpp's", "LLAMA_"), ("Ours", "KVFLASH_")):
        rows = [
            (f"`{v}`", f"`{option}`", ", ".join(names)) for v, (option, names) in found.items() if v[:6] == prefix[:6]
        ]
        parts.append(table(title, ("variable", "option", "commands"), rows))
    rows = [(", ".join(f"`{name}`" for name in names.split(", ")), what) for names, what in OTHERS.items()]
    parts.append(table("Others", ("variable", "what it sets"), rows))
    return "\n".join(parts)


def table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a section with a table."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *sorted(rows))]
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = render()
    if "--check" in sys.argv:
        sys.exit("docs/ENVIRONMENT.md is out of date: run `make docs`" if TARGET.read_text() != text else 0)
    TARGET.write_text(text)
