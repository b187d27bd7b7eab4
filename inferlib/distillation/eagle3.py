"""`distill_eagle3`: train an EAGLE-3 head for a model, from texts to a directory as heads are published."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from inferlib.checkpoint.eagle3 import head_config, new_head, save_head
from inferlib.distillation.chains import ChainScore, score
from inferlib.distillation.data import Data, prepare
from inferlib.distillation.loop import DATA, TrainingLoop, check_devices, check_length, check_run, product_dtype
from inferlib.distillation.record import plot
from inferlib.distillation.settings import DistillSettings
from inferlib.distillation.training import CHAIN, Passes, Target, TrainingTimeTest, cast
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.eagle3 import abstract_head
from inferlib.option_checks import checked_output, checked_path
from inferlib.platforms import prepare_jax

_TESTED_AT_ONCE = 8  # rows


def distill_eagle3(
    model: str | Path,
    texts: str | Path,
    out: str | Path,
    settings: DistillSettings = DistillSettings(),  # noqa: B008
    *,
    dtype: str | None = None,
    revision: str | None = None,
    progress: bool = False,
) -> ChainScore:
    """Train an EAGLE-3 head for a model, and measure it on texts that are held out.

    model, revision: as `LLM` takes them. texts: see `read_texts`. out: a directory that is new, empty, or of a run with
    the same options, which goes on from its last checkpoint. It gets the head as heads are published, and `training/`
    with checkpoints, `log.jsonl`, `loss.png` and `result.json`. dtype: of the model and of products, "float32" or
    "bfloat16"; by default float32 on CPUs, else bfloat16.

    Returns how many tokens a verification with chains of 4 drafts gives. Raises ConfigurationError, CheckpointError or
    ConfigError before any work on the devices.
    """
    return open_run(model, texts, out, settings, dtype=dtype, revision=revision, progress=progress).complete()


def open_run(
    model: str | Path,
    texts: str | Path,
    out: str | Path,
    settings: DistillSettings,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    progress: bool = False,
) -> Run:
    """The run of `distill_eagle3`, new or to go on with, its texts prepared."""
    prepare_jax()
    dtype = product_dtype(dtype)
    check_devices(settings)
    texts, out = checked_path("data", texts), checked_output("out", out)
    files, folder = ModelFiles.open(model, revision, progress=progress), out / "training"
    check_length(settings, files.config.context)
    hf = new_head(files.config, settings.drafted(files.config.vocab))
    head_config(hf, files.config)  # raises for a model that no head fits
    options = {"model": str(model), "revision": revision, "texts": str(texts), "dtype": dtype, **settings.deciding()}
    check_run(out, folder / "settings.json", options)
    if (prepared := folder / "data.npz").exists():
        data = Data.load(prepared)
    else:
        data = prepare(files, texts, settings, dtype=dtype, progress=progress)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
        data.save(prepared)
    return Run(files, hf, data, settings, out, dtype, progress)


@dataclass(frozen=True)
class Run:
    """A run of training. hf: the head's config.json."""

    files: ModelFiles
    hf: dict[str, Any]
    data: Data
    settings: DistillSettings
    out: Path
    dtype: str
    progress: bool

    def complete(self) -> ChainScore:
        """Train to the last step, from the last checkpoint on, and measure."""
        settings = self.settings
        state, entries = self.loop.run(
            self.first_state(),
            lambda state, rows: self.step(state, self.target_weights, rows),
            lambda number: self.data.batch(number, settings.batch, settings.seed),
            self.save,
        )
        plot(entries, self.folder / "loss.png")
        result = self.measure(state["weights"])
        summary = {"tokens_a_verification": result.tokens, "acceptance": result.acceptance, **result._asdict()}
        (self.folder / "result.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return result

    def save(self, state: Any) -> dict[str, Any]:
        """Write the head, in the dtype of products."""
        hf = {**self.hf, "torch_dtype": self.dtype}
        weights = cast(self.all_weights(state["weights"]), self.passes.head.model.dtype)
        save_head(self.out, hf, self.passes.head, weights)
        return {}

    # ---- what is trained, and on what

    @property
    def folder(self) -> Path:
        return self.out / "training"

    @cached_property
    def loop(self) -> TrainingLoop:
        return TrainingLoop(self.settings, self.folder, "distilling", self.progress)

    @cached_property
    def target(self) -> Target:
        quantization = self.files.quantization(None)
        model = abstract_model(self.files.config, self.dtype, quantization=quantization, scan=True)
        return Target(model, self.head.config.feature_layers)

    @cached_property
    def head(self) -> Any:
        return abstract_head(head_config(self.hf, self.files.config), "float32")

    @cached_property
    def passes(self) -> Passes:
        return Passes(abstract_head(self.head.config, self.dtype))

    @cached_property
    def target_weights(self) -> tuple[jax.Array, ...]:
        return jax.device_put(self.files.load(self.target.model, progress=self.progress), self.loop.everywhere)

    def all_weights(self, trained: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """All weights of the head, from those that are trained: all but `d2t`. Traceable."""
        rest, offsets = iter(trained), self.data.ids - np.arange(self.data.ids.size, dtype=np.int32)
        return tuple(jnp.asarray(offsets) if w.part == "d2t" else next(rest) for w in self.head.model.weights)

    def first_state(self) -> Any:
        """Random weights, but for what the target knows: its head and last norm. Features are taken as if each had a
        mean square of 1: of some layers it is hundreds, and what the layer adds would be lost beside them."""
        parts, drawn = [w.part for w in self.head.model.weights], self.head.model.random_weights(self.settings.seed)
        values = dict(zip(parts, drawn, strict=True))
        sample = jnp.asarray(self.data.rows[:2])
        features, _ = jax.jit(self.target.states)(self.target_weights, sample)
        sizes = jnp.sqrt(jnp.mean(jnp.square(features.astype(jnp.float32)), axis=-1))  # huge for a few tokens
        width = self.head.config.target_dim
        values["fc"] = values["fc"] / jnp.repeat(jnp.median(sizes, axis=(0, 1)), width)[:, None]
        decoder, norm = self.target.model.merge(self.target_weights), self.head.config.model.norm
        table = decoder.embed[...].T if self.files.config.tied else decoder.head[...]
        if isinstance(table, jax.Array):  # and not quantised
            values["head"] = table[:, self.data.ids].astype(jnp.float32)
            if self.files.config.norm == norm:
                values["final_norm"] = jnp.array(decoder.final_norm.weight[...], jnp.float32)  # a copy
        del values["d2t"]
        return self.loop.first_state(tuple(values.values()))

    @cached_property
    def step(self) -> Callable:
        """(state, target's weights, rows) -> (state, metrics): one step of the optimizer, each device with its rows."""
        test = TrainingTimeTest(self.passes, self.settings.unroll, self.settings.decay)
        ids = jnp.asarray(self.data.ids)

        def local(state, target_weights, tokens):
            outputs = self.target.outputs(target_weights, tokens, ids)
            embeddings = self.target.embeddings(target_weights, tokens)
            loss = lambda trained: test.loss(self.all_weights(trained), outputs, embeddings)  # noqa: E731
            gradients, metrics = lax.pmean(jax.grad(loss, has_aux=True)(state["weights"]), DATA)
            return self.loop.updated(state, gradients), metrics

        whole, rows = PartitionSpec(), PartitionSpec(DATA)
        step = jax.shard_map(
            local, mesh=self.loop.mesh, in_specs=(whole, whole, rows), out_specs=(whole, whole), check_vma=False
        )
        return jax.jit(step, donate_argnums=0)

    def measure(self, trained: Sequence[jax.Array]) -> ChainScore:
        """Chains of drafts on the texts that the target continued."""
        dtype = self.passes.head.model.dtype

        @jax.jit
        def drafted(trained, target_weights, tokens):
            weights = cast(self.all_weights(trained), dtype)
            features, _ = self.target.states(target_weights, tokens)
            embeddings = self.target.embeddings(target_weights, tokens)
            chains = [x.argmax(-1) for x in self.passes.over(weights, features, embeddings, CHAIN)]
            return jnp.asarray(self.data.ids)[jnp.stack(chains, axis=-1)]

        tests, lengths = self.data.tests, self.data.lengths
        short = -len(tests) % _TESTED_AT_ONCE
        parts = np.pad(tests, ((0, short), (0, 0))).reshape(-1, _TESTED_AT_ONCE, tests.shape[1])
        drafts = np.concatenate([drafted(trained, self.target_weights, jnp.asarray(part)) for part in parts])
        texts = [text[:size] for text, size in zip(tests, lengths, strict=True)]
        return score(list(drafts[: len(texts)]), texts, [self.data.begin] * len(texts))
