"""JSON schemas: of each keyword it is told whether it is enforced, and what is enforced is what the schema says."""

import json
import random
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.changes import GRAMMARS
from support.gbnf import Grammar

pytest.importorskip("jsonschema")

from support.json_schemas import CASES
from support.schema_case import ENFORCED, LOOSENED, REFUSED, Case

from pyllama_kvflash.json_schema import SchemaError, check, check_arguments, json_grammar
from pyllama_kvflash.json_schema.keywords import ANNOTATIONS, KEYWORDS

pytestmark = pytest.mark.native


def of(verdict: str) -> pytest.MarkDecorator:
    found = [(i, case) for i, case in enumerate(CASES) if case.verdict == verdict]
    return pytest.mark.parametrize("case", [c for _, c in found], ids=[f"{i}-{c.keyword}" for i, c in found])


@cache
def grammar(schema: str) -> Grammar:
    return Grammar(check(json.loads(schema)).grammar())


def takes(schema: Any, value: Any) -> set[bool]:
    """Whether the grammar of a schema takes a value: as JSON without spaces, and with one after each comma and colon."""
    texts = [json.dumps(value, ensure_ascii=False, separators=how) for how in ((",", ":"), (", ", ": "))]
    return {grammar(json.dumps(schema)).takes(text) for text in texts}


@of(ENFORCED)
def test_what_is_enforced_is_what_the_schema_says(case: Case) -> None:
    """Of the values that are listed, and of some that the grammar makes; jsonschema is the judge of all."""
    checked = check(case.schema, strict=True)
    assert not checked.loosened
    for value in case.good:
        assert True in takes(case.schema, value), value  # a value that is listed is written in one way
    for value in case.bad:
        assert takes(case.schema, value) == {False}, value
    if case.validator is not None:
        judge = case.validator(case.schema)
        assert all(judge.is_valid(value) for value in case.good), "the case is wrong"
        assert not any(judge.is_valid(value) for value in case.bad), "the case is wrong"
        rng = random.Random(1)
        for _ in range(4):
            text = grammar(json.dumps(case.schema)).made(rng)
            assert judge.is_valid(json.loads(text)), text


@of(LOOSENED)
def test_what_is_not_enforced_is_named(case: Case) -> None:
    checked = check(case.schema)
    named = [one for one in checked.loosened if one.keyword == case.keyword]
    assert named
    assert f"/{case.keyword} is not enforced: " in str(named[0])
    assert grammar(json.dumps(case.schema)).made(random.Random(1)) is not None
    if named[0].annotation:
        assert check(case.schema, strict=True).loosened == checked.loosened
    else:
        with pytest.raises(SchemaError, match="it cannot be enforced: ") as error:
            check(case.schema, strict=True)
        assert error.value.keyword in {one.keyword for one in checked.loosened}


@of(REFUSED)
def test_what_is_not_a_schema_is_refused_by_name(case: Case) -> None:
    with pytest.raises(SchemaError) as error:
        check(case.schema)
    assert error.value.keyword == case.keyword
    assert str(error.value).startswith(f"the JSON schema cannot be used: {error.value.pointer}")
    assert "grammar" not in str(error.value)


def test_arguments_of_any_schema_can_be_called() -> None:
    """What cannot be used of a tool's schema is free, and is named."""
    for case in CASES:
        checked = check_arguments(case.schema)
        assert bool(checked.loosened) or case.verdict != REFUSED, case
        made = json.loads(Grammar(checked.grammar()).made(random.Random(1)))
        assert isinstance(made, dict), case
        assert {argument.name for argument in checked.arguments().of} >= made.keys() or not checked.arguments().exact


def test_there_is_a_case_of_each_keyword() -> None:
    assert len(CASES) >= 500
    of_schemas: set[str] = set()
    todo = [case.schema for case in CASES]
    while todo:
        node = todo.pop()
        of_schemas |= node.keys() if isinstance(node, dict) else set()
        todo += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    rest = {"$recursiveAnchor", "$vocabulary", "contentSchema", "id", "discriminator", "xml", "externalDocs"}
    rest |= {"propertyOrdering", "enumNames", "enumDescriptions", "markdownDescription", "errorMessage"}
    rest |= {"defaultSnippets", "deprecationMessage"}
    assert (KEYWORDS | ANNOTATIONS) - of_schemas == rest
    assert not check({"type": "integer", "$recursiveAnchor": True, **dict.fromkeys(rest & ANNOTATIONS)}).loosened


def test_an_anchor_of_recursion_below_the_root_is_named() -> None:
    schema = {"$defs": {"a": {"$recursiveAnchor": True, "type": "integer"}}, "$ref": "#/$defs/a"}
    assert [str(one) for one in check(schema).loosened] == [
        "#/$defs/a/$recursiveAnchor is not enforced: it is not at the root"
    ]


