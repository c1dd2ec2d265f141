"""ECMAScript regular expressions as languages: the texts that contain a match."""

import re
from functools import lru_cache
from math import inf

from pyllama_kvflash.json_schema import languages
from pyllama_kvflash.json_schema.languages import ALL, ANYTHING, EMPTY, NOTHING, Language, Ranges, minus, ranges, seq

MAX_PATTERN = 10_000  # characters
MAX_REPEATED, MAX_COUNTED = 2_000, 10_000  # repetitions of one quantifier, and of all together
MAX_EMPTY = 200  # parts of a repeated part that may be empty
_MAX_DEPTH = 100  # of nested groups

_DIGITS = ((ord("0"), ord("9")),)
_WORDS = ranges([*_DIGITS, (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z"))])
_SPACES = ranges([
    (0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
])  # fmt: skip
_DOT = minus(ALL, ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)))
_CLASSES: dict[str, Ranges] = {
    "d": _DIGITS, "w": _WORDS, "s": _SPACES, "D": minus(ALL, _DIGITS), "W": minus(ALL, _WORDS), "S": minus(ALL, _SPACES),
}  # fmt: skip
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD, "0": 0}
_COUNT = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")
_CODE = re.compile(
    r"x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})"
)


class PatternError(ValueError):
    """A regular expression has no grammar. The error's text is the reason."""


Anchored = dict[tuple[bool, bool], Language]
"""The texts that a part matches, by whether a match must begin at the text's start, and must end at the text's end."""


@lru_cache(maxsize=1024)
def language(pattern: str) -> Language:
    """Return the texts that contain a match of a regular expression. Raises PatternError."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"it has more than {MAX_PATTERN:,} characters")
    found = _Reader(pattern).whole()
    if sum(n for part in found.values() for n in languages.counted(part)) > MAX_COUNTED:
        raise PatternError(f"its repetitions are more than {MAX_COUNTED:,} together")
    return languages.either(
        *(
            seq(EMPTY if begins else ANYTHING, part, EMPTY if ends else ANYTHING)
            for (begins, ends), part in found.items()
        )
    )


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text, self._at, self._depth = pattern, 0, 0

    def _next(self, n: int = 1) -> str:
        return self._text[self._at : self._at + n]

    def _take(self, word: str) -> bool:
        found = self._text.startswith(word, self._at)
        self._at += len(word) if found else 0
        return found

    def whole(self) -> Anchored:
        res = self._alternatives()
        if self._next():
            raise PatternError("a ) has no (")
        return res

    def _alternatives(self) -> Anchored:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return _either(*options)

    def _sequence(self) -> Anchored:
        res: Anchored = {(False, False): EMPTY}
        free: list[Language] = []  # parts without anchors, to be joined at once
        while self._next() not in ("", "|", ")"):
            part = self._repeated()
            if part.keys() == {(False, False)}:
                free.append(part[False, False])
            else:
                res, free = _joined(_joined(res, {(False, False): seq(*free)}), part), []
        return _joined(res, {(False, False): seq(*free)})

    def _repeated(self) -> Anchored:
        if self._take("^"):
            return {(True, False): EMPTY}
        if self._take("$"):
            return {(False, True): EMPTY}
        if self._count():
            raise PatternError("nothing is before a quantifier that could be repeated")
        part = self._atom()
        found = self._count()
        if found is None:
            return part
        self._take("?")  # a lazy quantifier matches the same texts
        if self._count():
            raise PatternError("a quantifier follows another one, as in a++")
        return _many(part, *found)

    def _count(self) -> tuple[int, float] | None:
        """Read a quantifier. Returns the least and the greatest number of repetitions; None if there is no quantifier."""
        for char, count in (("*", (0, inf)), ("+", (1, inf)), ("?", (0, 1))):
            if self._take(char):
                return count
        found = _COUNT.match(self._text, self._at)
        if not found:
            if re.compile(r"\{,[0-9]+\}").match(self._text, self._at):
                raise PatternError("{,n} is not a quantifier of ECMAScript: write {0,n}")
            return None
        low, high = found[1], found[3] or ("" if found[2] else found[1])
        if len(low) > 9 or len(high) > 9 or max(int(low), int(high or 0)) > MAX_REPEATED:  # noqa: PLR2004 (digits)
            raise PatternError(f"something in it is repeated more than {MAX_REPEATED:,} times")
        if high and int(high) < int(low):
            raise PatternError(f"nothing can come {found[0]} times")
        self._at = found.end()
        return int(low), int(high) if high else inf

    def _atom(self) -> Anchored:
        if self._next() == "(":
            return self._group()
        if self._take("."):
            found = _DOT
        elif self._take("["):
            found = self._bracket()
        else:
            found, _ = self._char(in_brackets=False)
        if found and languages.chars(found) == NOTHING:
            raise PatternError("it looks for half of a surrogate pair")
        return {(False, False): languages.chars(found)}

    def _group(self) -> Anchored:
        if re.compile(r"\(\?<?[=!]").match(self._text, self._at):
            raise PatternError(f"it looks around, with {self._next(4 if self._next(3) == '(?<' else 3)}")
        named = re.compile(r"\((\?:|\?<[A-Za-z_$][\w$]*>|(?!\?))").match(self._text, self._at)
        if not named:
            raise PatternError(f"{self._next(3)} does not begin a group of ECMAScript")
        self._at = named.end()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"its groups are more than {_MAX_DEPTH} deep")
        res = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise PatternError("a ( has no )")
        return res

    def _char(self, *, in_brackets: bool) -> tuple[Ranges, bool]:
        """Read a character or an escape. Returns the characters it stands for, and whether it is a class of characters."""
        char = self._next()
        self._at += 1
        if char != "\\":
            return ((ord(char), ord(char)),), False
        char = self._next()
        if char in _CLASSES:
            self._at += 1
            return _CLASSES[char], True
        code = self._code(in_brackets=in_brackets)
        return ((code, code),), False

    def _code(self, *, in_brackets: bool) -> int:
        """Read an escape after its backslash. Returns the character."""
        char = self._next()
        if found := _CODE.match(self._text, self._at):
            self._at = found.end()
            if found[3]:  # a pair
                return 0x10000 + ((int(found[3], 16) & 0x3FF) << 10) + (int(found[4], 16) & 0x3FF)
            code = int(found[1] or found[2] or found[5], 16)
            if code > languages.LAST:
                raise PatternError(f"\\{found[0]} is not a character")
            return code
        if not char:
            raise PatternError("a backslash is at its end")
        self._at += 1
        if char == "c" and re.fullmatch("[a-zA-Z]", self._next()):
            self._at += 1
            return ord(self._text[self._at - 1]) % 32
        if char == "b" and in_brackets:
            return 8
        if char in _CONTROLS and not (char == "0" and self._next().isdecimal()):
            return _CONTROLS[char]
        if char.isascii() and char.isalnum():
            why = {"b": "it looks for the edge of a word", "B": "it looks around"}
            why |= dict.fromkeys("pP", "it names a property of characters")
            why |= dict.fromkeys("k0123456789", "it refers to a group")
            raise PatternError(
                f"{why[char]}, with \\{char}" if char in why else f"\\{char} is not an escape of ECMAScript"
            )
        return ord(char)

    def _bracket(self) -> Ranges:
        """Read the rest of a [...] whose opening bracket has been read. Returns the characters that it matches."""
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            if not self._next():
                raise PatternError("a [ has no ]")
            these, is_class = self._char(in_brackets=True)
            found += these
            if self._next() != "-" or self._next(2) in ("-", "-]"):
                continue
            start = self._at
            self._at += 1
            to, to_class = self._char(in_brackets=True)
            if is_class or to_class:  # the dash is a character
                self._at = start + 1
                found.append((ord("-"), ord("-")))
            elif to[0][0] < these[0][0]:
                raise PatternError("a range in [] ends before it begins")
            else:
                found[-1] = these[0][0], to[0][0]
        return minus(ALL, ranges(found)) if negated else ranges(found)


#
# anchors
#


def _either(*options: Anchored) -> Anchored:
    return {
        at: languages.either(*(o[at] for o in options if at in o))
        for at in dict.fromkeys(k for o in options for k in o)
    }


def _joined(one: Anchored, two: Anchored) -> Anchored:
    """Return the concatenation of two parts. Only an empty text may come before a `^` of the second, or after a `$` of the first."""
    found: list[Anchored] = []
    for (begins, ends), first in one.items():
        for (begins_2, ends_2), second in two.items():
            if (begins_2 and not languages.nullable(first)) or (ends and not languages.nullable(second)):
                continue
            whole = seq(EMPTY if begins_2 else first, EMPTY if ends else second)
            found.append({(begins or begins_2, ends or ends_2): whole})
    return _either(*found)


def _many(part: Anchored, low: int, high: float) -> Anchored:
    free = part.get((False, False), NOTHING)
    if languages.nullable(free) and languages.size_of(free) > MAX_EMPTY:
        raise PatternError(f"what it repeats may be empty, and has more than {MAX_EMPTY} parts")
    if not part.keys() <= {(False, False)}:
        raise PatternError("^ or $ is in what is repeated")
    return {(False, False): languages.many(free, low, high)}
