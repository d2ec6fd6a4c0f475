"""References inside a JSON schema that lead nowhere: no value could be written for them."""

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_REFERENCES = 256  # schemas beyond these are left to the grammar's compiler, which has limits of its own
_MOST_MEMBERS = 10_000


def find_empty_reference(schema: Any) -> str | None:
    """A `$ref` that comes back to itself before any value is complete; None if there is none. (A list whose items are
    such lists is fine: it can be empty.) References to elsewhere are not followed."""
    targets = {reference: _resolve(reference, schema) for reference in _references(schema)}
    combined = (part.get(name) for part in _objects(schema) for name in _COMBINED)
    num_members = sum(len(members) for members in combined if isinstance(members, list))
    if len(targets) > _MOST_REFERENCES or num_members > _MOST_MEMBERS:
        return None
    filled: set[str] = set()  # references known to have a value; grows until nothing is added
    while True:
        found = {one for one, target in targets.items() if one not in filled and _has_value(target, filled, targets)}
        if not found:
            return next((one for one in targets if one not in filled), None)
        filled |= found


_COMBINED = ("anyOf", "oneOf", "allOf")


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            yield part
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def _references(schema: Any) -> list[str]:
    """Those within the schema, each once."""
    found = (part.get("$ref") for part in _objects(schema))
    return list(dict.fromkeys(one for one in found if isinstance(one, str) and one.startswith("#")))


def _has_value(part: Any, filled: set[str], known: Mapping[str, Any]) -> bool:
    """Whether something can be written for this part, given the references that have a value."""
    if not isinstance(part, Mapping):
        return True
    reference = part.get("$ref")
    if isinstance(reference, str) and reference in known and reference not in filled:
        return False
    for name in _COMBINED:
        members = part.get(name)
        if isinstance(members, list) and members:
            have = (_has_value(one, filled, known) for one in members)
            if not (all(have) if name == "allOf" else any(have)):
                return False
    return all(_has_value(one, filled, known) for one in _needed(part))


def _needed(part: Mapping[str, Any]) -> Iterator[Any]:
    """What every value of an object or an array holds: required properties, the first items."""
    properties, required = part.get("properties"), part.get("required")
    if part.get("type") in ("object", ["object"]) and isinstance(properties, Mapping) and isinstance(required, list):
        yield from (properties[name] for name in required if isinstance(name, str) and name in properties)
    least = part.get("minItems")
    if part.get("type") in ("array", ["array"]) and isinstance(least, int) and least > 0:
        first = part.get("prefixItems")
        given = first[:least] if isinstance(first, list) else []
        yield from given
        if len(given) < least:
            yield part.get("items")


def _resolve(reference: str, root: Any) -> Any:
    """What a reference within the schema means; None for one to nothing, which the grammar's compiler names."""
    place = root
    for name in reference[1:].split("/")[1:]:
        if not isinstance(place, Mapping):
            return None
        place = place.get(name.replace("~1", "/").replace("~0", "~"))
    return place
