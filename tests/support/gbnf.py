"""GBNF in plain Python: which texts a grammar takes, and texts that it makes. It shares no code with what samples by one."""

import random
import re
import sys
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(
    r'\s*(?:"((?:\\.|[^"\\])*)"|\[(\^?)((?:\\.|[^\]\\])*)\]|([a-zA-Z][a-zA-Z0-9-]*)|([()|*+?])|\{(\d+)(,?)(\d*)\})',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_DASH = "\uf8ff"  # one that is escaped, and begins no range
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(eq=False)
class Node:
    """literal text, "class" of (first, last) pairs, "rule" by name, "seq" and "any" of nodes, "many" (low, high) of a node."""

    kind: str
    what: Any
    low: int = 0
    high: int | None = None
    ends: dict[int, frozenset[int]] = field(default_factory=dict)


def unescaped(text: str) -> list[str]:
    """The characters that a text of GBNF stands for."""
    res, at = [], 0
    while at < len(text):
        found = _ESCAPE.match(text, at)
        if found:
            code = found[1] or found[2] or found[3]
            res.append(chr(int(code, 16)) if code else _NAMED.get(found[4], found[4]))
            at = found.end()
        else:
            res.append(text[at])
            at += 1
    return res


def ranges(text: str) -> list[tuple[int, int]]:
    dashes = _ESCAPE.sub(lambda found: found[0] if unescaped(found[0]) != ["-"] else _DASH, text)
    chars, res, i = unescaped(dashes), [], 0
    while i < len(chars):
        first = last = chars[i]
        if i + 2 < len(chars) and chars[i + 1] == "-":
            last = chars[i + 2]
            i += 2
        res.append((ord(first.replace(_DASH, "-")), ord(last.replace(_DASH, "-"))))
        i += 1
    return res


class Grammar:
    """A grammar, from its rule `root` on."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, Node] = {}
        for line in filter(None, text.splitlines()):
            name, _, body = line.partition("::=")
            self._body, self._at = body, 0
            self.rules[name.strip()] = self._alternatives()
            assert not self._body[self._at :].strip(), (name, self._body[self._at :])
        self._text = ""

    def _peek(self) -> Any:
        found = _TOKEN.match(self._body, self._at)
        assert found or not self._body[self._at :].strip(), self._body[self._at :]
        return found

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while (found := self._peek()) and found[5] == "|":
            self._at = found.end()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Node("any", options)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (found := self._peek()) and found[5] not in ("|", ")"):
            self._at = found.end()
            if found[5] == "(":
                parts.append(self._alternatives())
                assert self._peek()[5] == ")"
                self._at = self._peek().end()
            elif found[5]:
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[5]]
                parts[-1] = Node("many", parts[-1], low, high)
            elif found[6]:
                high = int(found[8]) if found[8] else None if found[7] else int(found[6])
                assert (high or int(found[6])) <= 2000, "llama.cpp takes it for any number"
                parts[-1] = Node("many", parts[-1], int(found[6]), high)
            elif found[4]:
                parts.append(Node("rule", found[4]))
            elif found[3] is not None:
                parts.append(Node("class", (bool(found[2]), ranges(found[3]))))
            else:
                parts.append(Node("literal", "".join(unescaped(found[1]))))
        return Node("seq", parts)

    def takes(self, text: str) -> bool:
        """Whether a text is one of the grammar's."""
        self._text = text
        todo = [*self.rules.values()]
        while todo:
            node = todo.pop()
            node.ends.clear()
            todo += node.what if node.kind in ("seq", "any") else [node.what] if node.kind == "many" else []
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(100_000)  # a text of a thousand properties is as deep as that
        try:
            return len(text) in self._ends(self.rules["root"], 0)
        finally:
            sys.setrecursionlimit(limit)

    def _ends(self, node: Node, at: int) -> frozenset[int]:
        if at not in node.ends:
            node.ends[at] = frozenset(self._found(node, at))
        return node.ends[at]

    def _found(self, node: Node, at: int) -> set[int]:
        match node.kind:
            case "literal":
                return {at + len(node.what)} if self._text.startswith(node.what, at) else set()
            case "class":
                negated, these = node.what
                hit = at < len(self._text) and any(a <= ord(self._text[at]) <= b for a, b in these) != negated
                return {at + 1} if hit else set()
            case "rule":
                return set(self._ends(self.rules[node.what], at))
            case "any":
                return {end for option in node.what for end in self._ends(option, at)}
            case "seq":
                ends = {at}
                for part in node.what:
                    ends = {end for start in ends for end in self._ends(part, start)}
                return ends
        return self._repeated(node, at)

    def _repeated(self, node: Node, at: int) -> set[int]:
        ends, now, n = set(), {at}, 0
        while now and (node.high is None or n <= node.high):
            if n >= node.low:
                if now <= ends:
                    break
                ends |= now
            now = {end for start in now for end in self._ends(node.what, start)}
            n += 1
        return ends

    def made(self, rng: random.Random) -> str:
        """A text of the grammar, drawn at random, rather short."""
        return self._draw(self.rules["root"], rng, 0)

    def _draw(self, node: Node, rng: random.Random, depth: int) -> str:
        match node.kind:
            case "literal":
                return node.what
            case "class":
                return self._char(*node.what, rng)
            case "rule":
                return self._draw(self.rules[node.what], rng, depth + 1)
            case "any":
                options = node.what if depth < 24 else sorted(node.what, key=self.least)[:1]
                return self._draw(rng.choice(options), rng, depth)
            case "seq":
                return "".join(self._draw(part, rng, depth) for part in node.what)
        high = node.low if depth >= 24 else node.low + 2 if node.high is None else min(node.high, node.low + 2)
        n = node.high if node.high and depth < 24 and rng.random() < 0.1 else rng.randint(node.low, high)
        return "".join(self._draw(node.what, rng, depth) for _ in range(n))

    @staticmethod
    def _char(negated: bool, these: list[tuple[int, int]], rng: random.Random) -> str:
        if not negated:
            a, b = rng.choice(these)
            return chr(rng.choice([a, b, rng.randint(a, min(b, a + 100))]))
        while True:
            code = rng.choice([rng.randint(0x20, 0x7E), rng.randint(0x20, 0x24F), 0x1F600])
            if not any(a <= code <= b for a, b in these):
                return chr(code)

    def least(self, node: Node, seen: tuple[str, ...] = ()) -> float:
        """About how deep the shallowest text of a node is: what is in itself is without end."""
        match node.kind:
            case "rule":
                return float("inf") if node.what in seen else 1 + self.least(self.rules[node.what], (*seen, node.what))
            case "any":
                return min(self.least(option, seen) for option in node.what)
            case "seq":
                return max((self.least(part, seen) for part in node.what), default=0)
            case "many":
                return self.least(node.what, seen) if node.low else 0
        return 0
