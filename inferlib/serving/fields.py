"""Reading the fields of a JSON object one by one, so that none is overlooked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inferlib.option_checks import brief
from inferlib.serving.errors import ApiError, unsupported

_WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", dict: "an object"}
_LARGE = 1e300  # JSON has numbers that no float holds
_WORDS |= {list: "a list"}


class Fields:
    """The fields of an object. Null counts as absent. `close` raises for those that nothing asked for.

    where: what to put before a name in messages, such as "stream_options.".
    """

    def __init__(self, values: Any, where: str = ""):
        if not isinstance(values, Mapping):
            what = where.rstrip(".") or "the body"
            raise ApiError(400, f"{what} must be a JSON object, got {brief(values)}", param=where.rstrip(".") or None)
        self._values, self._where, self._read = values, where, set()

    def any(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of this kind. Raises ApiError for any other."""
        value = self.any(name)
        if value is None:
            return default
        if kind is float and type(value) in (int, float) and abs(value) < _LARGE:
            return value
        if type(value) is not kind:
            raise self.wrong(name, f"must be {_WORDS[kind]}, got {brief(value)}")
        return value

    def texts(self, name: str) -> list[str] | None:
        """One text or a list of them."""
        value = self.any(name)
        if isinstance(value, str):
            return [value]
        if value is not None and not (isinstance(value, list) and all(isinstance(x, str) for x in value)):
            raise self.wrong(name, f"must be a text or a list of texts, got {brief(value)}")
        return value

    def inner(self, name: str) -> Fields | None:
        """The fields of an object in this one."""
        value = self.any(name)
        return None if value is None else Fields(value, f"{self._where}{name}.")

    def refuse(self, fixes: Mapping[str, str], harmless: tuple[Any, ...] = ()) -> None:
        """Raise ApiError for a field that is not supported. fixes: what to do instead, by name. harmless: values that
        ask for nothing."""
        for name, fix in fixes.items():
            value = self.any(name)
            if value is not None and not any(value is x or (type(value) is type(x) and value == x) for x in harmless):
                raise unsupported(self._where + name, fix)

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that may have any value, since they change no answer."""
        self._read.update(names)

    def wrong(self, name: str, why: str) -> ApiError:
        return ApiError(400, f"{self._where}{name} {why}", param=self._where + name, code="invalid_type")

    def close(self) -> None:
        """Raise ApiError for a field that nothing asked for."""
        if unknown := [name for name, value in self._values.items() if value is not None and name not in self._read]:
            name = self._where + brief(unknown[0]).strip("'\"")
            raise ApiError(
                400,
                f"Unrecognized request argument supplied: {name}. Leave it out, or look for its name in the guide",
                param=name,
                code="unknown_parameter",
            )
