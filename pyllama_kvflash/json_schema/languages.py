"""Sets of texts: what a regular expression allows, with intersection and complement. Texts are sequences of code points.

The functions that make them simplify: an empty set is always NOTHING, unless a `Both` or a `Not` is in it (`states` tells that).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

Range = tuple[int, int]
Ranges = tuple[Range, ...]
"""Code points, first and last of each range: sorted, and apart."""

MAX_STATES, MAX_SIZE = 2_000, 100_000  # of all states together: some tenths of a second
LAST = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """These parts, one after the other; (): the empty text."""

    parts: tuple["Language", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A text of any of these; none: there is no text."""

    options: frozenset["Language"]


@dataclass(frozen=True, slots=True)
class Many:
    """low to high (None: no bound) times a part, which is not empty."""

    part: "Language"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Both:
    """A text in all of these."""

    options: frozenset["Language"]


@dataclass(frozen=True, slots=True)
class Not:
    """Any other text."""

    part: "Language"


Language = Chars | Seq | Choice | Many | Both | Not

EMPTY, NOTHING = Seq(()), Choice(frozenset())


#
# to make one
#


def ranges(found: Iterable[Range]) -> Ranges:
    """Return ranges, sorted and joined."""
    res: list[Range] = []
    for first, last in sorted(found):
        if res and first <= res[-1][1] + 1:
            res[-1] = res[-1][0], max(res[-1][1], last)
        else:
            res.append((first, last))
    return tuple(res)


def minus(these: Ranges, others: Ranges) -> Ranges:
    """Return ranges without others."""
    res = list(these)
    for first, last in others:
        res = [part for a, b in res for part in ((a, min(b, first - 1)), (max(a, last + 1), b)) if part[0] <= part[1]]
    return ranges(res)


_SURROGATES = ((0xD800, 0xDFFF),)  # which no text has
ALL = minus(((0, LAST),), _SURROGATES)


def chars(found: Iterable[Range]) -> Language:
    """Return the texts of one character."""
    res = minus(ranges(found), _SURROGATES)
    return Chars(res) if res else NOTHING


def text(value: str) -> Language:
    """Return one text."""
    return seq(*(chars([(ord(char), ord(char))]) for char in value))


def seq(*parts: Language) -> Language:
    """Return the texts of these parts, one after the other."""
    flat = [one for part in parts for one in (part.parts if isinstance(part, Seq) else (part,))]
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def either(*options: Language) -> Language:
    """Return the texts of any of these."""
    flat = {one for option in options for one in (option.options if isinstance(option, Choice) else (option,))}
    single = [one for one in flat if isinstance(one, Chars)]
    if len(single) > 1:
        flat = flat.difference(single) | {chars([pair for one in single for pair in one.ranges])}
    if ANYTHING in flat:
        return ANYTHING
    return flat.pop() if len(flat) == 1 else Choice(frozenset(flat))


def many(part: Language, low: int, high: int | None) -> Language:
    """Return low to high times the texts of a part."""
    if nullable(part):  # which a grammar could repeat for ever
        part, low = nonempty(part), 0
    if part == NOTHING or high == 0:
        return EMPTY if low == 0 else NOTHING
    return part if low == high == 1 else Many(part, low, high)


def both(*options: Language) -> Language:
    """Return the texts that all of these have."""
    flat = {one for option in options for one in (option.options if isinstance(option, Both) else (option,))}
    flat.discard(ANYTHING)
    if NOTHING in flat or (EMPTY in flat and not all(map(nullable, flat))):
        return NOTHING
    if EMPTY in flat or not flat:
        return EMPTY if flat else ANYTHING
    return flat.pop() if len(flat) == 1 else Both(frozenset(flat))


def other(part: Language) -> Language:
    """Return all texts but these."""
    if isinstance(part, Not):
        return part.part
    return ANYTHING if part == NOTHING else NOTHING if part == ANYTHING else Not(part)


ANYTHING = Many(Chars(ALL), 0, None)


#
# to look at one
#


@lru_cache(maxsize=4096)
def nullable(language: Language) -> bool:
    """Return whether the empty text is in it."""
    match language:
        case Seq(parts):
            return all(map(nullable, parts))
        case Choice(options):
            return any(map(nullable, options))
        case Both(options):
            return all(map(nullable, options))
        case Many(part, low, _):
            return low == 0 or nullable(part)
        case Not(part):
            return not nullable(part)
    return False


