"""Regular expressions and formats of JSON schemas: the grammar has the strings that others say it should."""

import ipaddress
import itertools
import json
import random
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime
from urllib.parse import urlsplit

import pytest
from support.gbnf import Grammar

from pyllama_kvflash.json_schema import check, languages, patterns
from pyllama_kvflash.json_schema.formats import FORMATS

TEXTS = ["".join(chars) for n in range(5) for chars in itertools.product("ab1,", repeat=n)]

LISTED = [
    "foo|bar", "(foo|bar)", "^.*(foo|bar).*$", "a|b", "[ab]", "^a", "b$", "^(a|b)", r"\d+", "(^|,)a", r"^$|^\d+$", r"\S", "https?://", r"\.(jpg|png)$",
    "^a|b$", "^a|b$|1", "^ab+?$", "^a{2}?$", "^a{1,2}?$", "^a*?$", "^a??b$", "^a{1,}?$", "(^a)|b", "^(^a|b)$", "(a|^)b", "(a$|b)", "a(b|$)",
    "$^", "a^|b", "^(a*)*$", "^(a?b?)+$", "(|a)b", "^()$", "^[^]*$".replace("[^]", "[^x]"), "^[a-b-1]+$", "^(?:a|b)(?<name>1)?$", "", "|", "^", "$",
]  # fmt: skip
"""Alternatives and anchors, and quantifiers that are lazy: as in the public reports that were tried, and their kind."""


def drawn(rng: random.Random, depth: int = 0) -> str:
    """A regular expression over a few characters."""
    kind = rng.random()
    if depth > 3 or kind < 0.3:
        return rng.choice(["a", "b", "1", ",", ".", "[ab]", "[^a]", r"\d", r"\D", r"\w", "(?:)", "[a-b1]", r"\x61"])
    if kind < 0.42:
        return rng.choice("^$")
    if kind < 0.6:
        return drawn(rng, depth + 1) + drawn(rng, depth + 1)
    if kind < 0.75:
        return f"({drawn(rng, depth + 1)}|{drawn(rng, depth + 1)})"
    if kind < 0.85:
        return f"{drawn(rng, depth + 1)}|{drawn(rng, depth + 1)}"
    return f"({drawn(rng, depth + 1)})" + rng.choice(["*", "+", "?", "{2}", "{1,2}", "{1,}"]) + rng.choice(["", "?"])


def found(pattern: str) -> Callable[[str], bool]:
    """What Python's expressions say, which are those of ECMAScript for these texts."""
    same = re.sub(r"(?<!\\)\$", r"\\Z", pattern).replace("(?<name>", "(?P<name>")
    return lambda text: re.search(same, text, re.ASCII) is not None


def compare(pattern: str, texts: list[str]) -> None:
    want = [found(pattern)(text) for text in texts]
    language = patterns.language(pattern)
    assert [languages.has(language, text) for text in texts] == want, pattern
    if any(want) or language != languages.NOTHING:
        grammar = Grammar(check({"type": "string", "pattern": pattern}).grammar())
        assert [grammar.takes(json.dumps(text)) for text in texts] == want, pattern
        assert found(pattern)(json.loads(grammar.made(random.Random(1)))), pattern


@pytest.mark.parametrize("pattern", LISTED)
def test_alternatives_anchors_and_lazy_quantifiers(pattern: str) -> None:
    compare(
        pattern, [*TEXTS[::3], "foo", "xbarx", "fo", "b\n", "a\n", "http://x", "httpss://", "a.jpg", "a.png.", "x,a"]
    )


def test_a_family_of_patterns() -> None:
    """Those that are refused repeat an anchor."""
    refused = 0
    for seed in range(300):
        rng = random.Random(seed)
        pattern = drawn(rng)
        loosened = check({"type": "string", "pattern": f"x|{pattern}"}).loosened
        if loosened:
            assert loosened[0].why == "no grammar can be made of it: ^ or $ is in what is repeated", pattern
            refused += 1
        else:
            compare(pattern, rng.sample(TEXTS, 12))
    assert 0 < refused < 40


