"""Decode steps that verify drafts beside those of one token a row: ms per step, and tokens/s if drafts stand so often.

    python benchmarks/drafts.py --config llama3-8b --batch 1,16,64 --tokens 1,2,4,8 --cache 2048 --acceptance 0.8

A shape from configs/ with random weights, whose final norm is zero: every logit is zero, and every row generates token
0 for ever. A drafter of this benchmark drafts it with the probability --acceptance, so that its drafts stand as often
as those of a real one, at no cost. --tokens: C, of which C - 1 are drafts; with 1 there is no speculation. A row begins
with so many tokens that it has --cache in the end, and generates --generate. "step" is what a step takes, "of one"
relative to the first C; "gain" is tokens/s relative to that.

--draft names a shape of the same vocabulary, for a model that drafts in the same program. Its logits are zero too, so
all its drafts stand. Further rows are steps with it. "of parts" is relative to what the parts take alone: a step that
verifies as many drafts of the benchmark's drafter, and a step of the draft model for each of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from decode import engine_config, occupy
from rich.console import Console
from rich.table import Table

from inferlib import configs
from inferlib.config import EngineConfig, check_draft
from inferlib.engine.engine import Engine, EngineStats
from inferlib.engine.profit import Profit
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding.shards import Shards
from inferlib.speculation.settings import Speculation

_FIRST = 3  # dispatches that compile, and do not count
_FEWEST = 4  # that do, if each of their drafts stands


@dataclass(frozen=True)
class Guesses:
    """Drafts token 0, which is right, with a probability, and 1 otherwise."""

    acceptance: float

    def propose(self, history: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
        """See `inferlib.speculation.settings.Drafter`."""
        row, at = jnp.arange(lengths.size)[:, None], lengths[:, None] + jnp.arange(count)
        keys = jax.vmap(jax.vmap(lambda row, at: jax.random.fold_in(jax.random.key(row), at)))
        drawn = jax.vmap(jax.vmap(jax.random.uniform))(keys(jnp.broadcast_to(row, at.shape), at))
        return (drawn >= self.acceptance).astype(jnp.int32)


class Always(Profit):
    """Each dispatch drafts as many tokens as it may."""

    def choose(self, *_: Any) -> int:
        return self.counts[-1]


@dataclass(frozen=True)
class Model:
    """A shape with random weights, whose logits are zero."""

    structure: AbstractModel
    weights: tuple[Any, ...]

    @staticmethod
    def make(name: str, dtype: str, backend: str) -> Model:
        """The model of a shape in configs/."""
        shape = shape_of(name)
        config = engine_config(shape, 1, 1024, Shards(), backend=backend)
        structure = abstract_model(shape, dtype, backend=config.backend, scan=config.scan)
        return Model(structure, constant(structure, structure.random_weights()))


def shape_of(name: str) -> ModelConfig:
    """The structure of a shape in configs/."""
    return config_from_hf(configs.load(name))


def constant(model: AbstractModel, weights: Sequence[Any]) -> tuple[Any, ...]:
    """The weights with a final norm that makes every hidden state zero."""
    none = -1.0 if model.config.norm.unit_offset else 0.0
    names = [spec.name for spec in model.specs]
    number = names.index("final_norm.weight")
    return (*weights[:number], jnp.full_like(weights[number], none), *weights[number + 1 :])


def most(config: EngineConfig, drafts: int) -> int:
    """Most tokens that a row gets of a dispatch."""
    return config.decode_steps * (1 + drafts)


def fewest(config: EngineConfig, drafts: int) -> int:
    """Fewest tokens of a row that can be measured: besides the dispatches that count there are those that compile,
    those in flight, and the last two."""
    return (_FIRST + _FEWEST + config.in_flight + 2) * most(config, drafts)


@dataclass(frozen=True)
class Step:
    """ms: milliseconds of a step. each: tokens that a row gets of it. rate: tokens/s of all rows."""

    ms: float
    each: float
    rate: float


def measure(model: Model, config: EngineConfig, tokens: int, draft: Model | None = None) -> Step:
    """A step of an engine whose rows generate so many tokens. draft: a model that drafts for it."""
    weights, programs = model.weights, None
    if draft is not None:
        weights += draft.weights
        programs = ProgramSet.make(model.structure, config, drafting=draft.structure)
    engine = Engine(model.structure, weights, config, programs=programs)
    if config.speculation is not None:
        engine.scheduler.profit = Always(config.speculation, config.platform)
    occupy(engine, config.max_len - tokens - 1, tokens + 1)
    for _ in range(_FIRST):  # compiles
        engine.advance()
    engine.stats, start = EngineStats(), time.perf_counter()
    # The end, where rows have no room for a whole dispatch, does not count.
    last = config.max_len - 2 * most(config, config.speculation.tokens if config.speculation else 0)
    while max(s.length for s in engine.scheduler.running.values()) < last:
        engine.advance()
    seconds, stats = time.perf_counter() - start, engine.stats
    steps = (stats.generated_tokens - stats.accepted_drafts) / config.max_batch
    each = stats.generated_tokens / steps / config.max_batch
    return Step(1e3 * seconds / steps, each, stats.generated_tokens / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=configs.names(), default="llama3-8b")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--tokens", default="1,2,4,8", help="of a row in a step")
    parser.add_argument("--cache", type=int, default=2048)
    parser.add_argument("--generate", type=int, default=512, help="tokens of each row")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--draft", choices=configs.names(), help="shape of a model that drafts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, else bfloat16")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    batches, counts = ([int(n) for n in text.split(",")] for text in (args.batch, args.tokens))
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    made = {n: engine_config(shape_of(args.config), n, args.cache, Shards(), backend=args.backend) for n in batches}
    least = max(fewest(config, count - 1) for config in made.values() for count in counts)
    if not least <= args.generate < args.cache - 1:
        parser.error(f"--generate must be at least {least} for {max(counts)} tokens a step, and below --cache - 1")
    if args.draft:
        try:
            check_draft(shape_of(args.draft), shape_of(args.config), args.cache)
        except ValueError as error:
            parser.error(f"--draft {args.draft}: {error}")
    model = Model.make(args.config, dtype, args.backend)
    draft = None if args.draft is None else Model.make(args.draft, dtype, args.backend)
    title = (
        f"{args.config}, {dtype}, {jax.devices()[0].device_kind}, cache {args.cache}, acceptance {args.acceptance:g}"
    )
    table = Table("batch", "C", "step (ms)", "of one", "tokens a step", "tokens/s", "gain", title=title)
    if draft is not None:
        table.add_column(f"of parts, {args.draft} drafts")
    for batch, config in made.items():
        for row in rows_of(model, draft, config, counts, args):
            table.add_row(str(batch), *row)
    Console(width=None if Console().is_terminal else 120).print(table)


def rows_of(
    model: Model, draft: Model | None, config: EngineConfig, counts: Sequence[int], args: argparse.Namespace
) -> Iterator[tuple[str, ...]]:
    """Rows of the table for one batch."""
    base, alone = None, 0.0
    if draft is not None:
        alone = measure(draft, replace(config, speculation=None), args.generate).ms
    for count in counts:
        speculation = Speculation(Guesses(args.acceptance), tokens=count - 1) if count > 1 else None
        step = measure(model, replace(config, speculation=speculation), args.generate)
        base = base or step
        yield str(count), *texts(step, base)
        if draft is not None and count > 1:
            speculation = Speculation("draft", tokens=count - 1, model=args.draft)
            whole = measure(model, replace(config, speculation=speculation), args.generate, draft)
            yield str(count), *texts(whole, base), f"{whole.ms / (step.ms + (count - 1) * alone):.2f}x"


def texts(step: Step, base: Step) -> tuple[str, ...]:
    """A step's figures, beside those of another one."""
    relative = f"{step.ms / base.ms:.2f}x", f"{step.each:.2f}", f"{step.rate:.0f}", f"{step.rate / base.rate:.2f}x"
    return f"{step.ms:.3f}", *relative


if __name__ == "__main__":
    main()
