"""`finetune`: train the weights of a quantised model, so that what their rounding lost comes back.

With a teacher, the model learns what that says of each next token: quantisation-aware distillation, QAD (Liu et al.
2023, "LLM-QAT", https://arxiv.org/abs/2305.17888). Without one it learns the texts: quantisation-aware training, QAT.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from inferlib.checkpoint.laid_out import LaidOutWeights, quiet, save_weights, stored_model, write_manifest
from inferlib.checkpoint.source import CheckpointError
from inferlib.distillation.data import rows_of_step
from inferlib.distillation.loop import DATA, TrainingLoop, check_devices, check_length, check_run, product_dtype
from inferlib.distillation.settings import FinetuneSettings
from inferlib.finetuning.losses import cross_entropy, divergence
from inferlib.finetuning.plot import plot
from inferlib.finetuning.rows import Rows
from inferlib.finetuning.samples import sample_rows
from inferlib.finetuning.weights import QuantizedWeights, Scales, Trained, begin
from inferlib.finetuning.whole_rows import has_gradients, hidden_states
from inferlib.model_files import CALIBRATION, ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.quantization import Quantization
from inferlib.option_checks import ConfigurationError, checked_output, checked_path
from inferlib.platforms import prepare_jax


class FinetuneResult(NamedTuple):
    """The loss on held-out rows before and after training, in nats: the KL divergence of next tokens' distributions
    from the teacher's, or without a teacher the cross entropy with the texts."""

    before: float
    after: float


class Loss(NamedTuple):
    """The mean loss of a step."""

    loss: jax.Array


def finetune(
    model: str | Path,
    texts: str | Path,
    out: str | Path,
    settings: FinetuneSettings = FinetuneSettings(),  # noqa: B008
    *,
    teacher: str | Path | None = None,
    dtype: str | None = None,
    progress: bool = False,
) -> FinetuneResult:
    """Train a quantised model's weights and scales, with the rounding in every step.

    model: a directory that `calibrate` wrote. texts: see `read_texts`. out: a directory that is new, empty, or of a run
    with the same options, which goes on from its last checkpoint. It becomes a directory as `model` is, of the same
    scheme and size, and gets `training/` with checkpoints, `log.jsonl`, `loss.png` and `result.json`. teacher: the
    original, or another model of the same tokens; None: the texts teach. dtype: of products, "float32" or "bfloat16";
    by default float32 on CPUs, else bfloat16. Weights are trained in float32.

    Raises ConfigurationError, CheckpointError or ConfigError before any work on the devices, also for layers of a
    registered family that have no gradients.
    """
    run = open_run(model, texts, out, settings, teacher=teacher, dtype=dtype, progress=progress)
    return run.complete()


def open_run(
    model: str | Path,
    texts: str | Path,
    out: str | Path,
    settings: FinetuneSettings,
    *,
    teacher: str | Path | None = None,
    dtype: str | None = None,
    progress: bool = False,
) -> Run:
    """The run of `finetune`, new or to go on with, its texts prepared."""
    prepare_jax()
    dtype = product_dtype(dtype)
    check_devices(settings)
    texts, out = checked_path("data", texts), checked_output("out", out)
    files = _quantized(ModelFiles.open(model))
    learned = None if teacher is None else _teacher(ModelFiles.open(teacher, progress=progress), files)
    check_length(settings, files.config.context)
    if settings.samples and learned is None:
        raise ConfigurationError("samples are written by the teacher: give one, or leave samples out")
    folder = out / "training"
    options = {"model": str(model), "teacher": teacher and str(teacher), "texts": str(texts), "dtype": dtype}
    options |= settings.deciding()
    check_run(out, folder / "settings.json", options)
    assert files.tokenizer is not None
    saved = Rows.saved(folder)
    rows = saved or Rows.of_texts(texts, files.tokenizer, settings.length)
    run = Run(files, learned, rows, settings, out, dtype, progress)
    run.must_have_gradients()
    if saved is None:
        run = replace(run, rows=run.with_samples())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    run.rows.save(folder)
    return run


