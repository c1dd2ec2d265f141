"""Languages: sets of texts, such as those that a regular expression matches; also their intersections and complements.

Texts are sequences of code points. The functions that make languages simplify them. A regular language without texts is always
NOTHING. For a language that contains a `Both` or a `Not`, `is_empty` decides whether it has texts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import TypeVar

_K = TypeVar("_K")

Range = tuple[int, int]
Ranges = tuple[Range, ...]
"""Code points: the first and the last of each range. The ranges are sorted and do not touch."""

MAX_STATES, MAX_SIZE = 2_000, 100_000  # states of a language, and the parts of all of them: some tenths of a second
LAST = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """The texts of one character, out of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """The concatenation of its parts; (): the empty text."""

    parts: tuple["Language", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The union of its options; without options: no text."""

    options: frozenset["Language"]


@dataclass(frozen=True, slots=True)
class Many:
    """`low` to `high` (inf: no bound) repetitions of a part, which does not contain the empty text."""

    part: "Language"
    low: int
    high: float


@dataclass(frozen=True, slots=True)
class Both:
    """The intersection of its options."""

    options: frozenset["Language"]


@dataclass(frozen=True, slots=True)
class Not:
    """The complement of a language."""

    part: "Language"


Language = Chars | Seq | Choice | Many | Both | Not

EMPTY, NOTHING = Seq(()), Choice(frozenset())


#
# making languages
#


def ranges(found: Iterable[Range]) -> Ranges:
    """Return ranges, sorted and merged."""
    res: list[Range] = []
    for first, last in sorted(found):
        if res and first <= res[-1][1] + 1:
            res[-1] = res[-1][0], max(res[-1][1], last)
        else:
            res.append((first, last))
    return tuple(res)


def minus(these: Ranges, others: Ranges) -> Ranges:
    """Return the code points of some ranges that are not in others."""
    res = list(these)
    for first, last in others:
        res = [part for a, b in res for part in ((a, min(b, first - 1)), (max(a, last + 1), b)) if part[0] <= part[1]]
    return ranges(res)


_SURROGATES = ((0xD800, 0xDFFF),)  # no text contains them
ALL = minus(((0, LAST),), _SURROGATES)


def chars(found: Iterable[Range]) -> Language:
    """Return the texts of exactly one character, which is in one of the given ranges and not a surrogate."""
    res = minus(ranges(found), _SURROGATES)
    return Chars(res) if res else NOTHING


def text(value: str) -> Language:
    """Return the language of a single text."""
    return seq(*(chars([(ord(char), ord(char))]) for char in value))


def seq(*parts: Language) -> Language:
    """Return the concatenation of languages."""
    flat = [one for part in parts for one in (part.parts if isinstance(part, Seq) else (part,))]
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def either(*options: Language) -> Language:
    """Return the union of languages."""
    flat = {one for option in options for one in (option.options if isinstance(option, Choice) else (option,))}
    single = [one for one in flat if isinstance(one, Chars)]
    if len(single) > 1:
        flat = flat.difference(single) | {chars([pair for one in single for pair in one.ranges])}
    if ANYTHING in flat:
        return ANYTHING
    return flat.pop() if len(flat) == 1 else Choice(frozenset(flat))


def many(part: Language, low: int, high: float) -> Language:
    """Return `low` to `high` (inf: no bound) repetitions of a language."""
    if nullable(part):  # a grammar could repeat the empty text for ever
        part, low = nonempty(part), 0
    if part == NOTHING or high == 0:
        return EMPTY if low == 0 else NOTHING
    return part if low == high == 1 else Many(part, low, high)


def both(*options: Language) -> Language:
    """Return the intersection of languages."""
    flat = {one for option in options for one in (option.options if isinstance(option, Both) else (option,))}
    flat.discard(ANYTHING)
    if NOTHING in flat or (EMPTY in flat and not all(map(nullable, flat))):
        return NOTHING
    if EMPTY in flat or not flat:
        return EMPTY if flat else ANYTHING
    return flat.pop() if len(flat) == 1 else Both(frozenset(flat))


def other(part: Language) -> Language:
    """Return the complement of a language."""
    if isinstance(part, Not):
        return part.part
    return ANYTHING if part == NOTHING else NOTHING if part == ANYTHING else Not(part)


ANYTHING = Many(Chars(ALL), 0, inf)


#
# reading languages
#


@lru_cache(maxsize=4096)
def nullable(language: Language) -> bool:
    """Return whether a language contains the empty text."""
    match language:
        case Seq(parts) | Both(parts):
            return all(map(nullable, parts))
        case Choice(options):
            return any(map(nullable, options))
        case Many(part, low, _):
            return low == 0 or nullable(part)
        case Not(part):
            return not nullable(part)
    return False


def nonempty(language: Language) -> Language:
    """Return a language without the empty text."""
    if not nullable(language):
        return language
    match language:
        case Seq(parts):
            return either(*(seq(nonempty(part), *parts[i + 1 :]) for i, part in enumerate(parts)))
        case Choice(options):
            return either(*map(nonempty, options))
        case Many(part, _, high):
            return many(part, 1, high)
    return both(language, other(EMPTY))


@lru_cache(maxsize=1 << 14)
def after(language: Language, char: int) -> Language:
    """Return the texts that may follow a first character: the Brzozowski derivative."""
    match language:
        case Chars(found):
            return EMPTY if any(a <= char <= b for a, b in found) else NOTHING
        case Seq(parts):
            options = []
            for i, part in enumerate(parts):
                options.append(seq(after(part, char), *parts[i + 1 :]))
                if not nullable(part):
                    break
            return either(*options)
        case Choice(options):
            return either(*(after(option, char) for option in options))
        case Both(options):
            return both(*(after(option, char) for option in options))
        case Many(part, low, high):
            return seq(after(part, char), many(part, max(0, low - 1), high - 1))
    return other(after(language.part, char))


def has(language: Language, value: str) -> bool:
    """Return whether a language contains a text."""
    for char in value:
        language = after(language, ord(char))
        if language in (NOTHING, ANYTHING):
            break
    return nullable(language)


def lengths(language: Language) -> tuple[int, float]:
    """Return the least and the greatest number of characters of a text. A `Both` or a `Not` counts as 0 to inf."""
    match language:
        case Chars():
            return 1, 1
        case Seq(parts):
            found = [lengths(part) for part in parts]
            return sum(low for low, _ in found), sum(high for _, high in found)
        case Choice(options) if options:
            found = [lengths(option) for option in options]
            return min(low for low, _ in found), max(high for _, high in found)
        case Many(part, low, high):
            least, most = lengths(part)
            return least * low, most * high
    return 0, inf


def _parts(language: Language) -> Iterable[Language]:
    """Return the languages that a language directly consists of."""
    match language:
        case Seq(parts) | Choice(parts) | Both(parts):
            return parts
        case Many(part, _, _) | Not(part):
            return (part,)
    return ()


def size_of(language: Language) -> int:
    """Return how many parts a language has, at all depths."""
    return 1 + sum(map(size_of, _parts(language)))


def counted(language: Language) -> Iterator[int]:
    """Yield the greatest number of repetitions of each repeated part, or the least if there is no bound."""
    if isinstance(language, Many):
        yield language.low if language.high == inf else int(language.high)
    for part in _parts(language):
        yield from counted(part)


def is_regular(language: Language) -> bool:
    """Return whether a language contains neither a `Both` nor a `Not`."""
    return not isinstance(language, Both | Not) and all(map(is_regular, _parts(language)))


#
# states of languages that are not regular
#

States = dict[Language, list[tuple[Ranges, Language]]]
"""The steps of each state that is not regular: characters, and the state after them. A state is the language of the rest of a text."""


@lru_cache(maxsize=256)
def states(language: Language) -> States | None:
    """Return a language's states, except dead ones, from which no text ends; {} if it is empty or regular; None if it has too many."""
    found: States = {}
    todo, size = [] if is_regular(language) else [language], 0
    while todo:
        state = todo.pop()
        if state in found:
            continue
        size += size_of(state)
        if len(found) >= MAX_STATES or size > MAX_SIZE:
            return None
        found[state] = _steps(state)
        todo += [to for _, to in found[state] if not is_regular(to)]
    uses = {state: {to for _, to in steps} for state, steps in found.items()}
    live = fulfilled(
        uses, lambda state, known: nullable(state) or any(to in known or to not in found for to in uses[state])
    )
    return {
        state: [(these, to) for these, to in found[state] if to in live or to not in found]
        for state in found
        if state in live
    }


def fulfilled(uses: Mapping[_K, Iterable[_K]], holds: Callable[[_K, set[_K]], bool]) -> set[_K]:
    """Return the keys that hold: the least fixed point. uses: the keys that each depends on. holds: decides, given the keys so far."""
    users: dict[_K, list[_K]] = {}
    for key, parts in uses.items():
        for part in parts:
            users.setdefault(part, []).append(key)
    res: set[_K] = set()
    todo = list(uses)
    while todo:
        found = []
        for key in todo:
            if key not in res and holds(key, res):
                res.add(key)
                found += users.get(key, [])
        todo = list(dict.fromkeys(found))  # once a round, however many of its keys are new
    return res


def is_empty(language: Language) -> bool:
    """Return whether a language contains no text. A language with too many states counts as not empty."""
    return language == NOTHING or (not is_regular(language) and states(language) == {})


def _steps(language: Language) -> list[tuple[Ranges, Language]]:
    res: dict[Language, list[Range]] = {}
    firsts = list(_firsts(language))
    edges = sorted({0, *(edge for these in firsts for a, b in these for edge in (a, b + 1))})
    known: dict[frozenset[int], Language] = {}  # the derivative, by the sets that contain a character
    for first, end in zip(edges, [*edges[1:], LAST + 1], strict=True):
        inside = frozenset(i for i, these in enumerate(firsts) if any(a <= first <= b for a, b in these))
        if inside not in known:
            known[inside] = after(language, first)
        if known[inside] != NOTHING and first < end:
            res.setdefault(known[inside], []).append((first, end - 1))
    return [(these, to) for to, found in res.items() if (these := minus(ranges(found), _SURROGATES))]


def _firsts(language: Language) -> set[Ranges]:
    """Return the character sets that a text may begin with. Characters that lie in the same sets have the same derivative."""
    if isinstance(language, Chars):
        return {language.ranges}
    res: set[Ranges] = set()
    for part in _parts(language):
        res |= _firsts(part)
        if isinstance(language, Seq) and not nullable(part):
            break
    return res
