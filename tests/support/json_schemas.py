"""Schemas over all keywords, each with what comes of it, texts of it and other texts."""

import itertools
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft4Validator, Draft7Validator, Draft201909Validator

from support.schema_case import (
    BOOL,
    ENFORCED,
    INT,
    LOOSENED,
    NUM,
    ONE_OF_EACH,
    REFUSED,
    STR,
    Case,
    obj,
    open_obj,
    typed,
)
from support.string_schemas import patterned, strings


def _types() -> Iterator[Case]:
    for n in (1, 2):
        for kinds in itertools.combinations(ONE_OF_EACH, n):
            good = [v for kind in kinds for v in ONE_OF_EACH[kind]]
            bad = [v for kind, values in ONE_OF_EACH.items() if kind not in kinds for v in values
                   if not (isinstance(v, int) and not isinstance(v, bool) and {"integer", "number"} & set(kinds))]  # fmt: skip
            yield Case("type", {"type": kinds[0] if n == 1 else list(kinds)}, tuple(good), tuple(bad))
    yield Case("type", {"type": ["string", "null"], "enum": ["a", None]}, ("a", None), ("b", 0))
    yield Case("nullable", {"type": "string", "nullable": True}, ("a", None), (1,), validator=None)
    for bad_type in ("any", "String", 5, None, [], ["string", "float"], {}):
        yield Case("type", {"type": bad_type}, verdict=REFUSED)


def _values() -> Iterator[Case]:
    values = [None, True, False, 0, 1, -1, 2.5, "", "a", 'q"\\\n', "ü😀", [], [1, "b"], {}, {"a": [None]}]
    for i, value in enumerate(values):
        others = tuple(v for j, v in enumerate(values) if j != i)
        yield Case("const", {"const": value}, (value,), others)
        yield Case("enum", {"enum": [value, "more"]}, (value, "more"), others)
        yield Case("enum", obj({"x": {"enum": [value]}}, "x"), ({"x": value},), ({}, {"x": "other"}))
    yield Case("enum", {"enum": list(range(200))}, (0, 150, 199), (200, -1, "0"))
    yield Case("enum", {"enum": []}, verdict=REFUSED)
    yield Case("enum", {"enum": "a"}, verdict=REFUSED)
    yield Case("enum", {"enum": ["a"], "type": "integer"}, verdict=REFUSED)
    beside: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"type": "integer"}, (1, 12, 0)), ({"type": ["string", "null"]}, ("a", "abc", None)), ({"minimum": 1}, (1, 12, 1.5, "a", "abc", None)),
        ({"maximum": 1.5, "type": "number"}, (1, 0, 1.5)), ({"minLength": 2, "type": "string"}, ("abc",)), ({"not": {"const": "a"}, "type": "string"}, ("abc",)),
        ({"multipleOf": 4, "type": "number"}, (12, 0)), ({"pattern": "^a$", "type": "string"}, ("a",)), ({"type": "array"}, ([], [1], [1, 1], [1, 2])),
        ({"if": {"minimum": 1}, "then": {"minimum": 12}, "type": "integer"}, (12, 0)),
        ({"oneOf": [{"minimum": 1}, {"maximum": 1.5}], "type": "number"}, (12, 0)), ({"anyOf": [{"minimum": 12}, {"type": "null"}]}, (12, "a", None)),
        ({"allOf": [{"type": "number"}, {"exclusiveMinimum": 1}]}, (12, 1.5)),
        ({"not": {"type": ["number", "string"]}}, (None, [], {"k": 1})),
    ]  # fmt: skip
    listed = [1, 12, 0, 1.5, "a", "abc", None, [], [1], [1, 1], [1, 2], {}, {"k": 1}]
    for more, kept in beside:
        some = tuple(v for v in kept if v in listed)
        gone = (
            tuple(v for v in listed if v not in kept)
            if "anyOf" not in more and "minimum" not in more and list(more) != ["not"]
            else ()
        )
        yield Case(next(iter(more)), {"enum": listed, **more}, some, gone)
    for keyword, value in [
        ("items", INT), ("maxItems", 1), ("uniqueItems", True), ("contains", INT), ("required", ["k"]), ("minProperties", 1), ("dependentRequired", {"k": ["j"]}),
    ]:  # fmt: skip
        yield Case(keyword, {"enum": listed, keyword: value}, verdict=LOOSENED)