def _quantized(files: ModelFiles) -> ModelFiles:
    """The files, if their weights can be trained. Raises CheckpointError."""
    source = files.source
    quantization = source.quantization if isinstance(source, LaidOutWeights) else None
    if quantization is None or quantization.scheme.zeros:
        raise CheckpointError(
            f"{files.path} is no directory of quantised weights that inferlib quantize wrote: quantise the model "
            "first, by the method nearest if there is no text for a better one"
        )
    if files.tokenizer is None:
        raise CheckpointError(
            f"{files.path} has no tokenizer, which makes tokens of the texts: put tokenizer.json there"
        )
    return files


def _teacher(teacher: ModelFiles, files: ModelFiles) -> ModelFiles:
    """The teacher's files, if it has the model's tokens. Raises ConfigurationError."""
    sizes = teacher.config.vocab, files.config.vocab
    if sizes[0] != sizes[1]:
        raise ConfigurationError(
            f"the teacher {teacher.path} has {sizes[0]} tokens, and {files.path} has {sizes[1]}: give the model that "
            "this was made of"
        )
    if teacher.tokenizer is not None and files.tokenizer is not None:
        sample = "The quick brown fox; 3.14 = pi?"
        if teacher.tokenizer.encode(sample) != files.tokenizer.encode(sample):
            raise ConfigurationError(
                f"the teacher {teacher.path} has other tokens than {files.path}: give the model that this was made of"
            )
    return teacher


