"""The schemas of a conversation: those of its tools, and that of the answer.

The model sees the schemas as they were given. llama.cpp gets marks in place of schemas, and makes a grammar with these marks; the rules
of the schemas then replace the marks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pyllama_kvflash.errors import UsageError
from pyllama_kvflash.json_schema import TYPES, Argument, Checked, Key, Loosened, check, check_arguments
from pyllama_kvflash.native import ChatEngine, Grammar, Rendered, either

_ANSWER = "answer"


def checked_schema(schema: Any) -> Checked | None:
    """Return an answer's schema, checked; `schema` may already be checked. None: there is no schema. Raises SchemaError."""
    return schema if schema is None or isinstance(schema, Checked) else check(schema)


class Calls:
    """A template engine that gets marks in place of schemas."""

    def __init__(self, engine: ChatEngine) -> None:
        self.engine = engine
        self._named = False  # whether the template's calls name each argument, and so have no place for the mark of all parameters

    def applied(self, request: dict[str, Any]) -> Rendered:
        """Render a request: its prompt, and the grammar and parser of its answer.

        tool_choice may also name the one tool to call. Raises UsageError, and SchemaError for a response schema that cannot be used.
        """
        request = dict(request)
        choice, schema = request.get("tool_choice"), checked_schema(request.pop("json_schema", None))
        if not request.get("tools") or choice == "none":
            return self.engine.apply(request) if schema is None else self._told(request, schema)
        tools = [_Tool(i, tool) for i, tool in enumerate(request["tools"])]
        if choice == "auto" and schema is not None:
            return self._called_or_told(request, tools, schema)
        # a template shows the tools to the model whether or not they may be called
        prompt = self.engine.apply({**request, "tool_choice": "none"}).prompt
        if isinstance(choice, dict):
            tools = [tool for tool in tools if tool.name == choice["function"]["name"]]
            request["tool_choice"] = "required"
        return replace(self._called(request, tools), prompt=prompt)

    def _called(self, request: dict[str, Any], tools: Sequence["_Tool"]) -> Rendered:
        """Render a request with tools. The prompt has marks in place of the tools' schemas."""
        if not self._named:
            res = self.engine.apply({**request, "tools": [tool.marked() for tool in tools]})
            if res.grammar is None:
                return _with(res, None, [w for tool in tools for w in tool.warnings(Loosened("#", "", _FREE))])
            text, found = _put(res.grammar.text, [tool.whole for tool in tools])
            if all(found):
                return _with(res, text, [w for tool in tools for w in tool.warnings()])
            self._named = True
        res = self.engine.apply({**request, "tools": [tool.named() for tool in tools]})
        text, found = _put("" if res.grammar is None else res.grammar.text, [tool.values for tool in tools])
        lost = [tool.lost(has_marks=has_marks) for tool, has_marks in zip(tools, found, strict=True)]
        return _with(res, text, [w for tool, these in zip(tools, lost, strict=True) for w in tool.warnings(*these)])

    def _told(self, request: dict[str, Any], schema: Checked) -> Rendered:
        """Render a request with a response schema."""
        res = self.engine.apply({**request, "json_schema": _marked(_ANSWER)})
        shown = json.dumps(schema.source, ensure_ascii=False)
        # some templates show the schema to the model
        res = replace(res, prompt=_SHOWN.sub(lambda _: shown, res.prompt))
        text, (found,) = _put(
            "" if res.grammar is None else res.grammar.text, [_Marks(schema, {_ANSWER: [schema.key]})]
        )
        lost = [] if found else [Loosened("#", "", "the chat template has no place for it")]
        return _with(res, text if found else None, [str(one) for one in (*schema.loosened, *lost)])

    def _called_or_told(self, request: dict[str, Any], tools: Sequence["_Tool"], schema: Checked) -> Rendered:
        """Render a request whose answer calls tools or follows a schema. llama.cpp supports only one of the two at a time."""
        called = self._called({**request, "tool_choice": "required"}, tools)
        told = self._told({**request, "tool_choice": "none"}, schema)
        if called.grammar is None or told.grammar is None or called.grammar.after != told.grammar.after:
            msg = "its calls cannot be combined with a schema of the answer: leave out response_format, or the tools"
            raise UsageError(msg)
        grammar = replace(called.grammar, text=either(called.grammar.text, told.grammar.text))
        res = self._called(request, tools)
        return replace(res, grammar=grammar, prompt=told.prompt, warnings=(*told.warnings, *called.warnings))


