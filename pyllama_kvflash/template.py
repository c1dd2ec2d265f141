"""The environment of chat templates, as the transformers library has it: a sandbox, with limits."""

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 64 << 20  # characters of a rendered conversation, and of any text that a template makes on its way
_MAX_POWER = 4096  # bits of a power that a template computes
_STEP = "kvflash_step"  # the function that each turn of a loop calls


class Clock:
    """The time that a template may take. step() raises TimeoutError once it is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def step(self) -> None:
        """Go on, if there is time. Raises TimeoutError."""
        if time.monotonic() > self._end:
            msg = f"it takes more than {self._seconds:g} s"
            raise TimeoutError(msg)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training. Here only its content is kept."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the content of the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses operators that make gigabytes out of a few characters, and has each loop and macro look at the clock."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in loops:
            step = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result before computing it. Raises SecurityError."""
        large = _too_high(left, right) if operator == "**" else _too_long(left, right) or _too_long(right, left)
        if large:
            msg = f"the result of {operator} is too large"
            raise SecurityError(msg)
        return super().call_binop(context, operator, left, right)


def _too_long(some: Any, times: Any) -> bool:
    return isinstance(some, str | bytes | list | tuple) and isinstance(times, int) and len(some) * times > MAX_TEXT


def _too_high(some: Any, power: Any) -> bool:
    return isinstance(some, int) and isinstance(power, int) and some.bit_length() * power > _MAX_POWER


def environment() -> jinja2.Environment:
    """Return the environment. Rendering needs a Clock among the variables, see variables()."""
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return env


def variables(clock: Clock) -> dict[str, Callable[[], None]]:
    """Return the variables that a template of this environment needs."""
    return {_STEP: clock.step}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (templates call it so)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON without escaping HTML, as jinja2's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