@dataclass(frozen=True)
class Run:
    """A run of training. teacher: its files, if there is one."""

    files: ModelFiles
    teacher: ModelFiles | None
    rows: Rows
    settings: FinetuneSettings
    out: Path
    dtype: str
    progress: bool

    def complete(self) -> FinetuneResult:
        """Train to the last step, from the last checkpoint on, and write the model."""
        settings, (first, scales) = self.settings, self.first
        before = self.measure(first, scales)
        state, entries = self.loop.run(
            self.loop.first_state(first),
            lambda state, rows: self.step(state, scales, self.teacher_weights, rows),
            lambda number: rows_of_step(self.rows.training, number, settings.batch, settings.seed),
            lambda state: {"held_out": self.measure(state["weights"], scales)},
        )
        result = FinetuneResult(before, entries[-1]["held_out"])
        self.save(state["weights"], scales)
        plot(entries, before, self.loop.folder / "loss.png", kind=self.kind)
        text = json.dumps({"kind": self.kind, **result._asdict()}, indent=2) + "\n"
        (self.loop.folder / "result.json").write_text(text, encoding="utf-8")
        return result

    def save(self, trained: Sequence[Trained], scales: Scales) -> None:
        """Write the model, rounded."""
        for name in LaidOutWeights.FILES:  # of a run that was interrupted here
            path = self.out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        weights = zip(self.weights.stored.weights, trained, scales, strict=True)
        rounded = ((weight, self.weights.rounded(weight, values, first)) for weight, values, first in weights)
        with quiet():
            for _ in save_weights(self.out, rounded):
                pass
        self.files.save_description(self.out)
        if (record := self.files.path / CALIBRATION).exists():
            shutil.copyfile(record, self.out / CALIBRATION)
        write_manifest(self.out, self.files.hf, self.weights.stored, self.quantization)

    # ---- what is trained, and on what

    def with_samples(self) -> Rows:
        """The rows of the texts, and those that the teacher writes."""
        settings, tokenizer = self.settings, self.files.tokenizer
        if self.teacher is None or tokenizer is None or not settings.samples:
            return self.rows
        tokens = min(tokenizer.vocab_size, self.files.config.vocab)
        drawn: dict = dict(dtype=self.dtype, seed=settings.seed, progress=self.progress)
        return self.rows.joined(sample_rows(self.teacher.path, settings.samples, settings.length, tokens, **drawn))

    @property
    def kind(self) -> str:
        """What the loss is."""
        return "cross entropy with the texts" if self.teacher is None else "KL divergence from the teacher"

    @property
    def quantization(self) -> Quantization:
        quantization = self.files.quantization(None)
        assert quantization is not None
        return quantization

    @cached_property
    def loop(self) -> TrainingLoop:
        return TrainingLoop(self.settings, self.out / "training", "fine-tuning", self.progress)

    @cached_property
    def weights(self) -> QuantizedWeights:
        source, config = self.files.source, self.files.config
        assert isinstance(source, LaidOutWeights)
        stored = stored_model(config, source.dtype.name, self.quantization)
        return QuantizedWeights(stored, abstract_model(config, self.dtype))

    @cached_property
    def first(self) -> tuple[tuple[Trained, ...], Scales]:
        """What is trained, as the directory has it, and its scales; on all devices."""
        made = begin(self.weights.stored, self.files.load(self.weights.stored, progress=self.progress))
        return jax.device_put(made, self.loop.everywhere)

    @cached_property
    def teacher_model(self) -> AbstractModel | None:
        if self.teacher is None:
            return None
        return abstract_model(self.teacher.config, self.dtype, quantization=self.teacher.quantization(None))

    @cached_property
    def teacher_weights(self) -> tuple[jax.Array, ...]:
        if self.teacher is None or self.teacher_model is None:
            return ()
        return jax.device_put(self.teacher.load(self.teacher_model, progress=self.progress), self.loop.everywhere)

    # ---- programs

    def loss(
        self, trained: Sequence[Trained], scales: Scales, teacher: Sequence[jax.Array], tokens: jax.Array
    ) -> jax.Array:
        """The mean loss of rows [B, T]. Traceable."""
        student = hidden_states(self.weights.dense, self.weights.multiplied(trained, scales), tokens)
        if self.teacher_model is None:
            return cross_entropy(student, tokens)
        return divergence(student, hidden_states(self.teacher_model, teacher, tokens))

    @cached_property
    def step(self) -> Callable:
        """(state, scales, teacher's weights, rows) -> (state, Loss): each device with its rows."""

        def local(state, scales, teacher, tokens):
            loss, gradients = jax.value_and_grad(self.loss)(state["weights"], scales, teacher, tokens)
            loss, gradients = lax.pmean((loss, gradients), DATA)
            return self.loop.updated(state, gradients), Loss(loss)

        return jax.jit(self._over_rows(local), donate_argnums=0)

    @cached_property
    def measured(self) -> Callable:
        """(trained, scales, teacher's weights, rows) -> the mean loss."""
        return jax.jit(self._over_rows(lambda *arguments: lax.pmean(self.loss(*arguments), DATA)))

    def _over_rows(self, local: Callable) -> Callable:
        """A function of three trees that each device has, and of rows, which are split."""
        whole, rows = PartitionSpec(), PartitionSpec(DATA)
        specs = (whole, whole, whole, rows)
        return jax.shard_map(local, mesh=self.loop.mesh, in_specs=specs, out_specs=whole, check_vma=False)

    def measure(self, trained: Sequence[Trained], scales: Scales) -> float:
        """The mean loss of the rows that are held out, whole batches of them."""
        losses = [
            self.measured(trained, scales, self.teacher_weights, jax.device_put(rows, self.loop.split))
            for rows in self.tested()
        ]
        return float(np.mean(jax.device_get(losses)))

    def tested(self) -> Iterator[np.ndarray]:
        """Batches of rows that are held out; the first ones come again in the last batch if they fill none."""
        count, batch = len(self.rows.testing), self.settings.batch
        for start in range(0, count, batch):
            yield self.rows.testing[np.arange(start, start + batch) % count]

    def must_have_gradients(self) -> None:
        """Raise ConfigurationError for a model whose layers have none."""
        stored = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.weights.stored.specs]
        teacher = () if self.teacher_model is None else self.teacher_model.specs
        structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in teacher]
        tokens = jax.ShapeDtypeStruct((1, self.settings.length), jnp.int32)
        trained, scales = jax.eval_shape(lambda arrays: begin(self.weights.stored, arrays), stored)
        if not has_gradients(self.loss, trained, scales, structs, tokens):
            raise ConfigurationError(
                f"{self.files.config.family} has layers without gradients, loops that run as often as the device says: "
                "inferlib quantize --method gptq rounds such models as well as it can"
            )
