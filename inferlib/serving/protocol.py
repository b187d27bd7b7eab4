"""Requests for text as dataclasses: every field of OpenAI's that can be served, and those that vLLM adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferlib.option_checks import brief
from inferlib.sampling.params import SamplingParams
from inferlib.serving.errors import ApiError, unsupported
from inferlib.serving.fields import Fields
from inferlib.serving.structured import read_constraint

Message = dict[str, Any]

# Fields that change no answer of this server: nothing is stored, and requests have no classes.
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
_NO_SOUND = "this server reads and writes text"
_SAMPLED = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "deadline", "exit_threshold"), float),
    **dict.fromkeys(("top_k", "seed", "n", "min_tokens", "truncate_prompt_tokens", "prompt_logprobs", "depth"), int),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), bool),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "bad_words"), list),
}


@dataclass(frozen=True)
class Delivery:
    """How an answer is sent. usage: at a stream's end, a chunk that counts tokens; continuous: in each chunk."""

    stream: bool = False
    usage: bool = False
    continuous: bool = False


@dataclass(frozen=True)
class Common:
    """What every request for text has. fit: max_tokens is not the client's, so it is lowered to the room there is."""

    model: str | None
    params: SamplingParams
    fit: bool
    delivery: Delivery
    priority: float
    cache_salt: str | None


@dataclass(frozen=True)
class CompletionRequest:
    """prompts: texts or lists of token ids. echo: begin each text with its prompt. Zero tokens: only with echo."""

    common: Common
    prompts: Sequence[str | list[int]]
    echo: bool
    zero_tokens: bool


@dataclass(frozen=True)
class ToolChoice:
    """Functions that the model may call, as OpenAI describes them. kind: "auto", "none", "required", or "named", which
    is about the function `name`. parallel: more than one call is passed on."""

    tools: Sequence[Mapping[str, Any]] = ()
    kind: str = "none"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True)
class ChatRequest:
    """template: options of `LLM.chat_prompt`. parse_reasoning: tell what a model thinks apart from what it answers."""

    common: Common
    messages: Sequence[Message]
    tools: ToolChoice
    template: Mapping[str, Any] = field(default_factory=dict)
    parse_reasoning: bool = True


def read_completion(body: Any, defaults: SamplingParams) -> CompletionRequest:
    """Raises ApiError."""
    fields = Fields(body)
    logprobs = fields.take("logprobs", int)
    echo, most = fields.take("echo", bool, False), fields.take("max_tokens", int)
    if most == 0 and not echo:
        raise fields.wrong("max_tokens", "must be at least 1; 0 only with echo, for log-probabilities of a prompt")
    prompts = read_prompts(fields, "prompt")
    fields.refuse({"suffix": "put it into the prompt as the model's card says"}, ("",))
    fields.refuse({"best_of": "use n"}, (1, fields.any("n")))
    fields.refuse({"add_special_tokens": "give the prompt as token ids"}, (True,))
    params = {"max_tokens": most or 1 if most is not None else None, "logprobs": logprobs}
    if most is None:
        params["max_tokens"] = defaults.max_tokens
    if echo and logprobs is not None:
        params["prompt_logprobs"] = logprobs
    common = _common(fields, defaults, params, fit=most is None)
    if echo and logprobs is not None and common.delivery.stream:
        raise unsupported("stream", "log-probabilities of an echoed prompt come with the last token: use stream=false")
    fields.close()
    return CompletionRequest(common, prompts, echo, most == 0)


def read_chat(body: Any, defaults: SamplingParams) -> ChatRequest:
    """Raises ApiError."""
    fields = Fields(body)
    most = fields.take("max_completion_tokens", int, fields.take("max_tokens", int))
    wanted, top = fields.take("logprobs", bool, False), fields.take("top_logprobs", int)
    if top is not None and not wanted:
        raise fields.wrong("top_logprobs", "needs logprobs=true")
    messages = read_messages(fields.take("messages", list))
    tools = read_tools(fields)
    template = read_template(fields)
    parse = fields.take("include_reasoning", bool, True)
    fields.refuse({"modalities": _NO_SOUND}, (["text"],))
    fields.refuse({"audio": _NO_SOUND, "prediction": "leave it out; answers are the same without it"})
    fields.refuse({"web_search_options": "search in the client, and put what it says into the messages"})
    fields.refuse({"functions": "use tools", "function_call": "use tool_choice"})
    fields.refuse({"verbosity": "say so in a message"}, ("medium",))
    fields.refuse({"echo": "the prompt is in the request"}, (False,))
    logprobs = (top or 0) if wanted else None
    common = _common(fields, defaults, {"max_tokens": most, "logprobs": logprobs}, fit=False)
    fields.close()
    return ChatRequest(common, messages, tools, template, parse)


def read_delivery(fields: Fields) -> Delivery:
    stream, options = fields.take("stream", bool, False), fields.inner("stream_options")
    if options is None:
        return Delivery(stream)
    if not stream:
        raise fields.wrong("stream_options", "is about streams: give stream=true, or leave it out")
    usage = options.take("include_usage", bool, False)
    continuous = options.take("continuous_usage_stats", bool, False)
    options.ignore(("include_obfuscation",))  # there is none to leave out
    options.close()
    return Delivery(True, usage, continuous)


