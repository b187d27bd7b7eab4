"""Chat templates: messages to the prompt text a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SHAPE = '{"role": ..., "content": ...}'


class ChatError(ValueError):
    """Messages that are malformed or that the template refuses, or a template that cannot be used."""


class ChatTemplate:
    """A checkpoint's Jinja template, run in a sandbox with the functions that Hugging Face gives templates.

    bos_token, eos_token: what the template may refer to by these names.
    """

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None):
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; encode it without adding special tokens, since it holds them.

        messages: at least one {"role": ..., "content": ...}; content is a string or, where the model takes
            that, a list of parts.
        add_generation_prompt: end where the assistant's answer begins.
        tools: JSON schemas of functions the model may call. kwargs: the template's own options.

        Raises ChatError for malformed messages, for what the template itself refuses, and for a template
        that is not valid.
        """
        _check(messages)
        options = {**self._tokens, "tools": tools, "add_generation_prompt": add_generation_prompt, **kwargs}
        try:
            return self._template.render(messages=messages, **options)
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatError(f"the model's chat template refuses these messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        # Compiled when first used: a model whose template cannot be compiled can still complete prompts.
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"chat template is not valid, line {error.lineno}: {error.message}") from None


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ChatError(f"messages must be a list of {_SHAPE}, got {type(messages).__name__}")
    if not messages:
        raise ChatError("messages are empty; give at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatError(f"message {i} must be {_SHAPE}, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise ChatError(f'message {i} needs a "role" such as "user", got {message.get("role")!r}')
        # A message that calls tools may have nothing to say.
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise ChatError(f'message {i} needs a "content" string, got {message.get("content")!r}')


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what to train on; here it is a plain scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike Jinja's own filter, keeps characters special to HTML. options: those of json.dumps."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
