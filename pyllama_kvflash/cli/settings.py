"""`--set NAME=VALUE`: fields of Options, Spec and Sampling that only experiments turn, and that have no option."""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from typing import Any

import click
from click.core import ParameterSource

from pyllama_kvflash.cli import kinds
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Sampling
from pyllama_kvflash.options import Options, Spec

_PARTS: dict[str, type] = {"": Options, "spec.": Spec, "sampling.": Sampling}
_NOT = ("spec", "snapshots", "n_parallel", "sampling.n_probs")  # the command sets them
CACHE_SIZE = "20GiB"  # of a prefix cache
_PREFIX = {"": "", "spec.": "spec_", "rope.": "rope_", "sampling.": ""}  # of the parameters that set fields of a part


@dataclass(frozen=True, slots=True)
class Setting:
    """What `--set` sets. what: its meaning; kind: what a value is; read: makes a value of a text."""

    name: str
    default: Any
    what: str
    kind: str
    read: Callable[[str], Any]

    def value(self, text: str) -> Any:
        """Return the value for a text. Raises UsageError; the class that has the field checks the range."""
        try:
            return self.read(text)
        except click.BadParameter as err:
            raise UsageError(f"--set {self.name}: {err.message}") from None
        except (ValueError, KeyError):
            msg = f"--set {self.name}: {text!r} is not {self.kind}: {self.name} is {_shown(self.default)} by default"
            raise UsageError(msg) from None


def settable(command: click.Command) -> dict[str, Setting]:
    """Return what `--set` can set for a command: fields for which it has no option."""
    own = {param.name for param in command.params if not getattr(param, "hidden", False)}
    more = [_cache_size()] if "prefix_cache" in own and "prefix_cache_size" not in own else []
    parts = ["", *(["spec."] if "spec_kind" in own else []), *(["sampling."] if "temperature" in own else [])]
    return {
        name: setting
        for part in parts
        for name, setting in _settings(part).items()
        if _PREFIX[part] + name.removeprefix(part) not in own
    } | {setting.name: setting for setting in more}


def field_of(param: str) -> str:
    """Return the field that a parameter of a command sets: spec.n_max for spec_n_max."""
    parts = ((part, prefix) for part, prefix in _PREFIX.items() if prefix and param.startswith(prefix))
    return next((part + param.removeprefix(prefix) for part, prefix in parts), param)


_LLAMA_CPP = {
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dry_sequence_breaker": "dry_sequence_breakers",
    "dynatemp_exp": "dynatemp_exponent",
    "mirostat_lr": "mirostat_eta",
    "mirostat_ent": "mirostat_tau",
    "l": "logit_bias",
    "draft_p_min": "p_min",
    "spec_draft_p_min": "p_min",
}
"""Options of llama.cpp whose name is not the field's."""


def called(option: str, command: click.Command) -> str | None:
    """Return the field that `--set` sets instead of an option that a command does not have; None: there is none."""
    name = option.lstrip("-").replace("-", "_")
    has = any(param.name == "settings" for param in command.params)
    known = settable(command) if has else {}
    return next((full for full in known if full.rpartition(".")[2] == _LLAMA_CPP.get(name, name)), None)


def take(values: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the fields of a part that `--set` set: "" for Options, "spec.", "sampling." or "cache."."""
    given = values["settings"]
    own = [name for name in given if name.startswith(part) and ("." in name) == bool(part)]
    return {name.removeprefix(part): given[name] for name in own}


def listing(known: dict[str, Setting]) -> str:
    """Return the text of `--set help`."""
    formatter = click.HelpFormatter(width=100)
    formatter.write_text("Fields that --set sets, each with its default. Sizes take K and M.")
    formatter.write_paragraph()
    formatter.write_dl([(f"{s.name}={_shown(s.default)}", f"{s.kind}: {s.what}") for s in known.values()], col_max=36)
    return formatter.getvalue().rstrip()


def _read(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that are given, by name; for "help", list them and end. Raises UsageError.

    The environment is for all commands: what it sets of another one is left out, as are other commands' variables.
    """
    known = settable(ctx.command)
    if "help" in given:
        click.echo(listing(known))
        ctx.exit()
    res = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            by = ctx.get_parameter_source(param.name or "")
            if by == ParameterSource.ENVIRONMENT and name in {"cache.size"}.union(*map(_settings, _PARTS)):
                continue
            raise UsageError(_unknown(name, ctx.command, known))
        if not equals:
            msg = f"--set {name} has no value: give one, such as {name}={_shown(known[name].default) or 'VALUE'}"
            raise UsageError(msg)
        res[name] = known[name].value(value.strip())
    return res


OPTION = click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    is_eager=True,  # --set help needs nothing else
    callback=_read,
    envvar="KVFLASH_SET",
    help="Set a field that has no option of its own, for experiments: --set chunk=32. It can be given several times."
    " --set help lists the fields.",
)


