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

_TAG = "THE_FINAL_MESSAGE_ENDS_HERE "
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

    def with_source(self, source: str) -> ChatTemplate:
        """Another template for the same model."""
        return ChatTemplate(source, **self._tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; encode it without adding special tokens, since it holds them.

        messages: at least one {"role": ..., "content": ...}; content is a string or, where the model takes
            that, a list of parts.
        add_generation_prompt: end where the assistant's answer begins; by default unless continue_final_message.
        continue_final_message: end with the last message's text, which the answer continues.
        tools: JSON schemas of functions the model may call. kwargs: the template's own options.

        Raises ChatError for malformed messages, for what the template itself refuses, and for a template
        that is not valid.
        """
        _check(messages)
        _check_options(add_generation_prompt, continue_final_message, tools)
        begin = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        options = {**self._tokens, "tools": tools, "add_generation_prompt": begin, **kwargs}
        if continue_final_message:
            messages = [*messages[:-1], _tagged(messages[-1])]
        try:
            text = self._template.render(messages=messages, **options)
        except ChatError:
            raise
        except Exception as error:  # of any kind, since a template is a program
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatError(f"the model's chat template refuses these messages: {reason}") from error
        return _cut(text) if continue_final_message else text

    @cached_property
    def _template(self) -> jinja2.Template:
        # Compiled when first used: a model whose template cannot be compiled can still complete prompts.
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"chat template is not valid, line {error.lineno}: {error.message}") from None
        except Exception as error:  # of Python's compiler: too deeply nested
            raise ChatError(f"chat template is not valid: {type(error).__name__}: {error}") from None


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


_NAMED = ("messages", "add_generation_prompt", "continue_final_message", "tools", "bos_token", "eos_token")


def checked_kwargs(kwargs: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """A template's own options as a user gives them, beside others. Raises ChatError for what is none."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ChatError(f"chat_template_kwargs must map names of the template's options to values, got {kwargs!r:.100}")
    if twice := [name for name in kwargs if name in _NAMED or name in others]:
        raise ChatError(f"chat_template_kwargs has {twice[0]!r}, which is no option of the template itself")
    return dict(kwargs)


def _check_options(begin: Any, proceed: Any, tools: Any) -> None:
    if not isinstance(begin, bool | None) or not isinstance(proceed, bool):
        raise ChatError(
            f"add_generation_prompt and continue_final_message must be True or False, got {begin!r} and {proceed!r}"
        )
    if begin and proceed:
        raise ChatError(
            "add_generation_prompt begins an answer that continue_final_message has begun: give one of them"
        )
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(x, Mapping) for x in tools)):
        raise ChatError(f"tools must be a list of JSON schemas, got {' '.join(repr(tools).split())[:100]}")


def _tagged(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a tag at the end of its text, which shows where the template puts that."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _TAG}
    parts = [dict(part) if isinstance(part, Mapping) else part for part in content or ()]
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _TAG
            return {**message, "content": parts}
    raise ChatError("continue_final_message needs a final message with text")


def _cut(text: str) -> str:
    """The prompt up to the tag."""
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise ChatError("the chat template leaves out the final message's end, so it cannot be continued")
    # The space at its end tells whether the template trims messages.
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


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
