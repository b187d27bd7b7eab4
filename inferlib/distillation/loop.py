"""The loop of every run of training: devices, optimizer, checkpoints and log."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inferlib.distillation.checkpoints import Checkpoints
from inferlib.distillation.record import Record
from inferlib.distillation.settings import TrainingSettings
from inferlib.option_checks import ConfigurationError

DATA = "data"  # the mesh axis


def product_dtype(dtype: str | None) -> str:
    """The dtype of a run's products: as asked for, by default float32 on CPUs, else bfloat16. Raises ConfigurationError
    for another."""
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigurationError(f"dtype must be float32 or bfloat16, got {dtype!r:.100}")
    return dtype


def check_length(settings: TrainingSettings, context: int) -> None:
    """Raise ConfigurationError if rows exceed the model's context."""
    if settings.length > context:
        raise ConfigurationError(f"a row of {settings.length} tokens exceeds the model's context, {context}")


def check_devices(settings: TrainingSettings) -> None:
    """Raise ConfigurationError if the settings do not fit the devices that there are."""
    devices = jax.device_count() if settings.devices is None else settings.devices
    if devices > jax.device_count():
        raise ConfigurationError(f"{devices} devices are asked for, and there are {jax.device_count()}")
    if settings.batch % devices:
        raise ConfigurationError(f"a batch of {settings.batch} rows does not divide over {devices} devices")


def check_run(out: Path, file: Path, options: dict[str, Any]) -> None:
    """Raise ConfigurationError if `out` has something else than a run with these options. file: its settings."""
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        if odd := [name for name in options if before.get(name) != options[name]]:
            raise ConfigurationError(
                f"{out} has a run with {odd[0]} {before.get(odd[0])!r}, not {options[odd[0]]!r}: give it the same "
                "options, or another directory"
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} is not empty and has no run to go on with: give another directory")


@dataclass(frozen=True)
class TrainingLoop:
    """A run's loop. folder: of its checkpoints and its log. title: of its bar, if it shows progress."""

    settings: TrainingSettings
    folder: Path
    title: str
    progress: bool

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()[: self.settings.devices]), (DATA,))

    @property
    def split(self) -> NamedSharding:
        """Rows, split over the devices."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    @property
    def everywhere(self) -> NamedSharding:
        """An array that each device has."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        settings, warmup = self.settings, min(self.settings.warmup, self.settings.steps // 2)
        rate = optax.warmup_cosine_decay_schedule(0.0, settings.lr, warmup, settings.steps, settings.lr / 10)
        return optax.chain(
            optax.clip_by_global_norm(settings.clip), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.01)
        )

    def first_state(self, weights: Any) -> dict[str, Any]:
        """The state before the first step, of a tree of float32 weights."""
        weights = jax.device_put(weights, self.everywhere)
        return {"weights": weights, "optimizer": jax.device_put(self.optimizer.init(weights), self.everywhere)}

    def updated(self, state: dict[str, Any], gradients: Any) -> dict[str, Any]:
        """The state after a step with these gradients. Traceable."""
        updates, optimizer = self.optimizer.update(gradients, state["optimizer"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "optimizer": optimizer}

    def run(
        self,
        first: Any,
        step: Callable[[Any, jax.Array], tuple[Any, Any]],
        batch: Callable[[int], np.ndarray],
        save: Callable[[Any], dict[str, Any]],
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Train to the last step, from the newest checkpoint on. Returns the last state and the entries of the log.

        first: the state before the first step. step: (state, rows) -> (state, a NamedTuple of metrics). batch: the rows
        of a step. save: called with the state at each checkpoint; what it returns joins the log's line.
        """
        with Checkpoints(self.folder / "checkpoints") as checkpoints:
            state, begin = checkpoints.newest(first)
            log, steps = self.folder / "log.jsonl", self.settings.steps
            with Record(log, steps, begin, show=self.progress, title=self.title) as record:
                state = self._train(state, begin, step, batch, record, checkpoints, save)
        return state, record.entries

    def _train(self, state, begin: int, step, batch, record: Record, checkpoints: Checkpoints, save) -> Any:
        """The state after the last step. The host waits for metrics of steps that the devices are done with only."""
        settings, waiting = self.settings, []
        for number in range(begin, settings.steps):
            state, metrics = step(state, jax.device_put(batch(number), self.split))
            waiting.append(metrics)
            done = number + 1
            if len(waiting) > settings.log_every:
                self._log(record, done - 1, begin, waiting[:-1])
                waiting = waiting[-1:]
            if done % settings.save_every == 0 or done == settings.steps:
                self._log(record, done, begin, waiting, **save(state))
                checkpoints.save(done, state)
                waiting = []
        return state

    def _log(self, record: Record, step: int, begin: int, metrics: Sequence[Any], **others: Any) -> None:
        """Add the mean metrics of steps up to `step`."""
        every = jax.device_get(metrics)
        means = {name: np.mean([getattr(m, name) for m in every], axis=0).tolist() for name in every[0]._fields}
        record.add(step, (step - begin) * self.settings.batch * self.settings.length, **means, **others)