def _unknown(name: str, command: click.Command, known: dict[str, Setting]) -> str:
    for part, prefix in _PREFIX.items():
        wanted = prefix + name.removeprefix(part)
        found = [p for p in command.params if p.name == wanted and isinstance(p, click.Option) and p.expose_value]
        if name.startswith(part) and found:
            return f"--set {name}: {name} has an option of its own: give {found[0].opts[-1]}"
    near = get_close_matches(name, known, n=1) or [full for full in known if name and full.endswith(f".{name}")]
    hint = f"did you mean {near[0]}? " if near else ""
    return f"--set {name}: there is no such field: {hint}--set help lists them"


@cache
def _settings(part: str) -> dict[str, Setting]:
    """Return the settings of a part that can be read from a text."""
    kind, res = _PARTS[part], {}
    what = meanings(kind)
    for field in fields(kind):
        name = part + field.name
        if name not in _NOT and (reading := _reading(name, field.default)):
            res[name] = Setting(name, field.default, what.get(field.name, ""), *reading)
    return res


def meanings(kind: type) -> dict[str, str]:
    """Return what the fields of a dataclass mean: the docstring below a field, or the comment beside it."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines, body = source.splitlines(), ast.parse(source).body[0].body  # type: ignore[attr-defined]
    res = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = lines[node.lineno - 1 : node.end_lineno]
            comment = next((text for line in beside if (text := line.partition("  # ")[2])), "")
            told = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and str(below.value.value)
            res[node.target.id] = " ".join((told or comment).split()).rstrip(".")
    return res


def _reading(name: str, default: Any) -> tuple[str, Callable[[str], Any]] | None:
    """Return what a value is and how it is read. None: it has no text."""
    special: dict[str, tuple[str, Callable[[str], Any]]] = {
        "pins": ("positions A:B,C:D", lambda text: kinds.Spans().convert(text, None, None)),
        "sampling.logit_bias": ("TOKEN(+/-)BIAS, several with commas", _biases),
        "sampling.samplers": ("names with ; between them", str),
        "sampling.dry_sequence_breakers": ("a JSON list of texts", _texts),
        "scorer_model": ("file", str),
        "split_mode": ("layer or none", str),
        "main_gpu": ("a whole number", int),
        "auto_cap": ("a whole number", _whole),
        "codes_in_panes": ("true or false", _flag),
    }
    if name in special:
        return special[name]
    if isinstance(default, bool):
        return "true or false", _flag
    if isinstance(default, int):
        return "a whole number", _whole
    return ("a number", float) if isinstance(default, float) else None


def _cache_size() -> Setting:
    what = "most bytes of the folder of --prefix-cache; the least recently used snapshots go first"
    return Setting("cache.size", CACHE_SIZE, what, "a size", lambda text: kinds.ByteSize().convert(text, None, None))


def _flag(text: str) -> bool:
    return {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}[text.lower()]


def _whole(text: str) -> int:
    try:
        return int(kinds.TokenCount().convert(text, None, None))
    except click.BadParameter:
        raise ValueError(text) from None


def _biases(text: str) -> tuple[tuple[int, float], ...]:
    return tuple(kinds.LogitBias().convert(part, None, None) for part in text.split(",") if part)


def _texts(text: str) -> tuple[str, ...]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(text)
    return tuple(found)


def _shown(value: Any) -> str:
    if value is None or value == ():
        return ""
    return value if isinstance(value, str) else json.dumps(value)
