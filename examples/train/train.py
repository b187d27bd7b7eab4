"""Train a small transformer, looped model or model in lanes:
`python -m examples.train.train texts.jsonl runs/b-0 --preset b`.

`runs/b-0` becomes a directory that `LLM` loads, with checkpoints, a log and curves in `training/`. The same command
again goes on from the last checkpoint, to the same losses.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.train.data import Data, prepare
from examples.train.model import FADING, PRESETS, config_of, core_steps, first_weights, flops_of, logits_of
from inferlib.checkpoint.save import save_model
from inferlib.distillation.checkpoints import Checkpoints
from inferlib.distillation.data import rows_of_step
from inferlib.distillation.record import Record
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.platforms import prepare_jax

HELD_OUT = 64  # rows that the curve's held-out loss is of


@dataclass(frozen=True)
class Settings:
    """What decides what is learned. steps: of the optimizer; 0: as many as `minutes` allow. batch: rows of a step, over
    all devices. learning_rate: the highest one. fading: of the core's state at a step, at first. state_norm: the state
    is normed after each step. core_steps: how often the core runs on average; 0: as the preset says. spread: how much
    that number varies, see `draw_steps`. dtype: of products; weights are float32."""

    preset: str = "b"
    seed: int = 0
    learning_rate: float = 1e-3
    steps: int = 2800
    minutes: float = 0.0
    batch: int = 64
    length: int = 512
    width: int = 512
    vocab: int = 4096
    injection: str = "diagonal"
    fading: float = FADING
    state_norm: bool = False
    core_steps: int = 0
    spread: float = 0.0
    dtype: str = "bfloat16"

    def __post_init__(self):
        if not self.steps and not self.minutes > 0:
            raise ConfigurationError("a run takes steps or minutes: give --steps or --minutes")
        if min(self.batch, self.length, self.width) < 1 or self.width % max(1, self.width // 64) or self.vocab < 257:
            raise ConfigurationError("batch and length are 1 at least, vocab 257, and width a multiple of 64")
        if self.batch % jax.device_count():
            raise ConfigurationError(f"a batch of {self.batch} does not divide over {jax.device_count()} devices")
        if self.injection != "diagonal" and core_steps(self.preset) == 1:
            raise ConfigurationError(f"preset {self.preset} repeats no layers, so it has no injection: leave it out")
        if not 0 < self.fading < 1:
            raise ConfigurationError(f"a state fades by a factor between 0 and 1, got {self.fading}")
        if self.fading != FADING and (core_steps(self.preset) == 1 or self.injection == "add"):
            raise ConfigurationError("only preset b with injection diagonal or linear has a state that fades")
        if self.state_norm and core_steps(self.preset) == 1:
            raise ConfigurationError(
                f"preset {self.preset} repeats no layers, so it has no state: leave state_norm out"
            )
        if self.core_steps and (core_steps(self.preset) == 1 or self.core_steps < 2):
            raise ConfigurationError("core_steps is 2 at least, and for preset b alone: leave it out of others")
        if not 0 <= self.spread <= 2:
            raise ConfigurationError(f"the numbers of steps spread by 0 to 2, got {self.spread}")
        if self.spread and core_steps(self.preset) == 1:
            raise ConfigurationError(f"preset {self.preset} repeats no layers, so it takes no --spread: leave it out")
        if not 0 < self.learning_rate < 1:
            raise ConfigurationError(f"the learning rate is between 0 and 1, got {self.learning_rate}")

    @property
    def mean_steps(self) -> int:
        """How often the core runs on average."""
        return self.core_steps or core_steps(self.preset)

    @property
    def warmup(self) -> int:
        return max(1, min(200, self.steps // 10))

    def rate(self, step: int) -> float:
        """Warm-up, then a cosine to a tenth."""
        done = max(0, step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * min(1.0, (step + 1) / self.warmup) * (0.55 + 0.45 * math.cos(math.pi * done))


def draw_steps(mean: int, spread: float, rng: np.random.Generator) -> int:
    """How often the core runs for a batch: Poisson, at least once.

    With a spread the mean varies too, by a lognormal factor of mean 1 with that standard deviation of its logarithm, so
    that many steps are rare but not unseen (Geiping et al. 2025, "Scaling up Test-Time Compute with Latent Reasoning",
    section 3.3, which takes 0.5).
    """
    if not spread:
        return max(1, rng.poisson(mean))
    return 1 + rng.poisson((mean - 1) * math.exp(rng.normal(-(spread**2) / 2, spread)))


@dataclass
class Run:
    """A run of training, in `out`."""

    settings: Settings
    data: Data
    out: Path
    save_every: int = 500
    log_every: int = 20

    def complete(self) -> dict[str, Any]:
        """Train from the newest checkpoint on, write the model, and say how it went. A loss that is no number ends the
        run: it has diverged."""
        folder, settings = self.out / "training", self.settings
        with Checkpoints(folder / "checkpoints") as checkpoints:
            state, begin = checkpoints.newest(self.first_state())
            with Record(folder / "log.jsonl", settings.steps, begin, show=True, title=self.out.name) as record:
                losses: list[jax.Array] = []
                for number in range(begin, settings.steps):
                    state, loss = self.step(state, *self.batch(number))
                    losses.append(loss)
                    done, last = number + 1, number + 1 == settings.steps
                    saves = done % self.save_every == 0 or last
                    if done % self.log_every == 0 or saves:
                        measured = {"held_out": self.held_out(state["weights"])} if saves else {}
                        mean, losses = float(np.mean(jax.device_get(losses))), []
                        record.add(done, (done - begin) * settings.batch * settings.length, loss=mean, **measured)
                        if not math.isfinite(mean):
                            break
                    if saves:
                        checkpoints.save(done, state)
            result = {"parameters": self.model.parameters, **record.entries[-1]}
        result["diverged"] = not math.isfinite(result["loss"])
        plot({self.out.name: record.entries}, folder / "loss.png")
        write_csv(record.entries, folder / "log.csv")
        if not result["diverged"]:
            save_model(self.out, self.hf, self.model, state["weights"])
            self.data.tokenizer.save(self.out)
        (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return result

    @cached_property
    def hf(self) -> dict[str, Any]:
        s = self.settings
        vocab = self.data.tokenizer.vocab_size
        options = {"injection": s.injection, "state_norm": s.state_norm, "steps": s.core_steps}
        return config_of(s.preset, vocab, width=s.width, length=s.length, **options)

    @cached_property
    def model(self) -> AbstractModel:
        """In the dtype of products."""
        return abstract_model(config_from_hf(self.hf), self.settings.dtype)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()), ("data",))

    def everywhere(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def shared(self, rows: np.ndarray) -> jax.Array:
        """Rows, each device with its part."""
        return jax.device_put(rows, NamedSharding(self.mesh, PartitionSpec("data")))

    def first_state(self) -> dict[str, Any]:
        weights = first_weights(
            abstract_model(config_from_hf(self.hf), "float32"), self.settings.seed, self.settings.fading
        )
        return self.everywhere({"weights": weights, "optimizer": self.optimizer.init(weights)})

    def batch(self, number: int) -> tuple[jax.Array, np.int32, np.float32]:
        """Of a step: its rows, how often the core runs (the same for all rows), and the learning rate."""
        settings = self.settings
        rng = np.random.default_rng((settings.seed, number))
        count = draw_steps(settings.mean_steps, settings.spread, rng)
        rows = rows_of_step(self.data.rows, number, settings.batch, settings.seed)
        return self.shared(rows), np.int32(count), np.float32(settings.rate(number))

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW without its learning rate; only products of layers decay."""
        decays = tuple(bool(weight.contracting) for weight in self.model.weights)
        adam = optax.scale_by_adam(b1=0.9, b2=0.95)
        return optax.chain(optax.clip_by_global_norm(1.0), adam, optax.add_decayed_weights(0.1, decays))

    @cached_property
    def step(self) -> Any:
        """(state, rows [B, T + 1], steps of the core, learning rate) -> (state, loss). XLA adds up the gradients of the
        devices, as weights are on each and rows are not."""

        def step(state, rows, count, rate):
            loss, gradients = jax.value_and_grad(self.loss)(state["weights"], rows, count)
            updates, optimizer = self.optimizer.update(gradients, state["optimizer"], state["weights"])
            weights = jax.tree.map(lambda w, u: w - rate * u, state["weights"], updates)
            return {"weights": weights, "optimizer": optimizer}, loss

        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(step, donate_argnums=0, out_shardings=whole)

    def loss(self, weights: Sequence[jax.Array], rows: jax.Array, count: jax.Array) -> jax.Array:
        """Mean cross entropy of the next token, in nats."""
        logits = logits_of(self.model, weights, rows[:, :-1], count)
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    def held_out(self, weights: Sequence[jax.Array]) -> float:
        """The loss on the first rows that are held out, with as many steps of the core as in training on average."""
        settings, rows = self.settings, self.data.held_out[:HELD_OUT]
        rows = np.resize(rows, (-(-len(rows) // settings.batch) * settings.batch, rows.shape[1]))
        mean = np.int32(settings.mean_steps)
        parts = [
            self.measured(weights, self.shared(part), mean) for part in np.split(rows, len(rows) // settings.batch)
        ]
        return float(np.mean(jax.device_get(parts)))

    @cached_property
    def measured(self) -> Any:
        return jax.jit(self.loss)

    def steps_in(self, minutes: float, trials: int = 20) -> int:
        """How many steps take so long; compiling is not counted."""
        state, start = self.first_state(), 0.0
        for number in range(-2, trials):
            if number == 0:
                jax.block_until_ready(state)
                start = time.perf_counter()
            state, _ = self.step(state, *self.batch(max(number, 0)))
        jax.block_until_ready(state)
        return max(1, int(60 * minutes * trials / (time.perf_counter() - start)))


def open_run(texts: Path, out: Path, settings: Settings, *, data: Path | None = None, **options: int) -> Run:
    """The run in `out`, new or to go on with. data: where tokens are, for several runs; by default beside `out`.

    Raises ConfigurationError if `out` has something else than a run with these settings.
    """
    file, prepared = out / "training" / "settings.json", data or out.parent / "data"
    run = Run(settings, prepare(texts, prepared, settings.vocab, settings.length), out, **options)
    if file.exists():
        defaults = {field.name: field.default for field in fields(Settings)}  # of fields that older runs lack
        before = defaults | json.loads(file.read_text(encoding="utf-8"))
        steps = before["steps"] if not settings.steps else settings.steps
        if before != asdict(settings) | {"steps": steps}:
            raise ConfigurationError(f"{out} has a run with other settings, {before}: give these, or another directory")
    elif out.exists() and any(out.iterdir()):
        raise ConfigurationError(f"{out} is not empty and has no run to go on with: give another directory")
    else:
        steps = settings.steps or run.steps_in(settings.minutes)
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(asdict(settings) | {"steps": steps}, indent=2) + "\n", encoding="utf-8")
    run.settings = replace(settings, steps=steps)  # the same run, as it may have compiled its step
    return run


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Draw the losses of runs, by the entries of their logs: lines in training, dots on held-out rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, entries in runs.items():
        (line,) = axes.plot([e["step"] for e in entries], [e["loss"] for e in entries], label=name, linewidth=1)
        measured = [(e["step"], e["held_out"]) for e in entries if "held_out" in e]
        axes.plot(*zip(*measured, strict=True), "o", color=line.get_color(), markersize=4)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def write_csv(entries: Sequence[Mapping[str, Any]], file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, ["step", "loss", "held_out", "tokens_per_s"])
        writer.writeheader()
        writer.writerows(entries)


def main() -> None:
    prepare_jax()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="of examples/collect_texts.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="folder of tokens that runs share; by default beside out")
    parser.add_argument("--preset", choices=PRESETS, default="b")
    parser.add_argument("--injection", choices=("diagonal", "linear", "add"), default="diagonal", help="of preset b")
    parser.add_argument("--fading", type=float, default=FADING, help="of the core's state at a step, at first")
    parser.add_argument("--state-norm", action="store_true", help="norm the core's state after each step")
    parser.add_argument("--core-steps", type=int, default=0, help="of the core on average; default: 8")
    parser.add_argument("--spread", type=float, default=0.0, help="of the logarithm of the number of the core's steps")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of products; float32 on CPUs")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=Settings.steps)
    length.add_argument("--minutes", type=float, default=0.0, help="instead of steps; compiling is not counted")
    for name, kind in (("seed", int), ("learning-rate", float), ("batch", int), ("length", int), ("width", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Settings, name.replace("-", "_")))
    parser.add_argument("--vocab", type=int, default=Settings.vocab)
    parser.add_argument("--save-every", type=int, default=500)
    options = vars(parser.parse_args())
    texts, out, data, save = (options.pop(name) for name in ("texts", "out", "data", "save_every"))
    options["steps"] *= not options["minutes"]
    options["dtype"] = options["dtype"] or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        run = open_run(texts, out, Settings(**options), data=data, save_every=save)
    except ConfigurationError as error:
        raise SystemExit(f"{error}") from None
    operations = flops_of(run.model, run.settings.length) / 1e6
    print(
        f"{out}: {run.model.parameters:,} parameters, about {operations:.0f} MFLOP a token, {run.settings.steps} steps"
    )
    print(json.dumps(run.complete()))


if __name__ == "__main__":
    main()