def sampling(defaults: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """The model's suggestions, with these values in their place. Raises ApiError."""
    try:
        return dataclasses.replace(defaults, **values)
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).split(" ", 1)[0].strip(":")) from None


def _common(fields: Fields, defaults: SamplingParams, values: dict[str, Any], *, fit: bool) -> Common:
    """The fields that chats and completions share. values: fields of `SamplingParams` that are read already."""
    for name, kind in _SAMPLED.items():
        if (value := fields.take(name, kind)) is not None:
            values[name] = value
    values["stop"] = fields.texts("stop")
    values["logit_bias"] = _bias(fields)
    if (wanted := read_constraint(fields)) is not None:
        values["structured_outputs"] = wanted
    fields.refuse({"use_beam_search": "use LLM.beam_search"}, (False,))
    fields.refuse({"spaces_between_special_tokens": "texts are as the tokenizer decodes them"}, (True,))
    fields.refuse({"store": "nothing is stored here"}, (False,))
    fields.ignore(IGNORED)
    priority, salt = fields.take("priority", float, 0), fields.take("cache_salt", str)
    values = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
    model = fields.take("model", str)
    return Common(model, sampling(defaults, values), fit, read_delivery(fields), priority, salt)


def _bias(fields: Fields) -> dict[int, float] | None:
    """JSON has texts where SamplingParams has token ids."""
    bias = fields.take("logit_bias", dict)
    try:
        return bias and {int(token): value for token, value in bias.items()}
    except ValueError:
        raise fields.wrong("logit_bias", f"must map token ids to numbers, got {brief(bias)}") from None


def read_prompts(fields: Fields, name: str) -> Sequence[str | list[int]]:
    """Texts or token ids, one or several. Raises ApiError."""
    prompt = fields.any(name)
    if isinstance(prompt, str) or (is_ids(prompt) and prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(x, str) or is_ids(x) for x in prompt):
        return prompt
    raise fields.wrong(name, f"must be a text, a list of token ids, or a list of either, got {brief(prompt)}")


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int for x in value)


# ---- chats

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(messages: list[Any] | None) -> list[Message]:
    """Messages as chat templates take them: content is text, and a call's arguments are an object. Raises ApiError."""
    if not messages:
        raise ApiError(400, "messages are missing: give at least one", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ApiError(400, f"{where} must be an object with a role of {', '.join(_ROLES)}", param=where)
    from inferlib.serving.tools.calls import template_calls

    read = {name: value for name, value in message.items() if value is not None}
    read["content"] = _content(message.get("content"), f"{where}.content")
    for name in ("refusal", "annotations", "audio", "function_call"):  # of an answer that is sent back
        read.pop(name, None)
    if thoughts := read.pop("reasoning", None):
        read.setdefault("reasoning_content", thoughts)
    if calls := read.pop("tool_calls", None):
        read["tool_calls"] = template_calls(calls, f"{where}.tool_calls")
    elif message.get("content") is None and message["role"] != "assistant":
        raise ApiError(400, f"{where}.content is missing: give a text", param=f"{where}.content")
    return read


def _content(content: Any, where: str) -> str:
    if isinstance(content, str | None):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a text or a list of parts, got {brief(content)}", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ApiError(400, f"{where} has a part that is no text ({brief(part)}): {_NO_SOUND}", param=where)
        texts.append(text)
    return "\n".join(texts)


def read_tools(fields: Fields) -> ToolChoice:
    tools, choice = fields.take("tools", list), fields.any("tool_choice")
    parallel = fields.take("parallel_tool_calls", bool, True)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise fields.wrong("tool_choice", "needs tools: give them, or leave tool_choice out")
        return ToolChoice()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function" or type(function.get("name")) is not str:
            raise ApiError(
                400,
                f'tools[{i}] must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, '
                f"got {brief(tool)}",
                param=f"tools[{i}]",
            )
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if name not in names:
            raise fields.wrong("tool_choice", f"names {brief(name)}, which is none of the tools {', '.join(names)}")
        return ToolChoice(tools, "named", name, parallel)
    kind = "auto" if choice is None else choice
    if kind not in ("auto", "none", "required"):
        raise fields.wrong("tool_choice", f"must be auto, none, required or a function, got {brief(choice)}")
    return ToolChoice(tools, kind, None, parallel)


def read_template(fields: Fields) -> dict[str, Any]:
    options: dict[str, Any] = {
        "add_generation_prompt": fields.take("add_generation_prompt", bool),
        "continue_final_message": fields.take("continue_final_message", bool),
        "chat_template": fields.take("chat_template", str),
    }
    kwargs = dict(fields.take("chat_template_kwargs", dict) or {})
    for name in ("reasoning_effort", "documents"):
        if (value := fields.any(name)) is not None:
            kwargs[name] = value
    return {name: value for name, value in options.items() if value is not None} | {"chat_template_kwargs": kwargs}