_FREE = "the chat template's calls begin without a mark, so their arguments are free"
_SHOWN = re.compile(r'\{\s*"const":\s*\{\s*"kvflash":\s*"' + _ANSWER + r'"\s*\}\s*\}')


class _Tool:
    """A tool of a request, with its schema checked."""

    def __init__(self, i: int, tool: Mapping[str, Any]) -> None:
        self._tool = tool
        self.name: str = tool["function"]["name"]
        self.mark = f"tool {i}"
        given = tool["function"].get("parameters")
        self.checked = _arguments(NO_ARGUMENTS if given is None or given == {} else given)
        self._arguments = self.checked.arguments()

    @property
    def whole(self) -> "_Marks":
        """The mark that stands for the tool's parameters."""
        return _Marks(self.checked, {self.mark: [self.checked.key]})

    @property
    def values(self) -> "_Marks":
        """The marks that stand for argument values other than strings.

        Templates that name each argument write strings as plain text.
        """
        marks = {f"{self.mark}.{i}": a.keys for i, a in enumerate(self._arguments.of) if "string" not in a.types}
        return _Marks(self.checked, marks)

    def marked(self) -> dict[str, Any]:
        """Return the tool with a mark for its parameters."""
        return self._with(_marked(self.mark))

    def named(self) -> dict[str, Any]:
        """Return the tool with the types of its arguments, and marks for their values."""
        properties = {
            a.name: _typed(a) | (_marked(mark) if (mark := f"{self.mark}.{i}") in self.values.keys else {})
            for i, a in enumerate(self._arguments.of)
        }
        required = [a.name for a in self._arguments.of if a.required]
        return self._with({"type": "object", "properties": properties, "required": required})

    def _with(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {**self._tool, "function": {**self._tool["function"], "parameters": parameters}}

    def lost(self, *, has_marks: bool) -> list[Loosened]:
        """Return what the grammar does not enforce if calls name each argument. has_marks: whether it has all of the tool's marks."""
        if has_marks and self._arguments.exact:
            return []
        return [
            Loosened(
                "#", "", "the chat template writes each argument in a form of its own, which cannot express all of it"
            )
        ]

    def warnings(self, *more: Loosened) -> list[str]:
        """Return a sentence for each part of the tool's schema that is not enforced."""
        return [f"tool {self.name}: {one}" for one in (*self.checked.loosened, *more)]


NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
"""The parameters of a tool that declares none, as in llama.cpp."""


_FEW = 1 << 14  # most characters of a schema that is cached


def _arguments(schema: Any) -> Checked:
    """Return the schema of a tool's arguments, checked. Agents resend it, so a small one is cached."""
    text = json.dumps(schema)
    return _remembered(text) if len(text) <= _FEW else check_arguments(schema)


@lru_cache(maxsize=512)
def _remembered(text: str) -> Checked:
    return check_arguments(json.loads(text))


def _marked(mark: str) -> dict[str, Any]:
    """Return a schema with one constant, a mark that stands for another schema."""
    return {"const": {"kvflash": mark}}


def _typed(argument: Argument) -> dict[str, Any]:
    """Return a schema that has only the types of an argument."""
    if len(argument.types) == 1:
        return {"type": argument.types[0]}
    return {} if "string" not in argument.types or argument.types == TYPES else {"type": list(argument.types)}


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marks that stand for parts of a schema, each with the keys of the part's shapes."""

    schema: Checked
    keys: Mapping[str, Sequence[Key]]


def _put(text: str, marks: Sequence[_Marks]) -> tuple[str, list[bool]]:
    """Replace marks in a grammar by rules of their schemas. Returns the grammar, and for each schema whether all its marks were found."""
    rules, found = [text.rstrip("\n") + "\n"], []
    for i, one in enumerate(marks):
        literals = [f'"{{\\"kvflash\\":\\"{mark}\\"}}"' for mark in one.keys]
        found.append(all(literal in rules[0] for literal in literals))
        names, more = one.schema.rules(f"schema{i}-", list(one.keys.values()))
        for literal, name in zip(literals, names, strict=True):
            rules[0] = rules[0].replace(literal, name)
        rules.append(more)
    return "".join(rules), found


def _with(rendered: Rendered, text: str | None, warnings: Sequence[str]) -> Rendered:
    """Return a rendered conversation with further warnings. text: the grammar's new text; None: the old one stays."""
    grammar: Grammar | None = rendered.grammar
    if grammar is not None and text is not None:
        grammar = replace(grammar, text=text)
    return replace(rendered, grammar=grammar, warnings=(*rendered.warnings, *warnings))
