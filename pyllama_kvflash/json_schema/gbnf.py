"""Shapes as a grammar (GBNF) of JSON texts, with properties in the schema's order and the white space of llama.cpp's grammars."""

import re
from collections.abc import Sequence
from math import inf

from pyllama_kvflash.json_schema import languages
from pyllama_kvflash.json_schema.languages import ALL, ANYTHING, EMPTY, Chars, Choice, Language, Many, Ranges, Seq
from pyllama_kvflash.json_schema.shapes import BLOCK, Anything, Array, Key, Number, Object, Shape, Shapes, Text, Values
from pyllama_kvflash.json_schema.values import text_of

_FIXED = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "hex": "[0-9a-fA-F]",
    "plain": r'[^"\\\x7F\x00-\x1F]',
    # a surrogate pair is one character; half of a pair is not allowed
    "char": r'$plain | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] $hex{3} | [dD] [0-7] $hex{2}'
    r' | [dD] [89abAB] $hex{2} "\\u" [dD] [c-fC-F] $hex{2}))',
    "string": r'"\"" $char* "\""',
    "number": '"-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "object": '"{" $space ($string $space ":" $space $value ("," $space $string $space ":" $space $value)*)? $space "}"',
    "array": '"[" $space ($value ("," $space $value)*)? $space "]"',
    "value": '$object | $array | $string | $number | "true" | "false" | "null"',
}
"""Rules that do not depend on the schema. $ marks the name of such a rule."""


def literal(text: str) -> str:
    """Return the GBNF literal of a text."""
    for char, code in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(char, code)
    return f'"{text}"'