def test_what_python_says_of_a_schema() -> None:
    said: list[str] = []
    json_grammar(
        '{"type": "array", "uniqueItems": true, "items": {"format": "regex", "type": "string"}}', note=said.append
    )
    assert said == [
        "#/uniqueItems is not enforced: items are not compared",
        "#/items/format is not enforced: the format 'regex' is an annotation",
    ]
    with pytest.warns(UserWarning, match="#/uniqueItems is not enforced"):
        json_grammar('{"type": "array", "uniqueItems": true}')
    with pytest.raises(SchemaError, match="#/properties/a~1b/contains: it cannot be enforced") as error:
        json_grammar('{"properties": {"a/b": {"contains": {"type": "null"}}}}', strict=True)
    assert (error.value.pointer, error.value.keyword) == ("#/properties/a~1b", "contains")


@pytest.mark.parametrize("text", ["", "{", "[1", '{"a": NaN}', "[" * 100_000])
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(
        SchemaError, match=r"^the JSON schema cannot be used: #: it (is not JSON: |is nested too deeply)"
    ):
        json_grammar(text)


@pytest.mark.parametrize("value", ["1e999", '{"a": [-1e999]}'])
def test_numbers_that_json_does_not_have(value: str) -> None:
    """They would be written as Infinity, which no parser of JSON takes."""
    for schema in (f'{{"const": {value}}}', f'{{"enum": [1, {value}]}}'):
        with pytest.raises(SchemaError, match="it has NaN or an infinity, which JSON does not have"):
            json_grammar(schema)
    assert [
        loosened.keyword for loosened in check_arguments({"properties": {"a": {"const": float("nan")}}}).loosened
    ] == ["const"]


@pytest.mark.parametrize("uri", ["http://[b", "//[", "http://a]b/", "http://\uff45x\u2100/"])
def test_names_that_are_no_uris(uri: str) -> None:
    """A reference that urllib cannot join names nothing; as an $id it names its schema."""
    with pytest.raises(SchemaError, match=r"#/\$ref: .* is not in this document"):
        check({"$id": "http://x/y", "$ref": uri})
    within = {"a": {"$id": uri, "const": 3}}
    assert json_grammar(json.dumps({"$ref": uri, "$defs": within})) == json_grammar(
        json.dumps({"const": 3, "$defs": within})
    )


#
# what JSON can write in several ways
#


