"""What the text of an output must be: JSON of a schema, a match of an expression, one of several texts, or a sentence
of a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inferlib.option_checks import brief
from inferlib.sampling.json_schema import check_schema

# Of a schema, an expression, a grammar, or all choices together: what takes more than about 0.1 s to compile.
MAX_GRAMMAR_CHARACTERS = 1 << 18
# Models that are left without an idea write white space for ever, so there is an end to it.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_KINDS = ("json", "regex", "choice", "grammar")

Kind = Literal["json", "regex", "choice", "grammar"]


class StructuredOutputError(RuntimeError):
    """A grammar and the rest of a request leave no token, or the grammar takes too much to follow. The request ends."""


@dataclass(frozen=True)
class StructuredOutputs:
    """The text of an output, of which exactly one kind is given. Tokens that do not fit are never chosen, and where the
    text is complete the output ends; it is cut short only by `max_tokens`, a stop string or a deadline.

    Attributes:
        json: a JSON schema, as a mapping or as its text; `{}` for any JSON. Stored as its text. Properties come in the
            schema's order.
        regex: a regular expression that the whole text matches, in the syntax of Rust, which has no look-around.
        choice: the texts of which the output is one. Stored as a tuple.
        grammar: a context-free grammar, in Lark's form or in GBNF.
        whitespace_pattern: a regular expression of the white space between the parts of JSON; "" for none. None: up to
            40 characters. Models answer best where it has what they would write.
        after: a text, such as "</think>", up to which the output is free and does not end; the answer follows. The
            token in which it ends is the last free one. None: there is nothing before the answer.

    Raises:
        ValueError: a field is not of this form, or longer than 262,144 characters; a schema that no finite value fits.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in _KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"structured_outputs: give one of {', '.join(_KINDS)}; there is {' and '.join(kinds) or 'none'}"
            )
        for name in ("regex", "grammar", "after"):
            _check_text(name, getattr(self, name))
        if not isinstance(self.whitespace_pattern, str | None):
            raise ValueError(
                f"structured_outputs.whitespace_pattern must be a text, got {brief(self.whitespace_pattern)}"
            )
        if self.whitespace_pattern is not None and self.json is None:
            raise ValueError("structured_outputs.whitespace_pattern is about JSON: give json, or leave it out")
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _checked_schema(self.json))
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(
                f"structured_outputs.{self.kind} has {len(self.text)} characters, and at most {MAX_GRAMMAR_CHARACTERS} "
                "are allowed: shorten it"
            )

    @staticmethod
    def checked(value: object) -> StructuredOutputs | None:
        """The value, or what a mapping of its fields stands for. Raises ValueError for anything else."""
        if isinstance(value, StructuredOutputs | None):
            return value
        names = StructuredOutputs.__dataclass_fields__
        if not isinstance(value, Mapping) or not value.keys() <= names.keys():
            raise ValueError(
                f"structured_outputs must be StructuredOutputs(...) or a mapping of {', '.join(names)}, got "
                f"{brief(value)}"
            )
        return StructuredOutputs(**value)

    @property
    def kind(self) -> Kind:
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The one kind that is given; choices as a JSON array."""
        return json.dumps(self.choice) if self.choice is not None else getattr(self, self.kind)

    @property
    def whitespace(self) -> str:
        return _WHITESPACE if self.whitespace_pattern is None else self.whitespace_pattern


def _check_text(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"structured_outputs.{name} must be a text that is not empty, got {brief(value)}")


def _checked_choice(choice: Any) -> tuple[str, ...]:
    listed = isinstance(choice, Sequence) and not isinstance(choice, str | bytes)
    if not listed or not choice or not all(isinstance(text, str) and text for text in choice):
        raise ValueError(f"structured_outputs.choice must be a list of texts, none of them empty, got {brief(choice)}")
    return tuple(dict.fromkeys(choice))


def _checked_schema(schema: object) -> str:
    """A JSON schema as its text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"structured_outputs.json is not JSON: {error}; give a schema as a mapping or text"
            ) from None
    if not isinstance(schema, Mapping):
        raise ValueError(
            "structured_outputs.json must be a JSON schema, as a mapping or its text, such as "
            f"{{'type': 'object'}}; of a pydantic model take Model.model_json_schema(); got {brief(schema)}"
        )
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json must hold nothing but JSON: {error}") from None
    check_schema(json.loads(text))
    return text