class Writer:
    """Writes the rules of shapes. prefix: begins the name of each rule."""

    def __init__(self, shapes: Shapes, prefix: str) -> None:
        self._shapes, self._prefix = shapes, prefix
        self._rules: dict[str, str] = {}
        self._names: dict[object, str] = {}  # of rules, by key, state, or ("body", body)
        self._todo: list[tuple[str, Key]] = []

    def written(self, values: Sequence[Sequence[Key]]) -> tuple[list[str], str]:
        """Return the name of each value's rule, and all rules, each on a line. values: as in Checked.rules()."""
        names = [
            self._value(keys[0]) if len(keys) == 1 else self._rule(" | ".join(map(self._value, keys)))
            for keys in values
        ]
        while self._todo:
            rule, at = self._todo.pop()
            self._rules[rule] = " | ".join(self._shape(shape) for shape in self._shapes[at])
        # the parser would read the line after an empty body as the body
        return names, "".join(f"{rule} ::= " + (body or '""') + "\n" for rule, body in self._rules.items())

    def _value(self, key: Key) -> str:
        """Return the name of the rule for a key. The rule is written later."""
        if self._shapes[key] == [Anything()]:
            return self._fixed("value")
        if key not in self._names:
            self._names[key] = self._new("")
            self._todo.append((self._names[key], key))
        return self._names[key]

    def _new(self, body: str) -> str:
        name = f"{self._prefix}{len(self._rules)}"
        self._rules[name] = body
        return name

    def _rule(self, body: str) -> str:
        """Return the name of the rule with this body. Makes the rule if there is none."""
        if ("body", body) not in self._names:
            self._names["body", body] = self._new(body)
        return self._names["body", body]

    def _fixed(self, name: str) -> str:
        """Write one of the rules of _FIXED, with the rules that it uses, and return its name."""
        own = f"{self._prefix}{name}"
        if own not in self._rules:
            self._rules[own] = ""
            self._rules[own] = re.sub(r"\$(\w+)", lambda found: self._fixed(found[1]), _FIXED[name])
        return own

    def _shape(self, shape: Shape) -> str:
        match shape:
            case Values(texts):
                return " | ".join(map(literal, texts))
            case Number(_, digits):
                return self._fixed("number") if digits is None else self._language(digits)
            case Text(language):
                return self._text(language)
            case Array():
                return self._array(shape)
            case Object():
                return self._object(shape)
        return self._fixed("value")

    @staticmethod
    def _spaced(*texts: str) -> str:
        return " ".join(text for text in texts if text)

    #
    # strings, and the digits of numbers
    #

    def _text(self, language: Language) -> str:
        return self._fixed("string") if language == ANYTHING else rf'"\"" {self._language(language)} "\""'

    def _language(self, language: Language) -> str:
        """Return the GBNF of a language's texts within a JSON string: items in a row, without alternatives at the top level."""
        match language:
            case Chars(found):
                return self._fixed("char") if found == ALL else _class(found)
            case Seq(parts):
                return self._sequence(parts)
            case Choice(options):
                texts = sorted(self._language(option) for option in options if option != EMPTY)
                return f"({' | '.join(texts)}){'?' if EMPTY in options else ''}"
            case Many(part, low, high):
                one = self._language(part)
                return self._repeated(one if isinstance(part, Chars) and " " not in one else self._rule(one), low, high)
        return self._state(language)

    def _sequence(self, parts: tuple[Language, ...]) -> str:
        res, word = [], ""
        for part in (*parts, None):
            if isinstance(part, Chars) and (char := _single(part.ranges)):
                word += char
                continue
            res += [literal(json_text(word))] if word else []
            res += [self._language(part)] if part is not None else []
            word = ""
        return self._spaced(*res) or '""'

    def _state(self, language: Language) -> str:
        """Write a rule for each state of a language that is not regular, and return the name of the rule of the language itself."""
        found = languages.states(language) or {}
        new = [state for state in found if state not in self._names]
        self._names |= {state: self._new("") for state in new}
        for state in new:
            options = ['""'] if languages.nullable(state) else []
            for these, to in found[state]:
                behind = (
                    ""
                    if to == EMPTY
                    else self._rule(self._language(to))
                    if languages.is_regular(to)
                    else self._names[to]
                )
                options.append(self._spaced(_class(these), behind))
            self._rules[self._names[state]] = " | ".join(options)
        return self._names[language]

    def _repeated(self, rule: str, low: int, high: float) -> str:
        """Return GBNF for `low` to `high` (inf: no bound) repetitions of a rule."""
        blocks, more = divmod(low, BLOCK) if low > 2 * BLOCK else (0, low)
        parts = [f"{self._rule(f'{rule}{{{BLOCK}}}')}{{{blocks}}}"] if blocks else []
        if high == inf:
            parts.append(f"{rule}{{{more},}}" if more > 1 else f"{rule}{'+' if more else '*'}")
        elif high - low <= 2 * BLOCK:
            parts += [f"{rule}{{{more},{more + high - low}}}"] if more + high - low else []
        else:
            parts += [f"{rule}{{{more}}}"] if more else []
            parts.append(self._up_to(rule, int(high) - low))
        return self._spaced(*parts)

    def _up_to(self, rule: str, n: int) -> str:
        """Return the name of a rule for 0 to `n` repetitions of `rule`. Each number of repetitions has a single derivation."""
        block = self._rule(f"{rule}{{{BLOCK}}}")
        steps, left = divmod(n, BLOCK)
        res = self._rule(f"{rule}{{0,{left}}}" if left else '""')
        for _ in range(steps):
            res = self._rule(f"{rule}{{0,{BLOCK - 1}}} | {block} {res}")
        return res

    #
    # arrays and objects
    #

    def _array(self, shape: Array) -> str:
        items = [(self._value(key), i < shape.low) for i, key in enumerate(shape.prefix)]
        rest = None if shape.rest is None else self._value(shape.rest)
        return self._enclosed("[", self._members(items, rest, shape.low, shape.high, may_skip=False), "]")

    def _object(self, shape: Object) -> str:
        pairs = [(self._pair(literal(text_of(p.name)), p.key), p.required) for p in shape.properties]
        others = [self._pair(self._text(other.names), other.key) for other in shape.others]
        rest = self._rule(" | ".join(others)) if others else None
        return self._enclosed("{", self._members(pairs, rest, shape.low, shape.high, may_skip=True), "}")

    def _enclosed(self, left: str, members: str, right: str) -> str:
        return f'"{left}" {self._spaced(self._fixed("space"), members, self._fixed("space"))} "{right}"'

    def _pair(self, name: str, key: Key) -> str:
        space = self._fixed("space")
        return self._rule(f'{name} {space} ":" {space} {self._value(key)}')

    def _members(
        self, members: list[tuple[str, bool]], rest: str | None, low: int, high: float, *, may_skip: bool
    ) -> str:
        """Return GBNF for `low` to `high` (inf: no bound) members, separated by commas.

        members: the named ones, each with whether it is required. rest: the rule of further members; None: there are none. may_skip:
        whether members may follow one that is left out. A member has a rule for each number of members that may come before it; the rule
        is for the text from the member on.
        """
        # from this number on, counting makes no difference
        most = int(max(1, low) if high == inf else high)
        before = [{0}]
        for _, required in members:
            one_more = {min(n + 1, most) for n in before[-1] if n != high}
            before.append(one_more if required or not may_skip else one_more | before[-1])
        after = {n: self._rest(rest, n, low, high) for n in before.pop()}
        for (member, required), counts in reversed(list(zip(members, before, strict=True))):
            behind, after = after, {}
            for n in counts:
                then = None if n == high else behind[min(n + 1, most)]
                without = None if required else behind[n] if may_skip else ""
                one = self._spaced(self._comma if n else "", member)
                if then is not None and then == without:
                    after[n] = self._rule(self._spaced(f"({one})?", then))
                    continue
                options = [] if then is None else [self._spaced(one, then)]
                options += [without] if without else []
                body = " | ".join(options)
                after[n] = f"({body})?" if options and without == "" else self._rule(body) if options else without
        return after[0] or ""

    def _rest(self, rule: str | None, n: int, low: int, high: float) -> str | None:
        """Return GBNF for the members after the first n, with `low` to `high` in total; None if there would be too few."""
        if rule is None or n == high:
            return "" if n >= low else None
        more, low, high = self._rule(f"{self._comma} {rule}"), max(0, low - n), high - n
        if n:
            return self._repeated(more, low, high)
        some = self._spaced(rule, self._repeated(more, max(0, low - 1), high - 1))
        return some if low else f"({some})?"

    @property
    def _comma(self) -> str:
        return f'"," {self._fixed("space")}'


def json_text(text: str) -> str:
    """Return a text as it is written within a JSON string, without the quotes."""
    return text_of(text)[1:-1]


def _single(found: Ranges) -> str:
    """Return the only character of ranges; "" if there are several."""
    return chr(found[0][0]) if len(found) == 1 and found[0][0] == found[0][1] else ""


_ESCAPED = ((0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\")))


def _class(found: Ranges) -> str:
    """Return GBNF for one character in a JSON string. Controls without a short escape are left out if any character needs no escape."""
    if char := _single(found):
        return literal(json_text(char))
    raw = languages.minus(found, _ESCAPED)
    ranges = "".join(_code(a) + (f"-{_code(b)}" if b > a else "") for a, b in raw)
    escapes = [json_text(chr(code)) for a, b in languages.minus(found, raw) for code in range(a, b + 1)]
    options = [f"[{ranges}]"] if raw else []
    options += [literal(text) for text in escapes if not (raw and text.startswith("\\u"))]
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _code(char: int) -> str:
    return chr(char) if chr(char).isascii() and chr(char).isalnum() else f"\\U{char:08X}"
