"""The environment of chat templates, as the transformers library has it: a sandbox, with limits."""

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pyllama_kvflash.errors import number

MAX_TEXT = 64 << 20  # characters of a rendered conversation, and of any text that a template makes on its way
_MAX_POWER = 4096  # bits of a power that a template computes
_MAX_WIDTH = 100_000  # any number that a filter or a method is called with: a width, say
_STEP, _JOIN = "kvflash_step", "kvflash_join"  # functions that each turn of a loop, and each `~`, call


_GROWING = "center", "format", "indent", "join", "replace", "tojson", "wordwrap"
"""Filters whose result may be much longer than what they are given."""


class Clock:
    """The time that a template may take. step() raises TimeoutError once it is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def step(self) -> None:
        """Go on, if there is time. Raises TimeoutError."""
        if time.monotonic() > self._end:
            msg = f"it takes more than {number(self._seconds)} s"
            raise TimeoutError(msg)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training. Here only its content is kept."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the content of the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Joins(NodeTransformer):
    """Has `~` done by a function of ours."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802 (the visitor's name)
        """Return the call in its place."""
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_JOIN, "load"), node.nodes, [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses what makes gigabytes out of a few characters, and has each loop and macro look at the clock."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Joins().visit(super()._parse(source, name, filename))
        loops: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in loops:
            step = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result before computing it. Raises SecurityError."""
        if _TOO_LARGE[operator](left, right):
            raise _too_large(operator)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments of a text's method. Raises SecurityError."""
        method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps format()
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_call(method.__name__, [text, *args, *kwargs.values()])
        return super().call(context, obj, *args, **kwargs)


def _checked(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its arguments. Raises SecurityError."""

    @functools.wraps(filter_)  # with jinja2's mark of what else it is passed
    def checked(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(x) if isinstance(x, Iterator) else x for x in args)
        _check_call(name, [x for x in (*args, *kwargs.values()) if not isinstance(x, nodes.EvalContext)])
        return filter_(*args, **kwargs)

    return checked


def _check_call(name: str, given: Sequence[Any]) -> None:
    """Raise SecurityError for a call that would make a text much longer than what it is given."""
    wide = any(isinstance(x, int | float) and abs(x) > _MAX_WIDTH for x in given[1:])
    if wide or (name in _LONG and _LONG[name](given)):
        raise _too_large(name)


def _long_format(given: Sequence[Any]) -> bool:
    return any(isinstance(x, str) and _WIDE.search(x) for x in given)


def _long_replacement(given: Sequence[Any]) -> bool:
    text, old, new = map(str, [*given, "", ""][:3])
    return text.count(old) * len(new) > MAX_TEXT


def _long_join(given: Sequence[Any]) -> bool:
    between = max((len(x) for x in given if isinstance(x, str)), default=0)
    parts = [str(x) for some in given if isinstance(some, list | tuple) for x in some]
    return sum(map(len, parts)) + between * len(parts) > MAX_TEXT


_LONG = {"format": _long_format, "replace": _long_replacement, "join": _long_join}
_WIDE = re.compile(r"[%:][^a-zA-Z}]*(\d{6}|\*|\{)")
"""A format of a width that is large, or comes from elsewhere."""


def _joined(*parts: Any) -> str:
    """Return what `~` makes of its operands. Raises SecurityError."""
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MAX_TEXT:
        raise _too_large("~")
    return "".join(texts)


def _too_large(what: str) -> SecurityError:
    return SecurityError(f"the result of {what} is too large")


def _is_long(x: Any) -> bool:
    return isinstance(x, str | bytes | list | tuple)


_TOO_LARGE: dict[str, Callable[[Any, Any], bool]] = {
    "+": lambda a, b: _is_long(a) and _is_long(b) and len(a) + len(b) > MAX_TEXT,
    "*": lambda a, b: any(_is_long(x) and isinstance(n, int) and len(x) * n > MAX_TEXT for x, n in ((a, b), (b, a))),
    "**": lambda a, b: isinstance(a, int) and isinstance(b, int) and a.bit_length() * b > _MAX_POWER,
    "%": lambda a, _: isinstance(a, str) and bool(_WIDE.search(a)),
}


def environment() -> jinja2.Environment:
    """Return the environment. Rendering needs a Clock among the variables, see variables()."""
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _to_json
    env.filters.update({name: _checked(name, env.filters[name]) for name in _GROWING})
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return env


def variables(clock: Clock) -> dict[str, Callable[..., Any]]:
    """Return the variables that a template of this environment needs."""
    return {_STEP: clock.step, _JOIN: _joined}


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