def _numbers() -> Iterator[Case]:
    for low, high in [(0, 0), (0, 9), (1, 10), (-3, 3), (-20, -11), (7, 1234), (99, 101), (-1000, 5), (0, 10**9)]:
        some, outside = (low, high, (low + high) // 2), (low - 1, high + 1)
        yield Case("minimum", typed("integer", minimum=low, maximum=high), some, (*outside, low + 0.5, "1"))
        yield Case(
            "exclusiveMinimum", typed("integer", exclusiveMinimum=low - 1, exclusiveMaximum=high + 1), some, outside
        )
        yield Case("minimum", typed("integer", minimum=low), (low, high + 3), (low - 1,))
        yield Case("maximum", typed("integer", maximum=high), (high, low - 3), (high + 1,))
        yield Case(
            "minimum",
            typed("number", minimum=low, maximum=high),
            (low, high, low + (high - low) / 4),
            (low - 0.5, high + 0.125, low - 1),
        )
        open_ = typed("number", exclusiveMinimum=low, exclusiveMaximum=high + 1)
        yield Case("exclusiveMaximum", open_, (low + 0.5, high + 0.5), (low, high + 1, low - 0.25))
        yield Case(
            "exclusiveMinimum",
            {"minimum": low, "exclusiveMinimum": True, "type": "integer"},
            (low + 1,),
            (low,),
            validator=Draft4Validator,
        )
    for low, high in [
        (0.5, 0.75),
        (-1.25, 1.5),
        (0.001, 0.002),
        (9.99, 10.01),
        (-0.5, -0.125),
        (1.5, 1.5),
        (99.9, 1000.1),
    ]:
        yield Case(
            "minimum",
            typed("number", minimum=low, maximum=high),
            (low, high, (low + high) / 2),
            (low - 0.001, high + 0.001, low - 1),
        )
        yield Case("minimum", typed("number", minimum=low), (low, high + 5), (low - 0.001,))
        yield Case("maximum", typed("number", maximum=high), (high, low - 5), (high + 0.001,))
        yield Case("minimum", {"type": ["number", "null"], "minimum": low}, (None, low), (low - 1, "a"))
        yield Case("minimum", {"minimum": low, "maximum": high + 2}, (low + 1,), (low - 0.001,))
    yield Case("minimum", typed("integer", minimum=5, maximum=3), verdict=REFUSED)
    yield Case("minimum", obj({"p": typed("number", minimum=1.5, maximum=1)}), verdict=REFUSED)
    yield Case("", typed("integer", minimum=0.25, maximum=0.75), verdict=REFUSED)
    for kind in ("number", "integer"):
        yield Case("", {"type": kind, "allOf": [{"maximum": 1}, {"minimum": 20}]}, verdict=REFUSED)
        yield Case("", typed(kind, exclusiveMinimum=1, maximum=1), verdict=REFUSED)
    yield Case("minimum", typed("number", minimum="1"), verdict=REFUSED)
    long = typed("number", minimum=0.12345678901234567, maximum=0.22345678901234567)
    yield Case("minimum", long, (0.12345678901235, 0.2234567890123), (0.123456789012345, 0.2234567890124))
    yield Case("minimum", typed("number", minimum=10**15), verdict=LOOSENED)
    yield Case("maximum", typed("number", multipleOf=0.01, minimum=0, maximum=9223372036854775807), verdict=LOOSENED)
    yield Case(
        "multipleOf",
        typed("number", multipleOf=0.01, minimum=0.005, exclusiveMaximum=0.025),
        (0.01, 0.02),
        (0, 0.015, 0.03),
        validator=None,
    )
    for step, low, high in [(3, 0, 30), (5, -20, 20), (7, 0, 50), (100, 0, 900), (0.5, 0, 4), (0.25, -1, 1)]:
        kind, some = "integer" if isinstance(step, int) else "number", int(step * (1 if step >= 1 else 1 / step))
        yield Case(
            "multipleOf",
            typed(kind, multipleOf=step, minimum=low, maximum=high),
            (some, some - step),
            (some + 1 if step >= 1 else 0.3, high + step),
        )
        yield Case("multipleOf", typed(kind, multipleOf=step), verdict=LOOSENED)
    yield Case("multipleOf", typed("number", multipleOf=1), (3, -2), (0.5,))
    yield Case(
        "multipleOf", typed("number", multipleOf=0.01, minimum=0), (3, 0.5, 19.99), (0.001, -1), validator=None
    )  # which divides floats
    yield Case("multipleOf", typed("integer", multipleOf=0.5), (3,), (0.5,))
    yield Case(
        "multipleOf",
        {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer", "minimum": 1, "maximum": 30},
        (12, 24),
        (4, 6, 18),
    )
    yield Case("multipleOf", typed("number", multipleOf=0), verdict=REFUSED)


def _arrays() -> Iterator[Case]:
    for low, high in [(0, 0), (0, 1), (1, 1), (1, 3), (2, 2), (0, 600)]:
        items = {"type": "array", "items": INT, "minItems": low, "maxItems": high}
        yield Case(
            "minItems",
            items,
            ([1] * low, [2] * high),
            (*([[1] * (low - 1)] if low else []), [1] * (high + 1), ["a"], {}),
        )
        yield Case("maxItems", typed("array", maxItems=high), ([], [None] * high), ([None] * (high + 1),))
        yield Case(
            "minItems", typed("array", minItems=low), ([0] * low, [0] * (low + 2)), ([0] * (low - 1) if low else 5,)
        )
    for kind, values in ONE_OF_EACH.items():
        others = [v for other, vs in ONE_OF_EACH.items() if other not in (kind, "integer", "number") for v in vs]
        yield Case("items", {"items": typed(kind)}, ([], list(values)), tuple([*values, o] for o in others))
        first = typed("array", prefixItems=[typed(kind), STR], items=False)
        yield Case(
            "prefixItems",
            first,
            ([values[0], "x"],),
            ([values[0], 5], [values[0], "x", 1], *([o, "x"] for o in others)),
        )
        yield Case(
            "items",
            typed("array", prefixItems=[BOOL], items=typed(kind)),
            ([True], [False, *values]),
            (["x"], *([True, o] for o in others)),
        )
        yield Case("additionalItems", typed("array", items=[BOOL], additionalItems=typed(kind)), ([True, *values],), tuple([True, o] for o in others),
                   validator=Draft7Validator)  # fmt: skip
    yield Case("items", typed("array", items=False), ([],), ([1],))
    yield Case("items", typed("array", items=True, maxItems=1), ([], [{}]), ([1, 2],))
    yield Case("minItems", typed("array", prefixItems=[INT, STR], minItems=0), ([], [1], [1, "a"]), (["a"], [1, 2]))
    yield Case("maxItems", typed("array", prefixItems=[INT, STR], maxItems=1, minItems=0), ([], [1]), (["a"], [1, "a"]))
    yield Case("prefixItems", typed("array", prefixItems=[INT, False], minItems=0), ([], [1]), ([1, 2],))
    yield Case("items", typed("array", items=[INT, STR]), ([1, "a"],), (["a", 1],), validator=Draft7Validator)
    yield Case("unevaluatedItems", typed("array", prefixItems=[INT], unevaluatedItems=False), ([1],), ([1, 2],))
    yield Case("unevaluatedItems", typed("array", prefixItems=[INT], unevaluatedItems=STR), ([1], [1, "a"]), ([1, 2],))
    yield Case(
        "unevaluatedItems", typed("array", allOf=[{"prefixItems": [INT]}], unevaluatedItems=False), ([1],), ([1, 2],)
    )
    yield Case(
        "unevaluatedItems",
        {"allOf": [typed("array", unevaluatedItems=False), {"prefixItems": [INT]}]},
        verdict=LOOSENED,
    )
    yield Case("unevaluatedItems", typed("array", contains=INT, unevaluatedItems=False), verdict=LOOSENED)
    yield Case("uniqueItems", typed("array", uniqueItems=False, items=INT), ([1, 1],), (["a"],))
    yield Case("uniqueItems", typed("array", uniqueItems=True, maxItems=1), ([1],), ([1, 1],))
    yield Case("uniqueItems", typed("array", uniqueItems=True), verdict=LOOSENED)
    yield Case("contains", typed("array", contains=INT, minContains=0), ([], ["a"]), (5,))
    for more in ({"contains": INT}, {"contains": {"const": 1}, "minContains": 2}, {"contains": INT, "maxContains": 3}):
        for keyword in more:
            yield Case(keyword, typed("array", **more), verdict=LOOSENED)
    yield Case("minItems", typed("array", minItems=3, maxItems=1), verdict=REFUSED)
    yield Case("minItems", typed("array", minItems=10**6), verdict=REFUSED)
    yield Case("prefixItems", {"prefixItems": []}, verdict=REFUSED)
    yield Case("", {"items": 5}, verdict=REFUSED)
    yield Case("items", {"items": [INT], "prefixItems": [INT]}, verdict=REFUSED)


def _objects() -> Iterator[Case]:
    names = ["a", "b c", 'q"\\', "ü/~%"]
    for n in range(1, 5):
        for required in ([], names[: n // 2], names[:n]):
            to = obj(dict.fromkeys(names[:n], INT), *required)
            whole = {name: i for i, name in enumerate(names[:n])}
            least = {name: whole[name] for name in required}
            missing = tuple({k: v for k, v in whole.items() if k != gone} for gone in required)
            yield Case("properties", to, (whole, least), (*missing, {**whole, "z": 1}, {**whole, names[0]: "x"}, [], 5))
            yield Case(
                "additionalProperties",
                {**to, "additionalProperties": BOOL},
                (whole, least, {**whole, "z": True}),
                (*missing, {**whole, "z": 1}),
            )
            yield Case(
                "minProperties",
                {**to, "minProperties": n},
                (whole,),
                ({k: whole[k] for k in names[: n - 1]}, {**whole, "z": 1}),
            )
    yield Case("required", open_obj(required=["a"]), ({"a": 1}, {"a": [], "b": 2}), ({}, {"b": 2}))
    yield Case(
        "required", obj({"b": INT}, "a", additionalProperties=STR), ({"b": 1, "a": "x"},), ({"b": 1}, {"b": 1, "a": 2})
    )
    yield Case("", obj({}, "a"), verdict=REFUSED)
    yield Case("required", obj({"a": {"type": "string", "required": True}}), verdict=LOOSENED)
    yield Case("required", {"required": "a"}, verdict=REFUSED)
    for kind, values in ONE_OF_EACH.items():
        yield Case(
            "additionalProperties",
            open_obj(additionalProperties=typed(kind)),
            ({}, *({"k": v, "l": v} for v in values)),
            ([], 5),
        )
        yield Case(
            "properties",
            {"properties": {"a": typed(kind)}},
            ({}, {"a": values[0]}),
            ({"a": 5 if kind in ("string", "null", "array") else "x"},),
        )
        yield Case(
            "propertyNames",
            open_obj(propertyNames={"enum": ["x", "y"]}, additionalProperties=typed(kind)),
            ({}, {"x": values[0]}),
            ({"z": values[0]},),
        )
    yield Case("additionalProperties", open_obj(additionalProperties=False), ({},), ({"a": 1},))
    yield Case(
        "additionalProperties",
        open_obj(properties={"a": STR}, additionalProperties=INT),
        ({"a": "x", "b": 1}, {"ab": 1}),
        ({"a": 1}, {"b": "x"}),
    )
    yield Case("properties", obj({"a": False, "b": True}), ({}, {"b": [1]}), ({"a": 1},))
    yield Case("propertyNames", open_obj(propertyNames={"maxLength": 2}), ({"ab": 1},), ({"abc": 1},))
    yield Case(
        "propertyNames",
        obj({"ab": INT, "abc": INT}, propertyNames={"maxLength": 2}),
        ({"ab": 1},),
        ({"ab": 1, "abc": 1},),
    )
    yield Case("propertyNames", open_obj(propertyNames=False), ({},), ({"a": 1},))
    yield Case("propertyNames", open_obj(propertyNames={"type": "integer"}), ({},), ({"1": 1},))
    named = {**open_obj(properties={"a": INT}, additionalProperties=True), "propertyNames": {"maxLength": 2}}
    yield Case("propertyNames", named, ({"a": 1, "b": "x"}, {"": 1}), ({"a": "x"}, {"abc": 1}))
    named = open_obj(propertyNames={"anyOf": [{"enum": ["a"]}, {"pattern": "^b"}]})
    yield Case("propertyNames", named, ({}, {"a": 1, "b1": 2}, {"b": 1, "a": 2}), ({"c": 1}, {"ab": 1}))
    yield Case(
        "patternProperties",
        obj({"sa": STR, "b": INT}, patternProperties={"^s": {"maxLength": 2}}),
        ({"sa": "xy"},),
        ({"sa": "xyz"}, {"b": "x"}),
    )
    many = obj({letter * 180: INT for letter in "abcdefghijkl"}, additionalProperties=True)
    yield Case("additionalProperties", many, verdict=LOOSENED)
    yield Case("patternProperties", open_obj(patternProperties={"^(?!a)": INT}), verdict=LOOSENED)
    abc = dict.fromkeys("abc", INT)
    yield Case(
        "dependentRequired",
        obj(abc, dependentRequired={"a": ["b"]}),
        ({}, {"b": 1}, {"a": 1, "b": 1}, {"c": 1}),
        ({"a": 1}, {"a": 1, "c": 1}),
    )
    yield Case("dependencies", obj(abc, dependencies={"a": ["b"], "c": {"required": ["a"]}}), ({"b": 1}, {"a": 1, "b": 1, "c": 1}), ({"a": 1}, {"c": 1}),
               validator=Draft7Validator)  # fmt: skip
    yield Case(
        "dependentSchemas",
        obj(abc, dependentSchemas={"a": {"properties": {"b": {"minimum": 5}}}}),
        ({"b": 1}, {"a": 1, "b": 5}),
        ({"a": 1, "b": 1},),
    )
    base = {"$defs": {"base": open_obj(properties={"a": INT})}}
    yield Case("unevaluatedProperties", {**base, **open_obj(allOf=[{"$ref": "#/$defs/base"}], properties={"b": INT}, unevaluatedProperties=False)},
               ({}, {"a": 1, "b": 1}), ({"c": 1}, {"a": "x"}))  # fmt: skip
    yield Case(
        "unevaluatedProperties",
        open_obj(properties={"a": INT}, unevaluatedProperties=STR),
        ({"a": 1, "z": "x"},),
        ({"a": 1, "z": 2},),
    )
    yield Case(
        "unevaluatedProperties",
        {"allOf": [open_obj(unevaluatedProperties=False), open_obj(properties={"a": INT})]},
        verdict=LOOSENED,
    )


def _counted() -> Iterator[Case]:
    for low in (0, 1):
        yield Case("minProperties", open_obj(minProperties=low), ({"a": 1},), (({},) if low else (5,)))
        yield Case(
            "minProperties",
            obj({"a": INT, "b": INT}, minProperties=low),
            ({"a": 1}, {"b": 1}, {"a": 1, "b": 2}),
            (({},) if low else (5,)),
        )
    for high in (0, 1, 2, 3):
        some = {f"k{i}": i for i in range(high + 1)}
        yield Case("maxProperties", open_obj(maxProperties=high), ({}, dict(list(some.items())[:high])), (some,))
    yield Case(
        "maxProperties",
        obj({"a": INT, "b": INT}, minProperties=1, maxProperties=1),
        ({"a": 1}, {"b": 1}),
        ({}, {"a": 1, "b": 2}),
    )
    yield Case(
        "maxProperties",
        obj({"a": INT, "b": INT, "c": INT}, "a", maxProperties=2),
        ({"a": 1}, {"a": 1, "c": 1}),
        ({"a": 1, "b": 2, "c": 3}, {"b": 1}),
    )
    abcd: tuple[Any, ...] = tuple(dict.fromkeys("abcd"[:n], 1) for n in range(5))
    for required in ("", "b"):
        counted = obj(dict.fromkeys("abcd", INT), *required, minProperties=2, maxProperties=3)
        yield Case(
            "minProperties", counted, ({"a": 1, "b": 2}, {"b": 1, "d": 1}, *abcd[2:4]), (*abcd[:2], abcd[4], {"d": 1})
        )
    others = obj({"a": INT, "b": INT}, "b", additionalProperties=True, minProperties=2, maxProperties=3)
    yield Case(
        "maxProperties",
        others,
        ({"a": 1, "b": 1}, {"b": 1, "z": 1}, {"b": 1, "y": 1, "z": 1}),
        ({"b": 1}, {"a": 1}, {"a": 1, "b": 1, "y": 1, "z": 1}),
    )
    many = dict.fromkeys((f"p{i}" for i in range(50)), INT)
    yield Case("maxProperties", obj(many, maxProperties=40), verdict=LOOSENED)
    yield Case("minProperties", open_obj(minProperties=2), verdict=LOOSENED)
    yield Case("minProperties", open_obj(minProperties=3, maxProperties=2), verdict=REFUSED)


def _together() -> Iterator[Case]:
    circle, square = (
        obj({"kind": {"const": "circle"}, "r": NUM}, "kind", "r"),
        obj({"kind": {"const": "square"}, "side": NUM}, "kind", "side"),
    )
    shapes: tuple[Any, ...] = ({"kind": "circle", "r": 1}, {"kind": "square", "side": 2.5})
    wrong: tuple[Any, ...] = ({"kind": "circle", "side": 1}, {"kind": "triangle", "r": 1}, {"kind": "circle"})
    for keyword in ("anyOf", "oneOf"):
        yield Case(keyword, {keyword: [circle, square]}, shapes, wrong)
        yield Case(keyword, typed("array", items={keyword: [circle, square]}), (list(shapes),), ([wrong[0]],))
        for a, b in itertools.combinations(("null", "boolean", "integer", "string", "array", "object"), 2):
            yield Case(keyword, {keyword: [typed(a), typed(b)]}, (*ONE_OF_EACH[a], *ONE_OF_EACH[b]), (1.5,))
        yield Case(keyword, {"type": "object", "properties": {"a": INT, "b": INT}, "additionalProperties": False,
                             keyword: [{"required": ["a"], "properties": {"b": False}}, {"required": ["b"], "properties": {"a": False}}]},
                   ({"a": 1}, {"b": 1}), ({}, {"a": 1, "b": 1}), verdict=ENFORCED if keyword == "anyOf" else LOOSENED)  # fmt: skip
        yield Case(keyword, {keyword: []}, verdict=REFUSED)
        yield Case(keyword, {"type": "string", keyword: [{"enum": ["a", "b"]}, {"enum": ["c"]}]}, ("a", "c"), ("d", 1))
    yield Case("oneOf", {"oneOf": [{"minimum": 0}, {"maximum": 5}], "type": "integer"}, verdict=LOOSENED)
    yield Case("oneOf", {"oneOf": [INT, NUM]}, verdict=LOOSENED)
    yield Case(
        "anyOf",
        obj({"a": INT, "b": INT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        ({"a": 1}, {"b": 1}, {"a": 1, "b": 2}),
        ({},),
    )
    yield Case(
        "anyOf", {"anyOf": [typed("string", maxLength=2), typed("string", minLength=4)]}, ("ab", "abcd"), ("abc",)
    )
    yield Case("allOf", {"allOf": [obj({"a": INT}, "a", additionalProperties=True), {"properties": {"b": STR}, "required": ["b"]}]},
               ({"a": 1, "b": "x"},), ({"a": 1}, {"b": "x"}, {"a": "x", "b": "x"}))  # fmt: skip
    yield Case("allOf", {"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 5}]}, (3, 4, 5), (2, 6, "a"))
    yield Case("allOf", {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, (2, 3), (1, 4))
    yield Case("allOf", {"allOf": [{"anyOf": [INT, STR]}, {"anyOf": [STR, BOOL]}]}, ("a",), (1, True))
    yield Case("", {"allOf": [STR, INT]}, verdict=REFUSED)
    yield Case("allOf", {"allOf": [True, {}, STR]}, ("a",), (1,))
    for kind in ("null", "boolean", "number", "string", "array", "object"):
        bad = list(ONE_OF_EACH[kind])
        good = [
            v
            for other, vs in ONE_OF_EACH.items()
            if other != kind and not (kind == "number" and other == "integer")
            for v in vs
        ]
        yield Case("not", {"not": typed(kind)}, tuple(v for v in good if not (kind == "number" and v == 3)), tuple(bad))
        yield Case("not", {"not": {"not": typed(kind)}}, tuple(bad), tuple(v for v in good if v not in bad))
    yield Case(
        "not",
        obj({"a": INT, "b": INT}, **{"not": {"required": ["a", "b"]}}),
        ({}, {"a": 1}, {"b": 1}),
        ({"a": 1, "b": 1},),
    )
    yield Case("not", {"type": "boolean", "not": {"const": "x"}}, (True,), (1,))
    for sub in (
        {"minimum": 3},
        {"pattern": "a"},
        {"type": "integer"},
        {"const": "a"},
        {"items": INT},
        {"anyOf": [INT, STR]},
    ):
        yield Case("not", {"type": ["string", "number", "array"], "not": sub}, verdict=LOOSENED)
    kinds = {"k": {"enum": ["a", "b"]}, "n": INT, "s": STR}
    test = {"properties": {"k": {"const": "a"}}, "required": ["k"]}
    to = obj(kinds, "k", **{"if": test, "then": {"required": ["n"]}, "else": {"required": ["s"]}})
    yield Case(
        "if",
        to,
        ({"k": "a", "n": 1}, {"k": "b", "s": "x"}, {"k": "a", "n": 1, "s": "x"}),
        ({"k": "a"}, {"k": "b", "n": 1}),
    )
    yield Case(
        "then",
        obj(kinds, **{"if": test, "then": {"required": ["n"]}}),
        ({}, {"k": "b"}, {"k": "a", "n": 1}),
        ({"k": "a"}, {"k": "a", "s": "x"}),
    )
    yield Case("else", obj(kinds, **{"if": test, "else": False}), ({"k": "a"},), ({}, {"k": "b"}))
    yield Case(
        "if", {"if": {"type": "string"}, "then": {"maxLength": 2}, "else": {"type": "null"}}, ("ab", None), ("abc", 5)
    )
    yield Case("if", {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 5}}, verdict=LOOSENED)
    yield Case("then", {"type": "integer", "then": {"minimum": 5}}, (1,), ("a",))


def _references() -> Iterator[Case]:
    tree = obj({"v": INT, "kids": typed("array", items={"$ref": "#"})}, "v")
    yield Case(
        "$ref",
        tree,
        ({"v": 1}, {"v": 1, "kids": [{"v": 2}, {"v": 3, "kids": []}]}),
        ({"v": 1, "kids": [1]}, {"kids": []}),
    )
    for name in ("a", "a/b", "m~n", "p%q", "ü", "x y", 'q"r', ""):
        at = name.replace("~", "~0").replace("/", "~1").replace("%", "%25").replace('"', "%22")
        yield Case("$ref", {"$defs": {name: INT, "other": STR}, "$ref": f"#/$defs/{at}"}, (1,), ("a",))
        yield Case(
            "$ref",
            {"definitions": {name: INT}, "properties": {"x": {"$ref": f"#/definitions/{at}"}}, "required": ["x"]},
            ({"x": 1},),
            ({"x": "a"}, {}),
        )
    yield Case(
        "$ref",
        {"properties": {"a": INT, "b": {"$ref": "#/properties/a"}}, "additionalProperties": False},
        ({"a": 1, "b": 2},),
        ({"b": "x"},),
    )
    yield Case(
        "$ref",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": BOOL}, "$ref": "#/$defs/a"},
        (True,),
        (1,),
    )
    yield Case("$ref", {"$defs": {"n": INT}, "$ref": "#/$defs/n", "minimum": 3, "description": "x"}, (3,), (2, "a"))
    yield Case(
        "$ref",
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"minimum": 2, "type": "number"}, "b": {"maximum": 3}},
        },
        (2, 2.5),
        (1, 4),
    )
    yield Case("$ref", {"prefixItems": [INT, {"$ref": "#/prefixItems/0"}], "items": False}, ([1, 2],), ([1, "a"],))
    yield Case(
        "$ref",
        {"type": "array", "prefixItems": [STR], "items": {"$ref": "#"}},
        (["a"], ["a", ["b"]]),
        ([1], ["a", "b"]),
    )
    yield Case("$ref", {"$defs": {"a": {"x-free": {"type": "integer"}}}, "$ref": "#/$defs/a/x-free"}, (1,), ("a",))
    yield Case(
        "$ref", {"$defs": {"t": True, "f": False}, "anyOf": [{"$ref": "#/$defs/f"}, {"type": "null"}]}, (None,), (1,)
    )
    yield Case("$anchor", {"$defs": {"a": {"$anchor": "here", **INT}}, "$ref": "#here"}, (1,), ("a",))
    yield Case("$id", {"$defs": {"a": {"$id": "urn:example:n", **INT}}, "$ref": "urn:example:n"}, (1,), ("a",))
    yield Case(
        "$id",
        {"$id": "http://example.com/root.json", "$defs": {"a": {"$id": "n.json", **INT}}, "$ref": "n.json"},
        (1,),
        ("a",),
    )
    yield Case(
        "$id",
        {"$id": "http://example.com/t.json", "anyOf": [INT, typed("array", items={"$ref": "t.json"})]},
        (1, [1, [2]]),
        ("a", ["a"]),
    )
    yield Case(
        "$id",
        {
            "$id": "http://example.com/",
            "$defs": {"a": {"$id": "in/", "$defs": {"b": INT}, "$ref": "#/$defs/b"}},
            "$ref": "in/",
        },
        (1,),
        ("a",),
    )
    yield Case(
        "$dynamicRef",
        {"$dynamicAnchor": "n", "anyOf": [INT, typed("array", items={"$dynamicRef": "#n"})]},
        (1, [1, [2]]),
        ("a",),
    )
    yield Case(
        "$recursiveRef",
        {"anyOf": [INT, typed("array", items={"$recursiveRef": "#"})]},
        (1, [[1]]),
        ("a",),
        validator=Draft201909Validator,
    )
    mutual = {
        "$defs": {"a": obj({"b": {"$ref": "#/$defs/b"}}), "b": obj({"a": {"$ref": "#/$defs/a"}})},
        "$ref": "#/$defs/a",
    }
    yield Case("$ref", mutual, ({}, {"b": {"a": {}}}), ({"a": {}}, {"b": {"b": {}}}))
    yield Case(
        "$ref",
        {"anyOf": [{"type": "null"}, obj({"next": {"$ref": "#"}}, "next")]},
        (None, {"next": {"next": None}}),
        ({}, {"next": 1}),
    )
    foreign = (
        "http://example.com/x.json",
        "#/$defs/no",
        "#no",
        "other.json#/a",
        "https://json-schema.org/draft/2020-12/schema",
        "#/$defs/x/type/5",
    )
    for ref in foreign:
        yield Case("$ref", {"$defs": {"x": INT}, "properties": {"p": {"$ref": ref}}}, verdict=REFUSED)
    yield Case("$dynamicRef", {"$dynamicRef": "#n"}, verdict=REFUSED)
    for ever in ({"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
                 obj({"a": {"$ref": "#"}}, "a"), typed("array", items={"$ref": "#"}, minItems=1)):  # fmt: skip
        yield Case("", ever, verdict=REFUSED)


def _annotations() -> Iterator[Case]:
    for keyword, value in [
        ("title", "t"), ("description", "d"), ("default", 5), ("examples", [1]), ("$comment", "c"), ("deprecated", True), ("readOnly", True), ("writeOnly", True),
        ("$schema", "https://json-schema.org/draft/2020-12/schema"), ("contentEncoding", "base64"), ("contentMediaType", "text/html"), ("x-order", 1), ("example", 3),
    ]:  # fmt: skip
        yield Case(keyword, {"type": "string", keyword: value}, ("a",), (1,))
        yield Case(keyword, obj({"p": {"type": "string", keyword: value}}, "p"), ({"p": "a"},), ({"p": 1},))
        yield Case(keyword, {keyword: value}, (1, "a", None), ())
    for keyword in ("minimun", "maxlength", "extends", "divisibleBy", "optional"):
        yield Case(keyword, {"type": "integer", keyword: 3}, verdict=LOOSENED)
    yield Case("", True, (1, "a", {"x": []}), ())
    yield Case("", {}, (1, "a", {"x": []}), ())
    yield Case("", False, verdict=REFUSED)
    for value in (5, "x", None, [1]):
        yield Case("", value, verdict=REFUSED)
        yield Case("", {"properties": {"a": value}}, verdict=REFUSED)


CASES = [
    case
    for group in (
        _types,
        _values,
        _numbers,
        strings,
        _arrays,
        _objects,
        _counted,
        patterned,
        _together,
        _references,
        _annotations,
    )
    for case in group()
]
