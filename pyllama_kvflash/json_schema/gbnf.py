"""Shapes as a grammar (GBNF) of their JSON: properties in the order of the schema, white space as llama.cpp's own grammars have
it.
"""

import re
from collections.abc import Callable, Iterator

from pyllama_kvflash.json_schema.merged import decimals
from pyllama_kvflash.json_schema.numbers import integers
from pyllama_kvflash.json_schema.shapes import (
    BLOCK,
    Anything,
    Array,
    Key,
    Number,
    Object,
    Property,
    Shape,
    Shapes,
    Text,
    Values,
)
from pyllama_kvflash.json_schema.values import text_of

_PLAIN = r'[^"\\\x7F\x00-\x1F]'
_FIXED = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "hex": "[0-9a-fA-F]",
    "plain": _PLAIN,
    # no half of a surrogate pair, and a pair is one character
    "char": r'plain | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] hex{3} | [dD] [0-7] hex{2}'
    r' | [dD] [89abAB] hex{2} "\\u" [dD] [c-fC-F] hex{2}))',
    "string": r'"\"" char* "\""',
    "number": '"-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "object": '"{" space (string space ":" space value ("," space string space ":" space value)*)? space "}"',
    "array": '"[" space (value ("," space value)*)? space "]"',
    "value": 'object | array | string | number | "true" | "false" | "null"',
    "date": '([0-9]{4} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
    ' | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8])))'
    ' | ([0-9]{2} ("0" [48] | [2468] [048] | [13579] [26]) | ("0" [48] | [2468] [048] | [13579] [26] | "00") "00") "-02-29"',
    "time": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})?'
    ' ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
    "date-time": 'date "T" time',
    "uuid": 'hex{8} "-" hex{4} "-" hex{4} "-" hex{4} "-" hex{12}',
}
_QUOTED = r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]'
_NAME = re.compile(_QUOTED + r"|([a-zA-Z][a-zA-Z0-9-]*)", re.DOTALL)


def literal(text: str) -> str:
    """Return a text as GBNF."""
    for char, code in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(char, code)
    return f'"{text}"'


