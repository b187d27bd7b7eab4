"""What a model's authors suggest for sampling: the generation_config.json of a Hugging Face directory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferlib.option_checks import ConfigurationError, brief
from inferlib.sampling.params import SamplingParams

CHOICES = ("auto", "none")
# Fields that are taken, by Hugging Face's names: the same as vLLM takes.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class GenerationConfig:
    """params: for requests that say nothing else. eos_token_ids: tokens that end an answer, maybe none."""

    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def read(model: Path, choice: str = "auto") -> GenerationConfig:
        """Read the file in a model's directory. Without it, and for any other model, nothing is known.

        choice: "auto"; or "none" to take no sampling parameters from it. Raises ConfigurationError.
        """
        if not isinstance(choice, str) or choice not in CHOICES:
            raise ConfigurationError(
                f"generation_config must be {' or '.join(map(repr, CHOICES))}, got {brief(choice)}"
            )
        file = model / "generation_config.json"
        if not file.is_file():
            return GenerationConfig()
        try:
            made = json.loads(file.read_bytes())
        except (ValueError, RecursionError, OSError) as error:
            raise ConfigurationError(f"{file} cannot be read: {error}") from None
        if not isinstance(made, dict):
            raise ConfigurationError(f"{file} must hold a JSON object, it holds a {type(made).__name__}")
        return GenerationConfig(_params(made, file) if choice == "auto" else SamplingParams(), _ids(made))


def _params(made: dict[str, Any], file: Path) -> SamplingParams:
    values: dict[str, Any] = {ours: made[name] for name, ours in _FIELDS.items() if made.get(name) is not None}
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ConfigurationError(
            f"{file} has sampling parameters that cannot be: {error}; mend it, or use generation_config='none'"
        ) from None


def _ids(made: dict[str, Any]) -> tuple[int, ...]:
    ids = made.get("eos_token_id")
    return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0)
