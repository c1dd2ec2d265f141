"""Replaces Python's names of options in messages, such as `n_ctx`, by those of the command line."""

import re

import click

from pyllama_kvflash.cli import settings

_OTHERS = {
    "n_predict": "max_tokens",
    "template_file": "template",
    "drafter": "spec.model",  # of `bench spec`
    "n_max": "spec.n_max",
}
"""Fields whose parameters have another name, by that name."""
_FIELD = re.compile(r"`([a-z_]+(?:\.[a-z_]+)?)`")


def spelled(text: str, command: click.Command | None = None) -> str:
    """Return a message with the names that options have in a command: -c/--ctx-size for `n_ctx`, --set panes for `panes`.

    command: None: the running command. Options that the command does not have keep Python's names.
    """
    if command is None:
        running = click.get_current_context(silent=True)
        if running is None:
            return text
        command = running.command
    options = [
        param
        for param in command.params
        if isinstance(param, click.Option) and (param.expose_value or not param.hidden)
    ]
    has_set = any(option.name == "settings" for option in options)
    names = {name: f"--set {name}" for name in settings.settable(command)} if has_set else {}
    names |= {name.removeprefix("sampling."): says for name, says in names.items() if name.startswith("sampling.")}
    for option in options:
        name = option.name or ""
        names[name] = names[_OTHERS.get(name, settings.field_of(name))] = _name(option)
    return _FIELD.sub(lambda found: names.get(found[1], found[0]), text)


def _name(option: click.Option) -> str:
    """Return an option's first short name and first long name, such as -c/--ctx-size, or the only one of the two."""
    short = [opt for opt in option.opts if not opt.startswith("--")]
    return "/".join([*short[:1], *[opt for opt in option.opts if opt.startswith("--")][:1]])