def test_intersections_and_complements() -> None:
    """With what few states it takes; without those from which nothing ends."""
    for seed in range(300):
        rng = random.Random(seed)
        try:
            one, two = (patterns.language(drawn(rng)) for _ in range(2))
        except patterns.PatternError:
            continue
        both, neither = languages.both(one, languages.other(two)), languages.other(languages.either(one, two))
        texts = rng.sample(TEXTS, 30)
        for text in texts:
            in_one, in_two = languages.has(one, text), languages.has(two, text)
            assert languages.has(both, text) == (in_one and not in_two)
            assert languages.has(neither, text) == (not in_one and not in_two)
        states = languages.states(both)
        assert states is not None
        empty = not languages.is_regular(both) and not states
        assert not (empty or both == languages.NOTHING) or not any(languages.has(both, text) for text in texts)


def test_what_needs_many_states_is_named_and_ends() -> None:
    """Each of these is given up by itself; those that come when some were are not looked at."""
    hard = {f"p{i}": {"type": "string", "pattern": f"(a|b)*a.{{{i + 12}}}", "maxLength": 30} for i in range(6)}
    same = {f"e{i}": {"type": "string", "format": "date", "pattern": "^2"} for i in range(200)}
    loosened = check({"properties": {**same, **hard}}).loosened
    assert [one.keyword for one in loosened] == ["maxLength"] * 6
    assert all("more than 2,000 states" in one.why for one in loosened)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a++", "a quantifier follows another one"), ("(?!a)b", "it looks around, with (?!"), ("(?<=a)b", "it looks around, with (?<="),
        (r"(a)\1", r"it refers to a group, with \1"), (r"\bab", r"edge of a word, with \b"), (r"\p{L}", r"property of characters, with \p"),
        ("a{2001}", "repeated more than 2,000 times"), ("(", "a ( has no )"), ("[a", "a [ has no ]"), (r"\A", r"\A is not an escape"), ("{2}", "nothing is before a quantifier"),
        ("x" * 10_001, "more than 10,000 characters"), (f"({'x*' * 300})*", "may be empty, and has more than 200 parts"), (r"[\ud800-\udbff]", "half of a surrogate pair"),
        ("(a?){2000}" * 6, "its repetitions are more than 10,000 together"), (f"{'(' * 101}{')' * 101}", "more than 100 deep"),
    ],
)  # fmt: skip
def test_what_has_no_grammar_says_why(pattern: str, why: str) -> None:
    for schema in ({"type": "string", "pattern": pattern}, {"propertyNames": {"pattern": pattern}}):
        assert [why in one.why for one in check(schema).loosened] == [True], pattern


def test_characters_as_ecmascript_has_them() -> None:
    cases = [
        (r"^[\d-x]$", "5-x", "y,"), (r"^[a-\d]$", "a-5", "b"), (r"^[\w-,]$", "-,a", "+"), (r"^[\b]$", "\b", "b"), ("^[^]$", "a\n😀", ""), (r"^\cJ$", "\n", "J"), (r"^\ud83d\ude00$", "😀", "x"),
        (r"^\u{1F600}$", "😀", "u"), ("^{a}$", "", "a"), (r"^[\x01-\x1f]$", "\x01\x1f\n\b", " "), (r"^\0$", "\0", "0"), (r"^[\]\\]$", "]\\", "["), ("^.$", "a\x7f", "\n\r\u2028"), (r"^\/$", "/", "\\"),
    ]  # fmt: skip
    for pattern, good, bad in cases:
        grammar = Grammar(check({"type": "string", "pattern": pattern}).grammar())
        for texts, is_good in ((good, True), (bad, False)):
            assert all(grammar.takes(json.dumps(char, ensure_ascii=False)) == is_good for char in texts), pattern
    assert languages.has(patterns.language("^{a}$"), "{a}")
    assert patterns.language("^[]$") == languages.NOTHING


#
# formats
#


