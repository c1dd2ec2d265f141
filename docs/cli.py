"""Write docs/CLI.md from the help texts; with --check, fail if it is out of date."""

import sys
from pathlib import Path
from typing import Any

import click

from pyllama_kvflash.cli import OF_BENCHES, main

TARGET = Path(__file__).with_name("CLI.md")


def render() -> str:
    """Return the page."""
    parts = ["# Command line\n\nMade from `--help` by `make docs`.\n"]
    for name in ("", *main.commands, *OF_BENCHES):
        command = main.get_command(click.Context(main), name) or main
        title = f"kvflash {name}".strip()
        settings: dict[str, Any] = {
            "max_content_width": 100,
            "terminal_width": 100,
            "help_option_names": ["-h", "--help"],
        }
        with click.Context(command, info_name=title, **settings) as ctx:
            parts.append(f"## {title}\n\n```\n{command.get_help(ctx)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    text = render()
    if "--check" in sys.argv:
        sys.exit("docs/CLI.md is out of date: run `make docs`" if TARGET.read_text() != text else 0)
    TARGET.write_text(text)
