"""References that no value can be written for, against those that have one."""

import pytest

from dsv4.http.grammar.schema_refs import find_empty_reference


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