def test_other_properties_do_not_write_a_named_one_with_escapes() -> None:
    """They would overrule it: of two properties of a name, the last one counts."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "é\n": False},
        "additionalProperties": {"type": "integer"},
    }
    known = grammar(json.dumps(schema))
    assert known.takes('{"a":"x","b":1,"a2":2,"":3}')
    for text in (r'{"\u0061":1}', r'{"a":"x","\u0061":1}', r'{"\u00e9\n":1}', r'{"é\u000a":1}', r'{"\":1}', '{"a":1}'):
        assert not known.takes(text), text


def test_white_space_of_a_pattern_is_that_of_ecmascript() -> None:
    space, other = (grammar(json.dumps({"type": "string", "pattern": pattern})) for pattern in (r"^\s$", r"^\S$"))
    for char in " \u00a0\u1680\u2003\u2028\u202f\u205f\u3000\ufeff":
        assert (space.takes(f'"{char}"'), other.takes(f'"{char}"')) == (True, False), hex(ord(char))
    for char in "x\u200b\u2060é":
        assert (space.takes(f'"{char}"'), other.takes(f'"{char}"')) == (False, True), hex(ord(char))


def test_an_escaped_pair_is_one_character() -> None:
    one = grammar('{"type": "string", "minLength": 1, "maxLength": 1}')
    for text in ('"a"', r'"\n"', r'"\u00e9"', r'"\ud83d\ude00"', '"😀"', r'"\/"'):
        assert one.takes(text), text
    for text in ('""', r'"\ud83d"', r'"\ude00"', '"\n"', r'"\x"', '"ab"'):
        assert not one.takes(text), text


@given(
    st.tuples(st.integers(-3000, 3000), st.integers(-3000, 3000)),
    st.integers(0, 3),
    st.integers(-4000, 4000),
    st.booleans(),
    st.booleans(),
)
def test_ranges_of_numbers(ends: tuple[int, int], places: int, number: int, low_open: bool, high_open: bool) -> None:
    """All numbers with up to three digits after the point."""
    low, high = (end / 10**places for end in sorted(ends))
    value = number / 10**places
    bounds = {"exclusiveMinimum" if low_open else "minimum": low, "exclusiveMaximum" if high_open else "maximum": high}
    inside = (low < value if low_open else low <= value) and (value < high if high_open else value <= high)
    for kind in ("number", "integer"):
        try:
            taken = takes({"type": kind, **bounds}, int(value) if value == int(value) else value) == {True}
        except SchemaError:
            taken = False  # there is none
        assert taken == (inside and (kind == "number" or value == int(value)))


#
# limits
#


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": list(range(20_001))}, "#/enum: it has 20,001 values, and may have 20,000"),
        ({"anyOf": [{"const": i} for i in range(20_001)]}, "#: it has more than 20,000 schemas"),
        ({"properties": {"n" * 1001: {}}}, "#/properties: a name in it has more than 1,000 characters"),
        ({"properties": {f"p{i}": {"maxItems": 500 + i, "items": {"type": "null"}} for i in range(200)}}, "#: its lengths"),
    ],
)  # fmt: skip
def test_large_schemas_are_refused(schema: Any, words: str) -> None:
    with pytest.raises(SchemaError) as error:
        check(schema)
    assert words in str(error.value)
    assert check_arguments(schema).loosened


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(101):
        schema = {"type": "array", "items": schema}
    with pytest.raises(SchemaError, match="it is more than 100 schemas deep: use \\$ref"):
        check(schema)


LONG_CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"type": "null"}}
TWICE = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {"type": "string"}}


@pytest.mark.nightly(GRAMMARS)
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$defs": LONG_CHAIN, "$ref": "#/$defs/d0", "enum": [None]}, "#: its references are too deep in each other"),
        ({"$defs": TWICE, "$ref": "#/$defs/d0", "enum": ["a"]}, "#: it takes too long to put together"),
        ({"enum": list(range(20_000)), "anyOf": [{"minimum": i} for i in range(400)]}, "#: it takes too long to put together"),
        ({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(3000)]}, "#: it takes too long"),
    ],
    ids=["deep", "twice", "values", "branches"],
)  # fmt: skip
def test_what_would_take_for_ever_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(SchemaError) as error:
        check(schema)
    assert words in str(error.value)
    assert [words[3:] in one.why for one in check_arguments(schema).loosened] == [True]


def test_combinations_have_a_limit() -> None:
    """2**12 of them, of which each is another schema: the last ones are left out, and named."""
    options = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(12)]
    checked = check({"type": "object", "allOf": options})
    assert {one.keyword for one in checked.loosened} == {"anyOf"}
    assert all("more than 500 combinations" in one.why for one in checked.loosened)


@pytest.mark.parametrize("required", [0, 500])
def test_hundreds_of_optional_properties(required: int) -> None:
    """The grammar grows with their number, and not with its square."""
    names = [f"property_{i}" for i in range(1000)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": names[:required],
    }
    text = check(schema).grammar()
    assert len(text) < 250 * len(names)
    assert Grammar(text).takes(json.dumps(dict.fromkeys(names[:required] + names[900::7], 1)))


def test_a_regular_expression_that_takes_for_ever_is_not_tried() -> None:
    """Back references are tried by Python's, which would; all others take a time that grows with the text."""
    start = time.process_time()
    listed = {"enum": ["a" * 40 + "b", "aa"], "pattern": "^(a+)+$"}
    assert grammar(json.dumps(listed)).takes('"aa"')
    assert not grammar(json.dumps({**listed, "pattern": "^(a|aa)+$"})).takes(json.dumps("a" * 40 + "b"))
    assert {one.keyword for one in check({**listed, "pattern": r"^(?=a)(a+)+\1$"}).loosened} == {"pattern"}
    assert time.process_time() - start < 5.0


def test_what_a_place_lacks_is_not_named() -> None:
    """`if` is taken apart into `not`, which the schema does not have."""
    schema = {"type": ["string", "number"], "if": {"const": "a"}, "then": {"minLength": 1}}
    assert [(one.pointer, one.keyword) for one in check(schema).loosened] == [("#", "if")]


@pytest.mark.parametrize("first", ["$ref", "allOf", "properties"])
def test_properties_come_in_the_order_of_the_schema(first: str) -> None:
    base = {"$ref": "#/$defs/base"}
    parts = {"$ref": base, "allOf": {"allOf": [base, {"properties": {"c": {}}}]}, "properties": {}}[first]
    schema = {"$defs": {"base": {"properties": {"a": {}}}}, **parts, "type": "object", "properties": {"b": {}}}
    schema |= {"allOf": [base]} if first == "properties" else {}
    order = {"$ref": "ab", "allOf": "acb", "properties": "ba"}[first]
    assert True in takes(schema, dict.fromkeys(order, 1))
    assert takes(schema, dict.fromkeys(reversed(order), 1)) == {False}


def test_bounds_that_are_too_long_leave_the_others() -> None:
    schema = {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 9223372036854775807}
    assert [one.keyword for one in check(schema).loosened] == ["maximum"]
    for value, is_taken in ((0.25, True), (0.001, False), (-1, False), (5, True)):
        assert takes(schema, value) == {is_taken}, value


@pytest.mark.parametrize(("kind", "step", "high"), [("integer", 7, 6), ("number", 0.5, 0.4), ("integer", 2.5, 4)])
def test_a_range_without_multiples_is_refused(kind: str, step: float, high: float) -> None:
    schema = {"type": kind, "multipleOf": step, "minimum": 0.1, "maximum": high}
    with pytest.raises(SchemaError, match="no value meets it"):
        check(schema)
    assert takes({"anyOf": [schema, {"type": "null"}]}, None) == {True}
