"""Schemas of strings, and of names by patterns: lengths, regular expressions and formats."""

from collections.abc import Iterator
from typing import Any

from support.schema_case import INT, LOOSENED, REFUSED, STR, Case, obj, open_obj, typed


def strings() -> Iterator[Case]:
    for low, high in [(0, 0), (0, 1), (1, 1), (2, 5), (3, 3), (0, 300), (255, 600)]:
        some = ("a" * low, "b" * high, "😀" * low)
        yield Case(
            "minLength",
            typed("string", minLength=low, maxLength=high),
            some,
            (*(["a" * (low - 1)] if low else []), "a" * (high + 1), 5),
        )
        yield Case("maxLength", typed("string", maxLength=high), ("", "é" * high), ("é" * (high + 1),))
        yield Case("minLength", {"minLength": low}, ("a" * low, "a" * (low + 9)), (("a" * (low - 1),) if low else ()))
    yield Case(
        "maxLength", typed("string", minLength=600, maxLength=2500), ("x" * 600, "x" * 2500), ("x" * 599, "x" * 2501)
    )
    yield Case("minLength", typed("string", minLength=3, maxLength=2), verdict=REFUSED)
    yield Case("minLength", typed("string", minLength=-1), verdict=REFUSED)
    yield Case("minLength", typed("string", minLength=1.5), verdict=REFUSED)
    yield Case("maxLength", typed("string", maxLength=2**31), verdict=LOOSENED)
    patterns: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("^a*$", ("", "aaa"), ("b", "aab")), ("abc", ("abc", "xabcx"), ("ab", "")), ("^[a-f0-9]{4}$", ("00ff",), ("00FF", "00f")), ("^(a|bc)+$", ("abca",), ("b", "")),
        (r"^\d{3}-\d{4}$", ("555-1234",), ("555-123",)), (r"^\w+@\w+\.com$", ("a@b.com",), ("a@b.de", "@b.com")), ("^é{2}$", ("éé",), ("e", "é")), (r'^"\\$', ('"\\',), ('"',)),
        ("^[^,;]+$", ("ab",), ("a,b", "")), ("^$", ("",), ("a",)), ("^.{3}$", ("a b",), ("ab",)), (r"^(?:x|y)?z$", ("z", "yz"), ("xyz",)), ("^x{2,}$", ("xx", "xxxx"), ("x",)),
    ]  # fmt: skip
    for pattern, good, bad in patterns:
        yield Case("pattern", typed("string", pattern=pattern), good, (*bad, 1))
        yield Case(
            "pattern", typed("array", items=typed("string", pattern=pattern)), (list(good),), tuple([b] for b in bad)
        )
        yield Case(
            "propertyNames",
            open_obj(propertyNames={"pattern": pattern}),
            tuple({g: 1} for g in good),
            tuple({b: 1} for b in bad),
        )
        yield Case("patternProperties", open_obj(patternProperties={pattern: INT}, additionalProperties=False),
                   ({}, *({g: 1} for g in good)), (*({b: 1} for b in bad), {good[0]: "x"}))  # fmt: skip
    yield Case("maxLength", typed("string", pattern="^[a-z]+$", maxLength=3), ("a", "abc"), ("", "abcd", "A"))
    yield Case("minLength", typed("string", pattern="^[a-z]*$", minLength=2), ("ab", "abcd"), ("", "a", "AB"))
    yield Case("maxLength", typed("string", pattern="^(ab)+$", maxLength=3), ("ab",), ("abab", "a", ""))
    yield Case("minLength", typed("string", pattern="b*", minLength=1), ("a", "ab"), ("",))
    both = {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}, {"pattern": "^.?.?$"}]}
    yield Case("pattern", both, ("ab", "ba"), ("a", "b", "bab", ""))
    yield Case("", {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, verdict=REFUSED)
    yield Case("", typed("string", pattern="a^b"), verdict=REFUSED)
    yield Case("maxLength", typed("string", pattern="(a|b)*a.{12}", maxLength=40), verdict=LOOSENED)
    for pattern in (
        r"^(?!a)b$", "(?<=a)b", r"^\bab$", r"(a)\1", r"^\p{L}$", "^a{3000}$", "(", ")", "[a", "a++", "a*+", "a{2}{3}",
        "a{2}+", "a???", "*a", "(?i)a", "(?P<n>a)", "(^a|b){2}", "[b-a]", "a{3,2}", "a{,2}", r"\a", r"\u{110000}", "\\",
    ):  # fmt: skip
        yield Case("pattern", typed("string", pattern=pattern), verdict=LOOSENED)
        yield Case("patternProperties", open_obj(patternProperties={pattern: INT}), verdict=LOOSENED)
    beside: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
        (typed("string", format="uuid", pattern="^0"), (f"0{'1' * 7}-1111-1111-1111-{'1' * 12}",), ("0", f"{'1' * 8}-1111-1111-1111-{'1' * 12}")),
        (typed("string", format="date", minLength=1, maxLength=10), ("2024-02-29",), ("", "2024-2-29")),
        ({"anyOf": [typed("string", maxLength=0), typed("string", format="date")]}, ("", "2024-02-29"), ("a", "2024-02-30")),
    ]  # fmt: skip
    for schema, good, bad in beside:
        yield Case("format", schema, good, bad, validator=None)
    yield Case("maxLength", typed("string", format="email", maxLength=100), verdict=LOOSENED)
    formats = [
        ("duration", ("P1D", "P3DT4H", "PT36H", "P1Y2M3D", "P2W", "PT1M2S"), ("P", "PT", "P1D2W", "P1H", "P1YT", "1D", "P1Y1D")),
        ("ipv4", ("0.0.0.0", "192.168.1.255"), ("256.1.1.1", "1.1.1", "01.1.1.1", "1.1.1.1.1")), ("ipv6", ("::", "::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8"), ("1::2::3", ":::", "12345::", "1:2:3:4:5:6:7")),
        ("hostname", ("localhost", "a-b.example.com", "a.b.c.d.e.f.g.h"), ("-a", "a-", "a..b", "", "a_b", "a.")), ("email", ("joe.bloggs@example.com", "a+b@x-y.org"), ("joe", "a@b@c.d", ".a@b.de", "a..b@c.de", "@b.de")),
        ("uri", ("http://a.example/p?q=1#f", "urn:x:y", "mailto:a@b.de", "http://[::1]:8080/", "file:///etc"), ("//a/b", "/a", "a b", "http://a b", "http://a/%zz", "")),
        ("uri-reference", ("/a/b", "a/b#c", "http://a", "?q", ""), ("a b", "%zz", "\\a")), ("iri", ("http://a.example",), ("a b", "/a")),
        ("json-pointer", ("", "/a~1b/0", "/"), ("a", "/~2", "/~")), ("relative-json-pointer", ("0", "1/a", "2#"), ("-1", "/a", "01")),
        ("date", ("2024-02-29", "1999-12-31"), ("2023-02-29", "2023-13-01", "2023-04-31", "x")), ("uuid", ("123e4567-e89b-12d3-a456-426614174000",), ("123e4567",)),
        ("time", ("23:59:59Z", "01:02:03.5+02:00"), ("24:00:00Z", "23:59:59")), ("date-time", ("2024-02-29T00:00:00Z",), ("2024-02-30T00:00:00Z", "2024-02-29")),
    ]  # fmt: skip
    for name, good, bad in formats:
        yield Case("format", typed("string", format=name), good, (*bad, 5), validator=None)
        yield Case("format", {"type": ["null", "string"], "format": name}, (None, *good), bad, validator=None)
    for name in ("regex", "idn-email", "uri-template", "int32", "nonsense"):
        yield Case("format", typed("string", format=name), verdict=LOOSENED)


