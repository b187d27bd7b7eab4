"""Whether a JSON schema has a finite value at all: a model that follows one without would never come to an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_MOST_LEVELS = 64
_PREFIX = "structured_outputs.json"


def check_schema(schema: Any) -> None:
    """Raise ValueError for a schema, as `json.loads` returns it, that is nested deeper than 64 levels, or whose values
    all contain themselves. What else may be wrong, its compiler says."""
    if any(level > _MOST_LEVELS for level, _ in _nodes(schema)):
        raise ValueError(f"{_PREFIX} is nested deeper than {_MOST_LEVELS} levels: move its inner parts to $defs")
    if not _Finite(schema).root:
        raise ValueError(
            f"{_PREFIX} has no finite value: a required part of it contains itself through $ref, without an end. "
            "Leave the property out of 'required', or allow null in its place"
        )


def _nodes(root: Any) -> Iterator[tuple[int, Any]]:
    """The level and the value of each part of a schema, the outer ones first."""
    queue = [(1, root)]
    for level, node in queue:
        yield level, node
        if isinstance(node, dict):
            queue += [(level + 1, part) for part in node.values()]
        elif isinstance(node, list):
            queue += [(level + 1, part) for part in node]


class _Finite:
    """Which parts of a schema have a finite value: the least set that is closed under their rules. What is not
    understood counts as finite."""

    def __init__(self, schema: Any):
        self._schema = schema
        self._known: set[int] = set()  # ids of the parts that have one
        parts = [node for _, node in _nodes(schema) if isinstance(node, dict)][::-1]
        before = -1
        while before < len(self._known):
            before = len(self._known)
            self._known |= {id(part) for part in parts if id(part) not in self._known and self._rule(part)}

    @property
    def root(self) -> bool:
        return self._is(self._schema)

    def _is(self, schema: Any) -> bool:
        return not isinstance(schema, dict) or id(schema) in self._known

    def _rule(self, schema: dict[str, Any]) -> bool:
        if "const" in schema or "enum" in schema:
            return True
        if "$ref" in schema and not self._is(self._target(schema["$ref"])):
            return False
        every, some = _list(schema, "allOf"), [_list(schema, name) for name in ("anyOf", "oneOf")]
        if not all(map(self._is, every)) or not all(any(map(self._is, options)) for options in some if options):
            return False
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if any(kind not in ("object", "array") for kind in kinds):
            return True
        return ("object" in kinds and self._object(schema)) or ("array" in kinds and self._array(schema))

    def _object(self, schema: dict[str, Any]) -> bool:
        properties, required = schema.get("properties"), _list(schema, "required")
        if not isinstance(properties, dict):
            return True
        return all(self._is(properties.get(name)) for name in required if isinstance(name, str))

    def _array(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        least = least if isinstance(least, int) else 0
        first = _list(schema, "prefixItems")
        return all(map(self._is, first[:least])) and (least <= len(first) or self._is(schema.get("items")))

    def _target(self, reference: Any) -> Any:
        """What a reference within the schema stands for; None for any other."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        node = self._schema
        for step in unquote(reference[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict):
                node = node.get(key)
            else:
                return None
        return node


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
