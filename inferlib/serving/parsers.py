"""Which parsers read a model's answers: by name, or by what its chat template says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inferlib.sampling.structured import StructuredOutputs
from inferlib.serving.deltas import Chain, ContentParser, Parser
from inferlib.serving.errors import ApiError
from inferlib.serving.prompts import template_source
from inferlib.serving.protocol import Common, ToolChoice
from inferlib.serving.reasoning import MARKERS, Markers, Thoughts
from inferlib.serving.service import Service
from inferlib.serving.structured import constraint
from inferlib.serving.tools import deepseek
from inferlib.serving.tools.calls import new_call_id, short_call_id
from inferlib.serving.tools.harmony import Harmony
from inferlib.serving.tools.mistral import Mistral
from inferlib.serving.tools.objects import CallArray, Hermes, Llama3, NamedCall
from inferlib.serving.tools.tagged import GLM, QwenCoder
from inferlib.tokenizer import Tokenizer

HARMONY = "openai"
_FINAL = "<|channel|>final<|message|>"  # behind which a harmony answer begins
# By vLLM's names. Each makes a parser for the tools of a request.
TOOL_PARSERS: dict[str, Callable[[Sequence[Any]], Parser]] = {
    "hermes": lambda tools: Hermes(),
    "llama3_json": lambda tools: Llama3([tool["function"]["name"] for tool in tools]),
    "mistral": lambda tools: Mistral(),
    "deepseek_v3": lambda tools: deepseek.DeepSeek(),
    "glm45": GLM,
    "qwen3_coder": QwenCoder,
    HARMONY: lambda tools: Harmony(),
}
# What a chat template that has calls of this form says; the first that it has decides.
_SIGNS = (
    ("<|channel|>", HARMONY),
    ("[TOOL_CALLS]", "mistral"),
    (deepseek.CALLS, "deepseek_v3"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3_json"),
)
_REASONING = (*MARKERS, HARMONY)
# Markers that tokenizers may have as special tokens, which are then to stay in the text.
_SPECIAL = ("<|channel|>", "[TOOL_CALLS]", deepseek.SEP, "<tool_call>", "<arg_key>", "<|python_tag|>")
_ANY_ARGUMENTS = {"type": "object"}


def check_parsers(tools: str, reasoning: str) -> None:
    """Raise ValueError for a name of no parser."""
    for option, name, known in (("tool", tools, TOOL_PARSERS), ("reasoning", reasoning, _REASONING)):
        if name not in ("auto", "none", *known):
            raise ValueError(f"--{option}-parser must be auto, none, {', '.join(known)}; got {name!r:.100}")


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are read.

    tools: the name of the parser of calls; None: there are none. markers: of thoughts; None: there are none. harmony:
    answers are in channels, which one parser reads. short_ids: of calls, as Mistral's templates want them.
    """

    choice: ToolChoice
    tokenizer: Tokenizer
    tools: str | None
    markers: Markers | None
    harmony: bool
    short_ids: bool

    @staticmethod
    def of(service: Service, choice: ToolChoice, *, parse_reasoning: bool) -> AnswerFormat:
        """Raises ApiError if the model's calls cannot be read."""
        source, options = template_source(service), service.options
        tools = options.tool_parser
        if tools == "auto":
            tools = next((name for sign, name in _SIGNS if sign in source), "none")
        if choice.kind == "auto" and tools == "none":
            raise ApiError(
                400,
                "how this model writes calls of tools is not known: start the server with --tool-parser "
                f"({', '.join(TOOL_PARSERS)}), or leave tools out",
                param="tools",
            )
        harmony = HARMONY in (tools, options.reasoning_parser)
        if harmony and choice.kind in ("named", "required"):
            raise ApiError(400, "gpt-oss calls tools by tool_choice auto only: give that", param="tool_choice")
        markers = None
        if parse_reasoning and not harmony:
            markers = _markers(options.reasoning_parser, source)
        calls = tools if choice.kind == "auto" else None
        return AnswerFormat(choice, service.tokenizer, calls, markers, harmony, tools == "mistral")

    @property
    def forced(self) -> bool:
        """Whether the client named the function that is called."""
        return self.choice.kind == "named"

    def new_call_id(self) -> str:
        return short_call_id() if self.short_ids else new_call_id()

    def adapted(self, common: Common, prompt: Sequence[int]) -> Common:
        """The request with parameters that the parsers, and the choice of a tool, need. Raises ApiError."""
        changes: dict[str, Any] = {}
        wanted = StructuredOutputs.checked(common.params.structured_outputs)
        if self.choice.kind in ("named", "required"):
            if wanted is not None:
                raise ApiError(
                    400, "response_format and a forced tool_choice are one or the other", param="tool_choice"
                )
            wanted = constraint(json=_calls_schema(self.choice), whitespace_pattern=" ?")
        if wanted is not None:
            if after := self._before_answer(prompt):
                wanted = dataclasses.replace(wanted, after=after)
            changes["structured_outputs"] = wanted
        shown = [*(_SPECIAL if self.tools or self.harmony else ())]
        shown += [] if self.markers is None else [self.markers.open, self.markers.close]
        if any(map(self.tokenizer.is_special, shown)):
            changes["skip_special_tokens"] = False
        return dataclasses.replace(common, params=dataclasses.replace(common.params, **changes)) if changes else common

    def parsers(self, prompt: Sequence[int]) -> Callable[[], Parser]:
        """Makes a parser for each answer to a prompt."""
        markers, inside = self.markers, self._inside(prompt)

        def make() -> Parser:
            calls = self._calls()
            if markers is None:
                return calls
            thoughts = Thoughts(markers, inside=inside)
            return thoughts if isinstance(calls, ContentParser) else Chain(thoughts, calls)

        return make

    def _calls(self) -> Parser:
        if self.harmony:
            return Harmony()
        if self.choice.name is not None:
            return NamedCall(self.choice.name)
        if self.choice.kind == "required":
            return CallArray()
        return ContentParser() if self.tools is None else TOOL_PARSERS[self.tools](self.choice.tools)

    def _before_answer(self, prompt: Sequence[int]) -> str | None:
        """The text up to which the model thinks, before an answer of a given form."""
        if self.harmony:
            return _FINAL
        return self.markers.close if self.markers is not None and self._inside(prompt) else None

    def _inside(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with the marker that opens thoughts."""
        if self.markers is None:
            return False
        end = self.tokenizer.decode(prompt[-16:], skip_special_tokens=False)
        return end.rstrip().endswith(self.markers.open)


def _markers(name: str, source: str) -> Markers | None:
    if name != "auto":
        return MARKERS.get(name)
    return next((markers for markers in MARKERS.values() if markers.close in source), None)


def _calls_schema(choice: ToolChoice) -> dict[str, Any]:
    """The schema of the arguments of the named function, or of calls of any."""
    functions = {
        tool["function"]["name"]: tool["function"].get("parameters") or _ANY_ARGUMENTS for tool in choice.tools
    }
    if choice.name is not None:
        return functions[choice.name]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in functions.items()
    ]
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return array if choice.parallel else array | {"maxItems": 1}
