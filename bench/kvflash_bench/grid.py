"""Cells of a benchmark: variants by name, and results that survive an interruption."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Self

from pyllama_kvflash import __version__
from pyllama_kvflash.errors import ModelError, OutputError, UsageError, unwritten
from pyllama_kvflash.files import Replacement
from pyllama_kvflash.fingerprint import fingerprint
from pyllama_kvflash.native import devices, why_unloadable
from pyllama_kvflash.options import Options
from pyllama_kvflash.registry import BY_MODEL, policy_names
from pyllama_kvflash.scorers.reader import find_scorer_model
from pyllama_kvflash.text import to_json

Key = dict[str, Any]
Result = dict[str, Any]

FILES = ("results.jsonl", "results.md", "results.csv", "results.json", "results.png")
"""The files that a bench writes into its folder."""

_SETTABLE = {f.name: f.type for f in fields(Options)} | {"policy": "str"}
_FIXED = {"n_ctx", "pool", "pins", "policy", "n_threads"}
_CONTROL = "answer=full"


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of a table: a policy, or "full", with options of its own.

    control: True if the prompt is read through the pool and then all of it is brought back for the answer
    (bench.control).
    """

    label: str
    policy: str
    options: dict[str, Any]
    control: bool = False

    @property
    def full(self) -> bool:
        """Whether it is the full cache, whatever the pool."""
        return self.policy == "full"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "policy/option=value/..." with fields of Options, such as "qk/replay=0" or "full/type_k=q8_0".

        The option answer=full makes it a control. Raises UsageError.
        """
        policy, *parts = text.split("/")
        known = ("full", "oracle", *policy_names())
        if policy not in known:
            msg = f"{policy!r} in {text!r} is not a policy: there are {', '.join(known)}"
            raise UsageError(msg)
        control = _CONTROL in parts
        if control and policy == "full":
            msg = f"{_CONTROL!r} in {text!r} controls what a pool does to a prompt, and the full cache has none: name a policy"
            raise UsageError(msg)
        options = dict(_option(part, text) for part in parts if part != _CONTROL)
        return cls(text, policy, options, control)


def usual_coarse(policy: str) -> str:
    """Return the `coarse` of a policy that does not say which: `fresh` and the default have codes, and others see the pool alone. So
    what is compared is what chooses the pool.
    """
    return "auto" if policy in ("auto", "fresh") else "off"


def _option(part: str, text: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    if not equals or name not in _SETTABLE or name in _FIXED:
        msg = f"{part!r} in {text!r} is not an option: give name=value, the name a field of Options such as replay or type_k"
        raise UsageError(msg)
    default = getattr(Options(), name)
    if not isinstance(default, bool | int | float):
        return name, value
    kinds: dict[type, tuple[tuple[type, ...], str]] = {
        bool: ((bool,), "true or false"),
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
    }
    allowed, what = kinds[type(default)]
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if type(found) not in allowed:
        msg = f"{part!r} in {text!r} needs {what}"
        raise UsageError(msg)
    return name, found


def refuse_controls(bench: str, variants: Iterable[Variant]) -> None:
    """Raise UsageError for a control in a bench that does not separate prompt and answer."""
    for variant in variants:
        if variant.control:
            msg = f"{variant.label!r} is a control of bench ruler and bench kld: leave it out of bench {bench}"
            raise UsageError(msg)


class Results:
    """Results by cell, appended to a file as they come. A cell that is in the file is not measured again."""

    def __init__(self, folder: Path) -> None:
        """Read the results in the folder. Raises UsageError (not a folder, a damaged line) and OutputError."""
        self.folder = folder
        self._path = folder / "results.jsonl"
        self._known: dict[str, Result] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text("utf-8").splitlines() if self._path.exists() else []
        except OSError as err:
            msg = f"{folder} cannot be used for the results: {err.strerror}"
            raise OutputError(msg) from None
        except UnicodeDecodeError:
            msg = f"{self._path} is not a file of results: delete it, or give another folder"
            raise UsageError(msg) from None
        for i, line in enumerate(lines):
            try:
                entry = json.loads(line)
                self._known[_canonical(entry["key"])] = entry["result"]
            except (ValueError, KeyError, TypeError):
                if i + 1 < len(lines):  # the last one may have been cut off
                    msg = f"line {i + 1} of {self._path} is not a result: delete it, or give another folder"
                    raise UsageError(msg) from None

    def get(self, key: Key) -> Result | None:
        """Return the result of a cell, None if it was not measured."""
        return self._known.get(_canonical(key))

    def add(self, key: Key, result: Result) -> None:
        """Keep a result. Raises OutputError."""
        self._known[_canonical(key)] = result
        lines = [json.dumps({"key": json.loads(k), "result": r}) + "\n" for k, r in self._known.items()]
        self.write("results.jsonl", "".join(lines))

    def write_json(self, value: Any) -> None:
        """Write results.json. Raises OutputError."""
        self.write("results.json", to_json(value, indent=1) + "\n")

    def write(self, name: str, data: str | bytes) -> Path:
        """Write one of FILES into the folder, whole or not at all. Raises OutputError."""
        path = self.folder / name
        try:
            with Replacement(path) as new:
                new.path.write_bytes(data.encode() if isinstance(data, str) else data)
        except OSError as err:
            raise OutputError(unwritten(path, err)) from None
        return path


def digest(text: str | None) -> str | None:
    """Return a text's mark in a key, None for None."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text is not None else None


def short(n: int) -> str:
    """Return a number of tokens in words: 8K if it is a multiple of 1,024."""
    return f"{n >> 10}K" if n % 1024 == 0 else str(n)


@cache
def model_mark(path: Path) -> str:
    """Return a model's mark in a key. It is cached, because every cell's key has it. Raises ModelError."""
    try:
        return f"{fingerprint(path):016x}"
    except OSError as err:
        msg = f"{path} cannot be loaded: {why_unloadable(path) or err.strerror}"
        raise ModelError(msg) from None


def setting(common: dict[str, Any], variant: Variant | None = None, model: Path | None = None) -> dict[str, Any]:
    """Return the part of the options that belongs in a key: a scorer model by its content, and this version.

    variant: whose scorer model it is, given or found beside the model.
    """
    res: dict[str, Any] = {k: v for k, v in common.items() if k != "n_threads"}
    own = variant.options.get("scorer_model") if variant else None
    scorer = Path(given) if (given := own or res.get("scorer_model")) else None
    if scorer is None and variant and model and variant.policy in BY_MODEL:
        with suppress(UsageError):  # there is none: opening the model reports it
            scorer = find_scorer_model(None, model)
    if scorer and scorer.is_file():
        res["scorer_model"] = model_mark(scorer)
    return {**res, "version": __version__}


def _canonical(key: Key) -> str:
    return json.dumps(key, sort_keys=True)


def machine() -> str:
    """Return a description of this machine in a few words."""
    gpus = [d.description for d in devices() if d.gpu]
    where = f"{len(gpus)} x {gpus[0]}" if gpus else cpu_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{where}, {cores} cores, pyllama_kvflash {__version__}"


def cpu_name() -> str:
    """Return the processor's name as Linux gives it, or else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