def nonempty(language: Language) -> Language:
    """Return it without the empty text."""
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
    """Return what may follow a first character (the derivative of Brzozowski)."""
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
            return seq(after(part, char), many(part, max(0, low - 1), None if high is None else high - 1))
    return other(after(language.part, char))


def has(language: Language, value: str) -> bool:
    """Return whether a text is in it."""
    for char in value:
        language = after(language, ord(char))
        if language in (NOTHING, ANYTHING):
            break
    return nullable(language)


def lengths(language: Language) -> tuple[int, int | None]:
    """Return the least and the greatest number of characters, or bounds of them (None: there is no bound)."""
    match language:
        case Chars():
            return 1, 1
        case Seq(parts):
            found = [lengths(part) for part in parts]
            return sum(low for low, _ in found), _sum([high for _, high in found])
        case Choice(options) if options:
            found = [lengths(option) for option in options]
            highs = [high for _, high in found]
            return min(low for low, _ in found), None if None in highs else max(h for h in highs if h is not None)
        case Many(part, low, high):
            least, most = lengths(part)
            return least * low, None if most is None or high is None else most * high
    return 0, None


def _sum(numbers: list[int | None]) -> int | None:
    return None if None in numbers else sum(n for n in numbers if n is not None)


def _parts(language: Language) -> Iterable[Language]:
    """Return what a language is made of."""
    match language:
        case Seq(parts) | Choice(parts) | Both(parts):
            return parts
        case Many(part, _, _) | Not(part):
            return (part,)
    return ()


def size_of(language: Language) -> int:
    """Return how many parts it has."""
    return 1 + sum(map(size_of, _parts(language)))


def counted(language: Language) -> Iterator[int]:
    """Yield the repeat count of each repeated part."""
    if isinstance(language, Many):
        yield language.low if language.high is None else language.high
    for part in _parts(language):
        yield from counted(part)


def is_regular(language: Language) -> bool:
    """Return whether it has neither an intersection nor a complement in it."""
    return not isinstance(language, Both | Not) and all(map(is_regular, _parts(language)))


#
# what needs states
#

States = dict[Language, list[tuple[Ranges, Language]]]
"""What may follow: characters, and the language of what comes after them. It is of those that a regular expression cannot write."""


@lru_cache(maxsize=256)
def states(language: Language) -> States | None:
    """Return a language's states from which a text can end; {} for an empty or regular one. None: too many states."""
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
    users: dict[Language, set[Language]] = {}
    for state, steps in found.items():
        for _, to in steps:
            users.setdefault(to, set()).add(state)
    live: set[Language] = set()
    todo = [one for one in found.keys() | users.keys() if (nullable(one) if one in found else one != NOTHING)]
    while todo:
        state = todo.pop()
        if state not in live:
            live.add(state)
            todo += users.get(state, ())
    return {
        state: [(these, to) for these, to in steps if to in live] for state, steps in found.items() if state in live
    }


def is_empty(language: Language) -> bool:
    """Return whether there is no text in a language that does not need too many states."""
    return language == NOTHING or (not is_regular(language) and states(language) == {})


def _steps(language: Language) -> list[tuple[Ranges, Language]]:
    res: dict[Language, list[Range]] = {}
    firsts = list(_firsts(language))
    edges = sorted({0, *(edge for these in firsts for a, b in these for edge in (a, b + 1))})
    known: dict[frozenset[int], Language] = {}  # by the sets that a character is in
    for first, end in zip(edges, [*edges[1:], LAST + 1], strict=True):
        inside = frozenset(i for i, these in enumerate(firsts) if any(a <= first <= b for a, b in these))
        if inside not in known:
            known[inside] = after(language, first)
        if known[inside] != NOTHING and first < end:
            res.setdefault(known[inside], []).append((first, end - 1))
    return [(these, to) for to, found in res.items() if (these := minus(ranges(found), _SURROGATES))]


def _firsts(language: Language) -> set[Ranges]:
    """Return character sets: characters in exactly the same sets have the same continuations."""
    if isinstance(language, Chars):
        return {language.ranges}
    res: set[Ranges] = set()
    for part in _parts(language):
        res |= _firsts(part)
        if isinstance(language, Seq) and not nullable(part):
            break
    return res
