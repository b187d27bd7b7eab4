"""For the tests of the command line: a tiny model with a byte-level tokenizer, and how to run commands."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from typer.testing import CliRunner, Result

from inferlib import LLM
from inferlib.cli import app
from tests.helpers.oracle import make_checkpoint

COMMAND = [sys.executable, "-c", "from inferlib.cli import app; app()"]  # `inferlib` in a process of its own
SPECIAL = ("<unk>", "<bos>", "<eos>", "<turn>")
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


def make_model(folder: Path, layers: int = 2, context: int = 256, family: str = "llama") -> Path:
    """A random model of 260 tokens: special ones and the bytes."""
    options = {"num_hidden_layers": layers, "max_position_embeddings": context}
    folder = make_checkpoint(folder, family, vocab_size=len(SPECIAL) + 256, **options)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(BPE({t: i for i, t in enumerate([*SPECIAL, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Commands:
    """Runs commands in this process. Models are built once for equal arguments, so programs compile once."""

    def __init__(self, model: Path):
        self.model = model
        self._models: dict[str, LLM] = {}

    def build(self, *arguments: Any, **options: Any) -> LLM:
        key = repr((arguments, sorted(options.items())))
        if key not in self._models:
            self._models[key] = LLM(*arguments, **options)
        return self._models[key]

    @property
    def llm(self) -> LLM:
        """The model as `generate` builds it."""
        return self.build(str(self.model), dtype=None, max_batch=2, max_len=None, seed=0)

    def generate(self, *arguments: str | os.PathLike, stdin: str | bytes | None = None) -> Result:
        """Greedy, and 8 tokens, unless the arguments say otherwise."""
        options = ["--model", self.model, "--max-batch", "2", "--max-tokens", "8", "--temperature", "0"]
        return self("generate", *options, *arguments, stdin=stdin)

    def __call__(self, *arguments: str | os.PathLike, stdin: str | bytes | None = None) -> Result:
        words = [os.fspath(argument) for argument in arguments]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("inferlib.llm.LLM", self.build)
            return CliRunner().invoke(app, words, input=stdin)


def sharing_programs() -> dict[str, str]:
    """Variables with which a child process loads the programs that this one has compiled: those of as many devices."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_NUM_CPU_DEVICES": str(jax.config.jax_num_cpu_devices),
    }


def error_of(result: Result) -> str:
    """The error of a command that failed as it should: one line, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("error: "), result.stderr
    assert result.stdout == ""
    return lines[-1].removeprefix("error: ")
