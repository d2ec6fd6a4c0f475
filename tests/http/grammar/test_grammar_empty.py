"""Grammars without any text, found for certain; none refused that has one."""

import random

import pytest

from dsv4.http.grammar.empty import is_empty_grammar
from dsv4.http.grammar.schema_refs import find_empty_reference

EMPTY = [
    'start: "a" start',
    'start: start "a"',
    "start: start",
    'start: b\nb: c\nc: b "x" | "y" b',
    'start: ("x" | "y") loop+\nloop: ["z"] loop',
    'start: loop{2,5} // none\nloop: "(" loop ")"',
    'start: loop~2..3\nloop: "a" loop -> again',
    '?start.2: "a"i\n  loop\n\nloop[max_tokens=3]: /b\\/c/ loop  # no\n%ignore / +/',
    'start: "\\"" loop\nloop: <[5]> %json {"type": "string", "pattern": "}"} loop',
]
NOT_EMPTY = [
    'start: ""',
    "start:",
    'start: "a" start | ',
    'start: "(" start ")" | "x"',
    'start: ("x" start)?',
    'start: "a" (start)*',
    'start: ["b" start] "a"',
    "start: start{0,3}",
    "start: start~0..2",
    "start: A\nA: /a/ & ~/b/",
    'start: "x" %lark {\n start: "y"\n}',
    "start: NAME\n%import common.NAME",
    'start: "a".."z" other\nother: "|" | other "#"',
    '%llguidance {}\n\nstart: (Y start)* /[a-z]/{2,5}\n\nY: /[^"\\\\]/\n     | "\\x00"',
    'start: b "->" b\nb: "%json" | /:|\\//',
    'other: other "x"',  # no start: for the compiler to say
    "start: $",
    "start: (",
    "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    'start: start\nstart: "a"',
    'start: _pairs{start, ","}\n_pairs{item, sign}: item sign item',  # a template
    'start: "a" start{' + "0" * 5000 + "}",
]


@pytest.mark.parametrize("lark", EMPTY)
def test_empty(lark):
    assert is_empty_grammar(lark)


@pytest.mark.parametrize("lark", NOT_EMPTY)
def test_not_empty(lark):
    assert not is_empty_grammar(lark)


def test_against_the_shortest_text():
    """Random grammars: a rule is empty if no text of it is as short as the longest shortest one could be."""
    chance = random.Random(0)
    num_empty = 0
    for _ in range(1500):
        names = ["start", *(f"r{number}" for number in range(chance.randint(0, 5)))]
        rules = {name: [_sequence(chance, names) for _ in range(chance.randint(1, 3))] for name in names}
        lark = "\n".join(f"{name}: " + " | ".join(" ".join(map(_shown, one)) for one in rules[name]) for name in names)
        shortest = dict.fromkeys(names, float("inf"))
        for _ in names:
            for name in names:
                sums = [sum(0 if sign in "?*" else shortest.get(part, 1) for part, sign in one) for one in rules[name]]
                shortest[name] = min(shortest[name], *sums)
        is_empty = shortest["start"] == float("inf")
        assert is_empty_grammar(lark) == is_empty, lark
        num_empty += is_empty
    assert 300 < num_empty < 1200


def _sequence(chance, names):
    parts = [*names, *names, '"a"', "/b+/", '("c" | "d")']
    return [
        (chance.choice(parts), chance.choice(["!", "!", "!", "!", "+", "?", "*"])) for _ in range(chance.randint(1, 3))
    ]


def _shown(part):
    text, sign = part
    return text if sign == "!" else text + sign


def test_a_hostile_grammar_costs_little():
    chain = "\n".join(f'r{number}: "x" r{number + 1}' for number in range(90))
    assert is_empty_grammar(f"start: r0\n{chain}\nr90: r0")
    assert not is_empty_grammar(f'start: r0\n{chain}\nr90: "y"')


def defs(**parts):
    return {"$ref": "#/$defs/a", "$defs": parts}


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        ({"anyOf": [{"$ref": "#"}]}, "#"),
        ({"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}}, "#/properties/x"),
        (defs(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}), "#/$defs/a"),
        (defs(a={"allOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}), "#/$defs/a"),
        (defs(a={"oneOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, b={"anyOf": [{"$ref": "#/$defs/a"}]}),
         "#/$defs/a"),
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, None),
        (defs(a={"$ref": "#/$defs/b"}, b={"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}), None),
        (defs(a={"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}), None),
        (defs(a={"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}), "#/$defs/a"),
        (defs(a={"properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}), None),  # may be no object
        (defs(a={"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}), "#/$defs/a"),
        (defs(a={"type": "array", "prefixItems": [{}, {"$ref": "#/$defs/a"}], "minItems": 1}), None),
        (defs(a={"type": "array", "prefixItems": [{}, {"$ref": "#/$defs/a"}], "minItems": 2}), "#/$defs/a"),
        (defs(a={"type": "object", "properties": 3, "required": ["x"]}), None),
        ({"$ref": "https://example.org/schema"}, None),
        ({"$ref": "#/nowhere"}, None),
        ({"$ref": "#/a~1b", "a/b": {"$ref": "#/a~1b"}}, "#/a~1b"),
        ({"$ref": 5, "anyOf": "x", "allOf": 7}, None),
        ({}, None),
        (None, None),
    ],
)  # fmt: skip
def test_empty_references(schema, reference):
    assert find_empty_reference(schema) == reference


def test_a_hostile_schema_costs_little():
    """Every definition mentions all others: paths are innumerable, references are not."""
    names = [f"n{number}" for number in range(250)]
    tangle = {name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names[:39]]} for name in names}
    assert find_empty_reference({"$ref": "#/$defs/n0", "$defs": tangle}) == "#/$defs/n0"
    chain = {f"n{number}": {"$ref": f"#/$defs/n{number + 1}"} for number in range(255)}
    assert find_empty_reference({"$ref": "#/$defs/n0", "$defs": {**chain, "n255": {"type": "string"}}}) is None
