"""A directory of compiled programs: a manifest and one file for each program, written whole or not at all.

Everything but the executables' own bytes is checked before it is used. Those bytes are native code: load only
directories that you made or trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout
from jax.sharding import Mesh

from inferlib.aot.compile import START, file_name
from inferlib.aot.executables import ExecutableError, loaded
from inferlib.buckets import Buckets
from inferlib.checkpoint.source import CheckpointError, read_json
from inferlib.inspection.outcome import Outcome
from inferlib.locks import locked
from inferlib.models.cache_levels import with_cache_levels
from inferlib.models.config import ModelConfig
from inferlib.models.eagle3 import Eagle3Config
from inferlib.models.quantization import Quantization
from inferlib.option_checks import policy_option
from inferlib.pallas_kernels.generations_tpu import GENERATIONS
from inferlib.programs.deployment import Deployment, layout_from_json, versions
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet, planned_keys
from inferlib.programs.start_functions import Compiled
from inferlib.sharding.mesh import Device, Parallelism
from inferlib.sharding.shards import Shards, planned_shards

_FORMAT = 12
_MANIFEST = "manifest.json"


class ArtifactError(ValueError):
    """A directory of compiled programs that cannot be written or used. The message says why."""


# ---- reading


@dataclass(frozen=True)
class Artifacts:
    """A directory of compiled programs, opened for reading."""

    folder: Path
    manifest: Mapping[str, Any]

    @staticmethod
    def open(folder: str | Path) -> Artifacts:
        """Open a directory. Raises ArtifactError if it does not exist or its manifest is damaged."""
        folder = Path(folder).expanduser()
        file = folder / _MANIFEST
        if not file.exists():
            raise ArtifactError(f"{folder} holds no compiled programs ({_MANIFEST} is missing): run inferlib compile")
        try:
            manifest = read_json(file)
        except CheckpointError as error:
            raise ArtifactError(f"{file} is damaged ({error}): run inferlib compile again") from None
        if (form := manifest.get("format")) != _FORMAT:
            raise ArtifactError(f"{file} has format {form!r}, this version of inferlib reads {_FORMAT}: compile again")
        stored = Artifacts(folder, manifest)
        with _damage_of(file):
            stored._must_be_whole()
        return stored

    def _must_be_whole(self) -> None:
        """Raise an exception of any kind unless the manifest has all parts that are read later."""
        made = self.deployment
        planned = planned_keys(made.config(planned_shards(made.parallel)), made.modes)
        if sorted(self.keys) != sorted(planned):
            raise ValueError("its programs are not those of its deployment")
        if made.slice.platform != "neuron" and not all(self.layouts):
            raise ValueError("a weight has no layout")
        names = [START] if self.manifest["start"] else []
        names += [file_name(key, made.slice) for key in self.keys]
        if not all(isinstance(entry["hash"], str) and isinstance(entry["facts"], dict) for entry in self.programs):
            raise ValueError("a program has no hash, or no facts")
        for name, entry in zip(names, self._entries, strict=True):
            if entry["file"] != name or not isinstance(entry["sha256"], str):
                raise ValueError(f"an entry is of the file {entry['file']!r} instead of {name}")
        if not all(isinstance(self.manifest[name], kind) for name, kind in (("device", str), ("versions", dict))):
            raise TypeError("device and versions are not text")

    @cached_property
    def deployment(self) -> Deployment:
        return Deployment.from_json(self.manifest["deployment"])

    @property
    def programs(self) -> list[dict[str, Any]]:
        """The manifest's entry of each program."""
        return self.manifest["programs"]

    @cached_property
    def keys(self) -> tuple[ProgramKey, ...]:
        """Its programs, in the manifest's order."""
        return tuple(ProgramKey(**entry["key"]) for entry in self.programs)

    @cached_property
    def layouts(self) -> list[Layout | None]:
        """How each weight lies in memory; None if that is for Neuron's runtime to know."""
        layouts = [weight["layout"] for weight in self.manifest["weights"]]
        return [None if layout is None else layout_from_json(layout) for layout in layouts]

    @property
    def _entries(self) -> list[Mapping[str, Any]]:
        """The entries of all files."""
        return [*filter(None, [self.manifest["start"]]), *self.programs]

    def check(
        self, model: ModelConfig, wanted: Mapping[str, Any], draft: ModelConfig | Eagle3Config | None = None
    ) -> None:
        """Raise ArtifactError, naming the first field in which the programs differ from this machine or from what is
        wanted.

        model: the checkpoint's model. wanted: settings of `LLM`, None where any will do. draft: the model
            or head that drafts.
        """
        made, target = self.deployment, self.deployment.slice
        device = jax.devices()[0]
        self._must_match("platform", target.platform, device.platform)
        if target.platform == "neuron":
            raise ArtifactError(f"{self.folder} holds programs for Neuron's own runtime, which JAX cannot load")
        self._must_match("device", self.manifest["device"], device_facts(device.device_kind, device.platform))
        for name, version in versions(target).items():
            self._must_match(f"version of {name}", self.manifest["versions"].get(name), version)
        leveled = with_cache_levels(model, policy_option(made.cache_policy))
        models = [("model", made.model, leveled), ("draft", made.draft_model or made.draft_head, draft)]
        for name, one, other in models:
            if one is None or other is None:
                continue
            if difference := _difference(asdict(one), asdict(other), name):
                self._must_match(*difference)
        settings = {**asdict(made), "parallel": made.parallel, "buckets": made.buckets}
        settings |= {"quantization": made.quantization, "draft_quantization": made.draft_quantization}
        settings |= {"max_batch": made.max_batch, "max_len": made.max_len}
        for name, value in wanted.items():
            if value is not None:
                self._must_match(name, settings[name], value)
        if len(jax.devices()) < made.parallel.devices:
            raise ArtifactError(
                f"{self.folder} is compiled for {made.parallel.devices} devices, and there are {len(jax.devices())}"
            )

    def _must_match(self, name: str, made: Any, wanted: Any) -> None:
        if made != wanted:
            raise ArtifactError(
                f"{self.folder} does not fit: {name} is {_short(made)} in its programs, and {_short(wanted)} here; "
                "run inferlib compile again, or change it here"
            )

    def load(self) -> ProgramSet:
        """Load the programs for this process's devices. Nothing is traced or compiled."""
        made = self.deployment
        shards = made.shards(jax.devices())
        layouts = [layout for layout in self.layouts if layout is not None]
        programs, devices = made.program_set(shards, layouts), self._devices(shards)
        if len(layouts) != len(programs.specs):
            raise ArtifactError(f"{self.folder / _MANIFEST} lists other weights than its model has: compile again")
        compiled = {}
        for key, entry in zip(self.keys, self.programs, strict=True):
            with self._file(entry) as data:
                executables = loaded(data, devices)
                if list(executables) != [str(key)]:
                    raise ExecutableError("it is another program than its name says")
                compiled[key] = executables[str(key)]
                _must_fit(compiled[key], programs.inputs(key), layouts)
        programs.adopt(compiled)
        return programs

    def start(self) -> Compiled:
        """Functions that load the checkpoint, if they were compiled; see `programs.start_functions.adopted`."""
        entry = self.manifest["start"]
        if entry is None:
            return {}
        devices = self._devices(self.deployment.shards(jax.devices()))
        with self._file(entry) as data:
            return loaded(data, devices)

    def _devices(self, shards: Shards) -> list[Device]:
        return list(shards.mesh.devices.flat) if isinstance(shards.mesh, Mesh) else jax.devices()[:1]

    @contextlib.contextmanager
    def _file(self, entry: Mapping[str, Any]) -> Iterator[bytes]:
        """The bytes of an entry's file, which is in this directory. Raises ArtifactError if it is not the file that was
        written, or if reading its contents within the context fails."""
        file = self.folder / entry["file"]
        inside = file.resolve().parent == self.folder.resolve() and file.is_file()
        data = file.read_bytes() if inside else b""
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            state = "damaged" if data else "missing"
            raise ArtifactError(f"{file} is {state}: run inferlib compile again")
        try:
            yield data
        except ExecutableError as error:
            raise ArtifactError(f"{file} is no use: {error}; run inferlib compile again") from error