def is_duration(text: str) -> bool:
    """RFC 3339, appendix A: units in their order, none left out between two."""
    date_part, has_time, time_part = text[1:].partition("T")
    if re.fullmatch(r"\d+W", text[1:]):
        return True
    units = [re.sub(r"\d+", "", part) for part in (date_part, time_part)]
    pieces = [re.fullmatch(r"(\d+[A-Z])*", part) is not None for part in (date_part, time_part)]
    return (
        text[0] == "P"
        and all(pieces)
        and units[0] in "YMD"
        and units[1] in "HMS"
        and bool(units[1] or not has_time)
        and len(text) > 1
    )


def is_host(text: str) -> bool:
    parts = text.split(".")
    return len(text) <= 253 and all(
        0 < len(p) <= 63 and p.replace("-", "a").isalnum() and "-" not in (p[0], p[-1]) for p in parts
    )


def is_email(text: str) -> bool:
    local, _, host = text.rpartition("@")
    words = local.split(".")
    return (
        len(local) <= 64
        and len(text) <= 254
        and all(words)
        and is_host(host)
        and not set(local) & set(' "(),:;<>@[\\]')
    )


def is_uri(text: str) -> bool:
    """RFC 3986 by the parts that Python splits it into; RFC 3987 differs by characters that these grammars lack."""
    parts = urlsplit(text)
    if parts.netloc:
        assert parts.port is None or parts.port < 65536
    if "[" in parts.netloc:
        ipaddress.IPv6Address(parts.hostname or "")
    plain = re.sub("%[0-9A-Fa-f]{2}", "", text)
    allowed = re.fullmatch(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]*", plain) is not None
    return (
        bool(parts.scheme)
        and allowed
        and plain.count("#") <= 1
        and not set("[]") & set(parts.path + parts.query + parts.fragment)
    )


def is_time(text: str) -> bool:
    return bool(datetime.fromisoformat(f"2024-01-01T{text}").tzinfo)


def is_pointer(text: str) -> bool:
    return not text or (text[0] == "/" and not re.search("~(?![01])", text))


JUDGES: dict[str, Callable[[str], object]] = {
    "date": lambda text: text.startswith("0000") or date.fromisoformat(text),
    "time": is_time,
    "date-time": lambda text: text.startswith("0000") or datetime.fromisoformat(text).tzinfo,
    "duration": is_duration,
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
    "ipv4": lambda text: str(ipaddress.IPv4Address(text)) == text,
    "ipv6": ipaddress.IPv6Address,
    "hostname": is_host,
    "email": is_email,
    "uri": is_uri,
    "uri-reference": lambda text: is_uri(text) or is_uri(f"http:{text}" if text.startswith("/") else f"http:/{text}"),
    "iri": is_uri,
    "json-pointer": is_pointer,
    "relative-json-pointer": lambda text: re.match(r"(0|[1-9]\d*)", text) and is_pointer(text.lstrip("0123456789").removesuffix("#")),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_strings_of_a_format(name: str) -> None:
    grammar = Grammar(check({"type": "string", "format": name}, strict=True).grammar())
    rng = random.Random(2)
    for _ in range(150):
        text = json.loads(grammar.made(rng))
        assert JUDGES[name](text), text


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("date", "2023-02-29"), ("time", "24:00:00Z"), ("date-time", "2024-01-01T00:00:00"), ("duration", "P1YT"), ("duration", "P1Y1D"), ("uuid", "1-2"), ("ipv4", "1.2.3.256"), ("ipv6", "1::2::3"),
        ("hostname", "a-.b"), ("email", "a..b@c.de"), ("uri", "http://a/%zz b"), ("uri-reference", "a b"), ("iri", "/a"), ("json-pointer", "a~2"), ("relative-json-pointer", "/a"),
    ],
)  # fmt: skip
def test_the_judges_of_formats_can_say_no(name: str, bad: str) -> None:
    with suppress(ValueError):
        assert not JUDGES[name](bad)


def test_texts_of_a_format_have_the_lengths_that_protocols_allow() -> None:
    assert languages.lengths(patterns.language(FORMATS["hostname"]))[1] <= 253  # type: ignore[operator]
    assert languages.lengths(patterns.language(FORMATS["email"]))[1] <= 254  # type: ignore[operator]