class Writer:
    """Writes rules. prefix: of all their names. pattern: GBNF of a regular expression's strings, from its rule `root` on."""

    def __init__(self, shapes: Shapes, prefix: str, pattern: Callable[[str], str]) -> None:
        self._shapes, self._prefix, self._pattern = shapes, prefix, pattern
        self._rules: dict[str, str] = {}
        self._names: dict[object, str] = {}  # of rules, by what they are for
        self._todo: list[tuple[str, Key]] = []

    def written(self, key: Key) -> tuple[str, str]:
        """Return the name of the rule for a key, and all rules, each on a line."""
        name = self._value(key)
        while self._todo:
            rule, at = self._todo.pop()
            self._rules[rule] = " | ".join(self._shape(shape) for shape in self._shapes[at])
        return name, "".join(f"{rule} ::= {body}\n" for rule, body in self._rules.items())

    def _value(self, key: Key) -> str:
        """Return the name of the rule for a key, which is written later."""
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
        """Return the name of a rule of this body."""
        if ("body", body) not in self._names:
            self._names["body", body] = self._new(body)
        return self._names["body", body]

    def _fixed(self, name: str) -> str:
        """Return the name of a rule that every schema has, with those that it uses."""
        own = f"{self._prefix}{name}"
        if own not in self._rules:
            self._rules[own] = ""
            self._rules[own] = _NAME.sub(
                lambda found: self._fixed(found[1]) if found[1] in _FIXED else found[0], _FIXED[name]
            )
        return own

    def _shape(self, shape: Shape) -> str:
        match shape:
            case Values(values):
                return " | ".join(literal(text_of(value)) for value in values)
            case Number():
                return self._number(shape)
            case Text():
                return self._text(shape)
            case Array():
                return self._array(shape)
            case Object():
                return self._object(shape)
        return self._fixed("value")

    @staticmethod
    def _spaced(*texts: str) -> str:
        return " ".join(text for text in texts if text)

    def _number(self, shape: Number) -> str:
        if shape.integer:
            return integers(*(None if bound is None else int(bound) for bound in (shape.low, shape.high)))
        return (decimals(shape) or "") if shape.bounded else self._fixed("number")

    #
    # strings
    #

    def _text(self, shape: Text) -> str:
        if shape.pattern is not None:
            return self._matching(shape.pattern)
        if shape.format:
            return rf'"\"" {self._fixed(shape.format)} "\""'
        if shape == Text():
            return self._fixed("string")
        return rf'"\"" {self._rule(self._repeated(self._fixed("char"), shape.low, shape.high))} "\""'

    def _matching(self, pattern: str) -> str:
        """Return the name of the rule of a regular expression's strings."""
        if ("pattern", pattern) not in self._names:
            prefix = f"{self._prefix}p{len(self._rules)}"
            lines = _NAME.sub(lambda f: f"{prefix}-{f[1]}" if f[1] else f[0], self._pattern(pattern)).splitlines()
            rules = dict(line.split(" ::= ", 1) for line in lines if line)
            del rules[f"{prefix}-space"]
            self._rules |= rules
            self._names["pattern", pattern] = f"{prefix}-root"
        return self._names["pattern", pattern]

    def _repeated(self, rule: str, low: int, high: int | None) -> str:
        """Return low to high of what a rule has; high None: any more."""
        blocks, more = divmod(low, BLOCK) if low > 2 * BLOCK else (0, low)
        parts = [f"{self._rule(f'{rule}{{{BLOCK}}}')}{{{blocks}}}"] if blocks else []
        if high is None:
            parts.append(f"{rule}{{{more},}}" if more > 1 else f"{rule}{'+' if more else '*'}")
        elif high - low <= 2 * BLOCK:
            parts += [f"{rule}{{{more},{more + high - low}}}"] if more + high - low else []
        else:
            parts += [f"{rule}{{{more}}}"] if more else []
            parts.append(self._up_to(rule, high - low))
        return self._spaced(*parts)

    def _up_to(self, rule: str, n: int) -> str:
        """Return the name of a rule of at most n of what a rule has: each number of them in one way only."""
        block = self._rule(f"{rule}{{{BLOCK}}}")
        steps, left = divmod(n, BLOCK)
        res = self._rule(f"{rule}{{0,{left}}}" if left else '""')
        for _ in range(steps):
            res = self._rule(f"{rule}{{0,{BLOCK - 1}}} | {block} {res}")
        return res

    #
    # arrays
    #

    def _array(self, shape: Array) -> str:
        n = len(shape.prefix)
        high = None if shape.high is None else max(0, shape.high - n)
        inner = (
            ""
            if shape.rest is None
            else self._several(self._value(shape.rest), max(0, shape.low - n), high, first=n == 0)
        )
        for i in reversed(range(n)):
            item = self._spaced(self._comma if i else "", self._value(shape.prefix[i]), inner)
            inner = item if i < shape.low else f"{self._rule(item)}?"
        return f'"[" {self._spaced(self._fixed("space"), inner, self._fixed("space"))} "]"'

    @property
    def _comma(self) -> str:
        return f'"," {self._fixed("space")}'

    def _several(self, rule: str, low: int, high: int | None, *, first: bool) -> str:
        """Return low to high of what a rule has, with commas between. first: nothing is before them."""
        if high == 0:
            return ""
        more = self._rule(f"{self._comma} {rule}")
        if not first:
            return self._repeated(more, low, high)
        some = self._spaced(rule, self._repeated(more, max(0, low - 1), None if high is None else high - 1))
        return some if low else f"({some})?"

    #
    # objects
    #

    def _object(self, shape: Object) -> str:
        pairs = [(self._pair(p), p.required) for p in shape.properties]
        other = None if shape.rest is None else self._other(shape)
        space = self._fixed("space")
        return f'"{{" {self._spaced(space, self._members(shape, pairs, other), space)} "}}"'

    def _members(self, shape: Object, pairs: list[tuple[str, bool]], other: str | None) -> str:
        """Return the members of an object, the first of them without a comma."""
        if other is None:
            last, alone = "", None if shape.nonempty else ""
        else:
            last = self._several(other, shape.low, shape.high, first=False)
            alone = self._several(other, max(shape.low, int(shape.nonempty)), shape.high, first=True)
        if not pairs:
            return alone or ""
        afters = [last]  # what may come after a pair, from the last one on
        for pair, required in reversed(pairs[1:]):
            member = f"{self._comma} {pair}" if required else f"({self._comma} {pair})?"
            afters.append(self._rule(self._spaced(member, afters[-1])))
        afters.reverse()
        res = alone
        for (pair, required), after in reversed(list(zip(pairs, afters, strict=True))):
            first = self._spaced(pair, after)
            options = [first] if required or res is None else [first, res] if res else [first]
            maybe = "?" if res == "" and not required else ""
            res = f"({' | '.join(options)}){maybe}" if len(options) == 1 and maybe else self._rule(" | ".join(options))
        return res or ""

    def _pair(self, prop: Property) -> str:
        space = self._fixed("space")
        return self._rule(f'{literal(text_of(prop.name))} {space} ":" {space} {self._value(prop.key)}')

    def _other(self, shape: Object) -> str:
        """Return the name of the rule of a property that the schema does not name."""
        names = sorted(name for name in shape.excluded if re.fullmatch(r'[^"\\\x7F\x00-\x1F]*', name))
        if shape.names != Text():
            name = self._text(shape.names)
        elif not shape.excluded:
            name = self._fixed("string")
        else:
            name = rf'"\"" {self._not(names)} "\""'
        space = self._fixed("space")
        return self._rule(f'{name} {space} ":" {space} {self._value(shape.rest or ())}')

    def _not(self, names: list[str]) -> str:
        """Return the name of a rule of all texts but these, without escapes. names: sorted."""
        return self._rule(" | ".join(self._differing(names, 0)))

    def _differing(self, names: list[str], at: int) -> Iterator[str]:
        """Yield what may follow the first `at` characters, which the names have in common."""
        plain = self._fixed("plain")
        firsts: dict[str, list[str]] = {}
        for name in names:
            if len(name) > at:
                firsts.setdefault(name[at], []).append(name)
        if not names or len(names[0]) > at:
            yield '""'
        for char, these in firsts.items():
            yield f"{literal(char)} {self._rule(' | '.join(self._differing(these, at + 1)))}"
        others = "".join(f"\\U{ord(char):08X}" for char in firsts)
        yield f'[^"\\\\\\x7F\\x00-\\x1F{others}] {plain}*' if firsts or not names else f"{plain}+"