@contextlib.contextmanager
def _damage_of(file: Path) -> Iterator[None]:
    """A context in which an error means that a manifest is damaged."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ArtifactError(f"{file} is damaged ({_short(reason)}): run inferlib compile again") from error


def _must_fit(program: jax.stages.Compiled, inputs: tuple, layouts: Sequence[Layout]) -> None:
    """Raise ExecutableError unless a program takes these arguments, and weights of these layouts."""

    def facts(tree: Any) -> list[tuple]:
        return [(tuple(x.shape), np.dtype(x.dtype)) for x in jax.tree.leaves(tree)]

    if facts(program.args_info) != facts(inputs):
        raise ExecutableError("it takes other arguments than its deployment gives")
    if [format.layout for format in program.input_formats[0][0]] != layouts:
        raise ExecutableError("its weights lie in memory in another way than the manifest says")


def device_facts(kind: str, name: str) -> str:
    """What an executable is bound to: the kind of device, and on a CPU its instruction set."""
    if name != "cpu":
        return GENERATIONS.get(kind, kind)
    info = Path("/proc/cpuinfo")
    flags = (
        next((x for x in info.read_text().splitlines() if x.startswith(("flags", "Features"))), "")
        if info.is_file()
        else ""
    )
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def _difference(made: Any, wanted: Any, path: str) -> tuple[str, Any, Any] | None:
    """Path and both values of the first field that differs."""
    if isinstance(made, Mapping) and isinstance(wanted, Mapping):
        pairs = [(f"{path}.{k}", made.get(k), wanted.get(k)) for k in {**made, **wanted}]
    elif isinstance(made, list | tuple) and isinstance(wanted, list | tuple) and len(made) == len(wanted):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(made, wanted, strict=True))]
    else:
        return (path, made, wanted) if made != wanted else None
    return next((d for name, a, b in pairs if (d := _difference(a, b, name))), None)


def _short(value: Any) -> str:
    if isinstance(value, Buckets):
        sizes = {"prefill": value.prefill, "batch": value.batch, "cache": value.cache}
        sizes |= {} if value.tile is None else {"tile": (value.tile,)}
        value = "; ".join(f"{name} {','.join(map(str, numbers))}" for name, numbers in sizes.items())
    text = (
        value
        if isinstance(value, str)
        else str(value)
        if isinstance(value, Parallelism | Quantization)
        else repr(value)
    )
    return text if len(text) < 100 else text[:97] + "..."


# ---- writing


class ArtifactWriter:
    """Builds a directory of programs beside its final place, and `commit` moves it there. A context manager.

    Programs of a directory that exists already are reused if nothing that they depend on has changed.
    """

    def __init__(self, folder: str | Path, deployment: Deployment):
        self.folder, self.deployment = Path(folder).expanduser().absolute(), deployment
        self.staging = self.folder.with_name(f".{self.folder.name}.new")
        self._replaced = self.folder.with_name(f".{self.folder.name}.old")
        self._stack = contextlib.ExitStack()
        self._previous: dict[str, dict[str, Any]] = {}
        self._hashes: dict[ProgramKey, str] = {}

    def __enter__(self) -> ArtifactWriter:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._stack:
            if not self._stack.enter_context(locked(self.folder)):
                raise ArtifactError(
                    f"another process is compiling into {self.folder}: wait for it, or give another directory"
                )
            if self._replaced.exists() and not self.folder.exists():
                self._replaced.rename(self.folder)  # an earlier commit was cut off between its two renames
            for leftover in (self.staging, self._replaced):
                shutil.rmtree(leftover, ignore_errors=True)
            if self.folder.exists() and not self.folder.is_dir():
                raise ArtifactError(f"{self.folder} is a file: give a directory, or a name that is free")
            if self.folder.exists() and any(self.folder.iterdir()):
                if not (self.folder / _MANIFEST).exists():
                    raise ArtifactError(f"{self.folder} exists and holds other things than compiled programs")
                with contextlib.suppress(ArtifactError):  # an unreadable directory is not reused
                    self._previous = {p["hash"]: p for p in Artifacts.open(self.folder).programs}
            self.staging.mkdir()
            self._stack.callback(shutil.rmtree, self.staging, ignore_errors=True)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def reuse(self, key: ProgramKey, layouts: list | None) -> dict[str, Any] | None:
        """Take over an unchanged program of the existing directory, and return its facts; else None."""
        self._hashes[key] = digest = self.deployment.program_hash(key, layouts)
        if self.deployment.slice.platform == "neuron":
            return None  # lowering is quick, and a compiler may have been installed since
        entry = self._previous.get(digest)
        if entry is None or entry.get("facts_sha256") != _digest(entry["facts"]):
            return None
        source = self.folder / file_name(key, self.deployment.slice)
        if not source.is_file() or hashlib.sha256(source.read_bytes()).hexdigest() != entry["sha256"]:
            return None
        os.link(source, self.staging / file_name(key, self.deployment.slice))
        return entry["facts"]

    def commit(self, outcomes: Sequence[Outcome], layouts: Sequence[Mapping] | None, texts: Mapping[str, str]) -> None:
        """Write the manifest and `texts` (by file name), and move the directory to its place."""
        planned = self.deployment.planned()
        weights = [
            {"name": s.name, "shape": s.shape, "dtype": s.dtype.name, "axes": s.axes, "split": _split(planned, s.axes)}
            | {"layout": layout}
            for s, layout in zip(planned.specs, layouts or [None] * len(planned.specs), strict=True)
        ]
        cache = [
            {"shape": x.shape, "dtype": x.dtype.name, "axes": x.axes, "split": _split(planned, x.axes), "ring": b.ring}
            for b in planned.plan.every_block
            for x in b.owned
        ]
        target = self.deployment.slice
        manifest = {
            "format": _FORMAT,
            "deployment": self.deployment.to_json(),
            "model_sha256": hashlib.sha256(json.dumps(asdict(self.deployment.model)).encode()).hexdigest(),
            "device": device_facts((outcomes[0].facts or {})["device_kind"], target.platform),
            "versions": versions(target),
            "weights": weights,
            "cache": cache,
            "programs": [self._entry(outcome) for outcome in outcomes],
            "start": self._file(START) if (self.staging / START).exists() else None,
        }
        for name, text in {_MANIFEST: json.dumps(manifest, indent=1), **texts}.items():
            (self.staging / name).write_text(text, encoding="utf-8")
        if self.folder.exists():
            self.folder.rename(self._replaced)
        self.staging.rename(self.folder)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _entry(self, outcome: Outcome) -> dict[str, Any]:
        file = self._file(file_name(outcome.key, self.deployment.slice))
        facts = {"facts": outcome.facts, "facts_sha256": _digest(outcome.facts)}
        return {"key": asdict(outcome.key), "hash": self._hashes[outcome.key], **file, **facts}

    def _file(self, name: str) -> dict[str, Any]:
        data = (self.staging / name).read_bytes()
        return {"file": name, "sha256": hashlib.sha256(data).hexdigest(), "nbytes": len(data)}


def _digest(value: Any) -> str:
    """The SHA-256 of a value as JSON, which is the same after it was read from JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _split(programs: ProgramSet, names: Sequence[str | None]) -> list[list[str]]:
    return [list(programs.config.shards.mesh_axes(name)) for name in names]
