"""`--set NAME=VALUE`: fields of Options, Spec and Sampling that are seldom set, and that have no option of their own."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import click
from click.core import ParameterSource

from pyllama_kvflash.cli import kinds
from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.native import Sampling
from pyllama_kvflash.options import Options, Spec

_PARTS: dict[str, type] = {"": Options, "spec": Spec, "sampling": Sampling}
_PREFIX = {"": "", "spec.": "spec_", "rope.": "rope_", "sampling.": ""}  # of the parameters that set fields of a part


def _whole(text: str) -> int:
    try:
        return int(kinds.TokenCount().read(text))
    except UsageError:
        raise ValueError(text) from None


def _flag(text: str) -> bool:
    return {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}[text.lower()]


def _biases(text: str) -> tuple[tuple[int, float], ...]:
    return tuple(kinds.LogitBias().read(part) for part in text.split(",") if part)


_size, _spans = kinds.ByteSize().read, kinds.Spans().read

_KINDS: dict[Callable[[str], Any], str] = {
    _whole: "a whole number",
    _size: "a size",
    _flag: "true or false",
    float: "a number",
    str: "a text",
    _spans: "positions A:B,C:D",
    _biases: "TOKEN(+/-)BIAS, several with commas",
}
"""The kinds of values, in words, by the functions that read them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that `--set` sets. read: converts a text to a value. what: the field's meaning, for `--set help`."""

    name: str
    read: Callable[[str], Any]
    what: str

    @property
    def kind(self) -> str:
        """The kind of the value, in words."""
        return _KINDS[self.read]

    @property
    def default(self) -> Any:
        """The field's default."""
        part, _, field = self.name.rpartition(".")
        return next(own.default for own in fields(_PARTS[part]) if own.name == field)

    def value(self, text: str) -> Any:
        """Return the value for a text. Raises UsageError; the class that has the field checks the range."""
        try:
            return self.read(text)
        except UsageError as err:
            raise UsageError(f"--set {self.name}: {err}") from None
        except (ValueError, KeyError):
            msg = f"--set {self.name}: {text!r} is not {self.kind}: {self.name} is {_shown(self.default)} by default"
            raise UsageError(msg) from None


_SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("auto_cap", _whole, "the largest pool of --kvflash auto, which then takes a pool even if the full cache fits"),
        Setting("pins", _spans, "ranges of positions that never leave the pool, with A and without B"),
        Setting("opening", _whole, "first tokens of an answer to decode losslessly; -1: 32, or 0 with policy fresh and codes of 4 bits"),
        Setting("meter", float, "share of the time, 0 to 1, for comparing tokens with the full cache; 0: none are compared"),
        Setting("min_agreement", float, "switch to mode lossless when less than this share of compared tokens, 0 to 1, are the full"
                " cache's; the comparison takes 5 % of the time unless meter is set; 0: never"),
        Setting("panes", _whole, "layers that each device holds while a prompt is read exactly; 1: least memory; 0: 2, or more where"
                " there is room"),
        Setting("scorer_model", str, "the small model of policies drafter and crosstok; it implies drafter; by default, a model is searched"),
        Setting("split_mode", str, "layer: split the layers over the GPUs; none: use one GPU"),
        Setting("main_gpu", _whole, "the GPU of split_mode none; -1: the CPU"),
        Setting("kv_offload", _flag, "false: keep the full cache in RAM, and compute attention on the CPU (llama.cpp's --no-kv-offload)"),
        Setting("checkpoint_limit", _size, "most memory for checkpoints of recurrent states and sliding windows; 0: keep none"),
        Setting("spec.gate", float, "draft while a drafted step is worth this many plain steps; 0: always"),
        Setting("spec.p_min", float, "a guess that the draft model finds less likely than this, 0 to 1, ends the draft"),
        Setting("sampling.repeat_last_n", _whole, "last tokens that the penalties consider; 0: off"),
        Setting("sampling.frequency_penalty", float, "penalty for each time that a token was generated; 0: off"),
        Setting("sampling.presence_penalty", float, "penalty for tokens that were generated; 0: off"),
        Setting("sampling.dry_multiplier", float, "penalty of DRY for tokens that would repeat a sequence of the text; 0: off"),
        Setting("sampling.samplers", str, "order of the samplers, separated by semicolons; a sampler that is left out is not applied"),
        Setting("sampling.ignore_eos", _flag, "never end the answer before its token limit"),
        Setting("sampling.logit_bias", _biases, "added to the logits of tokens: 15043+1, 15043-inf"),
    )
}  # fmt: skip


def settable(command: click.Command) -> dict[str, Setting]:
    """Return the fields that `--set` can set for a command: those of Spec and Sampling only if the command has their options."""
    own = {param.name for param in command.params}
    parts = {"": True, "spec": "spec_kind" in own, "sampling": "temperature" in own}
    return {name: setting for name, setting in _SETTINGS.items() if parts[name.rpartition(".")[0]]}


def field_of(param: str) -> str:
    """Return the field that a parameter of a command sets: spec.n_max for spec_n_max."""
    parts = ((part, prefix) for part, prefix in _PREFIX.items() if prefix and param.startswith(prefix))
    return next((part + param.removeprefix(prefix) for part, prefix in parts), param)


_LLAMA_CPP = {"l": "logit_bias", "draft_p_min": "p_min", "spec_draft_p_min": "p_min"}
"""Options of llama.cpp whose name is not the field's."""


def called(option: str, command: click.Command) -> str | None:
    """Return the field that `--set` can set in place of an option that a command does not have; None: there is no such field."""
    name = option.lstrip("-").replace("-", "_")
    has = any(param.name == "settings" for param in command.params)
    known = settable(command) if has else {}
    return next((full for full in known if full.rpartition(".")[2] == _LLAMA_CPP.get(name, name)), None)


def take(values: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the fields of a part that `--set` has set. part: "" for Options, "spec." or "sampling."."""
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
    """Return the fields that are given, by name; for "help", list all fields and exit. Raises UsageError.

    All commands share the environment variable, so fields in it that only other commands have are ignored.
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
            if name in _SETTINGS and ctx.get_parameter_source(param.name or "") == ParameterSource.ENVIRONMENT:
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
    help="Set a field that has no option of its own: --set opening=0. It can be given several times. --set help lists the"
    " fields.",
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


def _shown(value: Any) -> str:
    if value is None or value == ():
        return ""
    return value if isinstance(value, str) else json.dumps(value)
