"""Random JSON schemas whose values are short."""

from __future__ import annotations

from random import Random
from typing import Any

_WORDS = ("a", "on", "kind", "x1", "value", "it is", 'say "no"')


def random_schema(random: Random) -> dict[str, Any]:
    """A schema of scalars, enums, arrays, objects and alternatives, some of them referred to."""
    if random.random() < 0.2:
        items, parts = {"$ref": "#/$defs/part"}, {"part": _any(random, 1)}
        return {"$defs": parts, "type": "array", "items": items, "maxItems": 2}
    return _any(random, 2)


def _any(random: Random, depth: int) -> dict[str, Any]:
    kinds = [_integer, _number, _string, _pattern, _scalar, _enum]
    kinds += [_array, _object, _object, _alternatives] if depth else []
    return random.choice(kinds)(random, depth - 1)


def _integer(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 500)}


def _number(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": random.choice([1, 2.5, 1000])}


def _string(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 6)}


def _pattern(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": random.choice(["^[a-c]{2,4}$", "^(yes|no)$", "^[0-9]{4}-[0-9]{2}$"])}


def _scalar(random: Random, depth: int) -> dict[str, Any]:
    return {"type": random.choice(["boolean", "null", ["boolean", "null"]])}


def _enum(random: Random, depth: int) -> dict[str, Any]:
    values = [*random.sample(_WORDS, 2), random.randint(0, 99), None, [1, "two"], {"three": 3}]
    return random.choice([{"enum": random.sample(values, 3)}, {"const": random.choice(values)}])


def _array(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 2)
    return {
        "type": "array",
        "items": _any(random, depth),
        "minItems": least,
        "maxItems": least + random.randint(0, 2),
    }


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(_WORDS, random.randint(0, 4))
    properties = {name: _any(random, depth) for name in names}
    required = random.sample(names, random.randint(0, len(names)))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _alternatives(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(random, depth) for _ in range(random.randint(1, 3))]}
