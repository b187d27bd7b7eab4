"""Which parsers read a model's answers: by name, or by what its chat template says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inferlib.serving.deltas import ContentParser, Parser
from inferlib.serving.protocol import Common, ToolChoice
from inferlib.serving.service import Service
from inferlib.serving.tools.calls import new_call_id


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one request are read.

    new_call_id: makes ids of calls. forced: the client named the function that is called.
    """

    choice: ToolChoice
    new_call_id: Callable[[], str] = new_call_id
    forced: bool = False

    @staticmethod
    def of(service: Service, choice: ToolChoice, *, parse_reasoning: bool) -> AnswerFormat:
        """Raises ApiError if the model's calls cannot be read."""
        return AnswerFormat(choice)

    def adapted(self, common: Common) -> Common:
        return common

    def parsers(self, prompt: Sequence[int]) -> Callable[[], Parser]:
        """Makes a parser for each answer to a prompt."""
        return ContentParser


def check_parsers(tools: str, reasoning: str) -> None:
    """Raise ValueError for a name of no parser."""