def patterned() -> Iterator[Case]:
    closed, least = {"additionalProperties": False}, {"minimum": 3}
    cases: list[tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]] = [
        (obj({"xa": INT}, patternProperties={"^x": least}), ({"xa": 3, "x": 4, "xab": 5}, {"xb": 3}), ({"xa": 2}, {"xb": 2}, {"y": 5}, {"x\n": 1})),
        ({"patternProperties": {"^a": INT, "b$": typed(["integer", "string"])}, **closed}, ({"a": 1, "b": "x", "ab": 1},), ({"ab": "x"}, {"a": "x"}, {"c": 1})),
        ({"patternProperties": {"^x": INT}, "additionalProperties": STR}, ({"x": 1, "y": "z"},), ({"x": "z"}, {"y": 1})),
        ({"patternProperties": {"^ab+?$": INT}, **closed}, ({"abb": 1},), ({"a": 1}, {"ab": "x"})),
    ]  # fmt: skip
    for schema, good, bad in cases:
        yield Case("patternProperties", open_obj(**schema), good, bad)
    yield Case("propertyNames", open_obj(propertyNames={"pattern": "^ab+?$"}), ({"abb": 1},), ({"a": 1},))
    for given in (
        {"properties": {"a": INT}, "patternProperties": {r"(a)\1": INT}},
        {"patternProperties": dict.fromkeys("abcde", INT)},
    ):
        yield Case("patternProperties", open_obj(**given), verdict=LOOSENED)  # fmt: skip
