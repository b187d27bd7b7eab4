"""How a model is run: sizes, buckets and choices of the engine."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args, get_type_hints

import jax
import numpy as np

from inferlib.models.batch import kernel_lacks
from inferlib.models.config import MlaSpec, ModelConfig
from inferlib.ops.backend import Backend
from inferlib.ops.quantized import SCHEMES
from inferlib.pallas_kernels.generations_tpu import GENERATIONS
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

DTYPES = ("float32", "bfloat16", "float16")
# What keys and values can be kept in beside these.
KV_CACHE_DTYPES = {name: np.dtype(SCHEMES[name].values) for name in ("int8", "fp8")}
# Where the kernels that a `Backend` can name run; a CPU interprets them all.
_RUNS_ON = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "pallas": "gpu", "nki": "neuron"}
# Operations that the option `backend` can leave to XLA.
OPERATIONS = tuple(name for name, kind in get_type_hints(Backend).items() if "xla" in get_args(kind))


class ConfigurationError(ValueError):
    """An engine setting that cannot work."""


def chip_of(device: jax.Device) -> tuple[int, str | None]:
    """The last that `EngineConfig.make` is told, of a device: its cores, and the generation of a TPU."""
    return getattr(device, "num_cores", None) or 1, GENERATIONS.get(device.device_kind)


def check_dtype(dtype: str) -> None:
    """Raises ConfigurationError for a type that weights cannot have."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")


def check_kv_cache_dtype(name: str | None) -> None:
    """Raises ConfigurationError for what keys and values cannot be kept in; None is the model's dtype."""
    if name is not None and name not in KV_CACHE_DTYPES:
        raise ConfigurationError(
            f"kv_cache_dtype {name!r} is not supported; choose one of {', '.join(KV_CACHE_DTYPES)}, or leave it out "
            "for the model's own dtype"
        )


def check_backend(backend: Backend, platform: str) -> None:
    """Raises ConfigurationError for a kernel that does not run on the platform."""
    for name, kernel in vars(backend).items():
        if platform not in ("cpu", _RUNS_ON.get(kernel, platform)):
            raise ConfigurationError(
                f"backend {name}={kernel!r} is a kernel for platform {_RUNS_ON[kernel]!r}, and this is {platform!r}: "
                f"choose {name}='xla', or leave backend to EngineConfig.make"
            )


def backend_option(option: str) -> str:
    """The option in one spelling, whatever the order of its parts. Raises ConfigurationError for what is none."""
    if option in ("auto", "xla"):
        return option
    known = [f"{name}=xla" for name in OPERATIONS]
    parts = {part.strip() for part in option.split(",")} if isinstance(option, str) else {repr(option)}
    if not parts <= set(known):
        raise ConfigurationError(
            f"backend {option!r} is neither 'auto' nor 'xla' nor of the form '{','.join(known[:2])}'; operations are "
            f"{', '.join(OPERATIONS)}"
        )
    return "xla" if parts == set(known) else ",".join(part for part in known if part in parts)


def with_option(backend: Backend, option: str) -> Backend:
    """Apply a user's `backend` option to a platform's default. "auto" changes nothing; "xla" leaves all `OPERATIONS` to
    XLA; "matmul=xla,decode_attention=xla" leaves these.

    A kernel that works with another goes with it: chunk writes with either attention, `expert_mlp` with grouped
    products if weights are quantised in groups, `qkv_attention`, which includes decode attention, with that. Raises
    ConfigurationError for any other option.
    """
    option = backend_option(option)
    if option == "auto":
        return backend
    names = {part.removesuffix("=xla") for part in option.split(",")} if option != "xla" else set(OPERATIONS)
    names |= {"qkv_attention"} if "decode_attention" in names else set()
    return replace(backend, **dict.fromkeys(names, "xla"))


@dataclass(frozen=True)
class Buckets:
    """The static shapes programs are compiled for; each ascending.

    prefill: tokens of a prefill chunk; longer prompts go chunk by chunk. batch: decode rows. cache: positions
    that attention reads; the last is the longest sequence.
    """

    prefill: tuple[int, ...]
    batch: tuple[int, ...]
    cache: tuple[int, ...]

    def __post_init__(self):
        for name in ("prefill", "batch", "cache"):
            sizes = getattr(self, name)
            ints = isinstance(sizes, tuple | list) and all(type(size) is int for size in sizes)
            if not sizes or not ints or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ConfigurationError(f"{name} buckets must be ascending positive sizes, got {sizes!r}")
            object.__setattr__(self, name, tuple(sizes))

    @staticmethod
    def default(max_batch: int, max_len: int, *, ragged: bool = False, multiple: int = 1) -> Buckets:
        """Powers of four up to the limits; `ragged`: attention reads live positions only, one cache bucket does.

        multiple: of what prefill buckets must be multiples.
        """
        if max_batch < 1 or max_len < 2:
            raise ConfigurationError(f"max_batch must be at least 1 and max_len at least 2, got {max_batch}, {max_len}")
        return Buckets(
            prefill=tuple(sorted({rounded_up(size, multiple) for size in _powers(32, min(512, max_len))})),
            batch=_powers(1, max_batch),
            cache=(max_len,) if ragged else _powers(256, max_len),
        )


def _powers(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 4
    return (*sizes, last)


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pick(sizes: tuple[int, ...], need: int) -> int:
    """The smallest bucket that holds `need`; `need` must not exceed the largest."""
    return next(size for size in sizes if size >= need)


@dataclass(frozen=True)
class EngineConfig:
    """max_batch: sequences decoded together; max_len: longest prompt plus output, in tokens.

    decode_steps: tokens per row and dispatch of a decode program. in_flight: dispatches the host runs ahead
    of the results it has seen. scan: repeating layers are stacked and scanned instead of unrolled.
    platform: "cpu", "gpu", "tpu", "neuron". free_layouts: the compiler chooses how weights lie in memory.
    kv_cache_dtype: of keys and values, "int8" or "fp8" with a scale for each position and head, None for the model's
    dtype. shards: the mesh; each of its replicas holds an equal share of the rows. expert_load: programs count the
    tokens of each expert.
    """

    max_batch: int
    max_len: int
    buckets: Buckets
    platform: str = "cpu"
    decode_steps: int = 8
    in_flight: int = 2
    scan: bool = False
    free_layouts: bool = False
    kv_cache_dtype: str | None = None
    backend: Backend = field(default_factory=Backend)
    shards: Shards = field(default_factory=Shards)
    expert_load: bool = False

    def __post_init__(self):
        check_kv_cache_dtype(self.kv_cache_dtype)
        check_backend(self.backend, self.platform)
        for name in ("max_batch", "decode_steps", "in_flight"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_batch % (replicas := self.shards.replicas):
            able = rounded_up(self.max_batch, replicas)
            raise ConfigurationError(
                f"max_batch {self.max_batch} does not divide over {replicas} replicas: take a multiple, such as {able}"
            )
        if self.max_len < 2:
            raise ConfigurationError(f"max_len must hold a prompt token and a new one, got {self.max_len}")
        if self.buckets.batch[-1] != self.max_batch:
            raise ConfigurationError(
                f"the largest batch bucket ({self.buckets.batch[-1]}) must equal max_batch ({self.max_batch})"
            )
        if self.buckets.cache[-1] != self.max_len:
            raise ConfigurationError(
                f"the largest cache bucket ({self.buckets.cache[-1]}) must equal max_len ({self.max_len})"
            )
        dealt = self.shards.size(axes.TOKENS)
        if odd := [size for size in self.buckets.prefill if size % dealt]:
            raise ConfigurationError(
                f"prefill buckets are dealt out to {dealt} devices, which {odd} do not allow: take multiples, such as "
                f"{sorted({rounded_up(size, dealt) for size in odd})}"
            )
        if self.buckets.prefill[-1] > rounded_up(self.max_len, dealt):
            raise ConfigurationError(
                f"the largest prefill bucket ({self.buckets.prefill[-1]}) exceeds max_len ({self.max_len})"
            )

    @property
    def counted(self) -> bool:
        """Decode programs run all their steps: where a device loop would wait for the host to look at its condition."""
        return self.platform == "gpu"

    @cached_property
    def rows(self) -> int:
        """Rows of each replica."""
        return self.max_batch // self.shards.replicas

    @cached_property
    def row_buckets(self) -> tuple[int, ...]:
        """Batch buckets of each replica."""
        return tuple(sorted({-(-size // self.shards.replicas) for size in self.buckets.batch}))

    def most_chunks(self, width: int) -> int:
        """How many prefill chunks of `width` tokens a replica takes in one step: the tokens of the longest chunk."""
        return max(1, min(self.rows, self.buckets.prefill[-1] // width))

    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """(P, C) of each replica: one chunk of each size, and as many short ones as hold the longest's tokens."""
        shapes = {(p, c) for c in self.buckets.prefill for p in (1, self.most_chunks(c))}
        return tuple(sorted(shapes, key=lambda s: (s[1], s[0])))

    @staticmethod
    def make(
        platform: Literal["cpu", "gpu", "tpu", "neuron"],
        max_batch: int,
        max_len: int,
        buckets: Buckets | None = None,
        shards: Shards | None = None,
        model: ModelConfig | None = None,
        kv_cache_dtype: str | None = None,
        backend: str = "auto",
        cores: int = 1,
        generation: str | None = None,
    ):
        """Defaults of a platform: scanned layers and free layouts on TPU; fewer steps per dispatch on GPU, where they
        are counted and a row that ends keeps its place until the last; a single one on Trainium, which has no loops.
        model: what will be run; cache buckets are finer where attention of its layers reads all of a bucket. backend:
        see `with_option`. cores: of a device; generation: of TPUs, such as v7x."""
        max_batch, max_len = _whole("max_batch", max_batch), _whole("max_len", max_len)
        if not isinstance(buckets, Buckets | None):
            raise ConfigurationError(f"buckets must be Buckets(prefill=..., batch=..., cache=...), got {buckets!r}")
        shards = shards or Shards()
        chosen = with_option(Backend.for_platform(platform, shards, cores, generation), backend)
        ragged, dealt = chosen.decode_attention == "pallas_gpu", shards.size(axes.TOKENS)
        if ragged and model is not None:
            scaled = kv_cache_dtype is not None
            lacks = [kernel_lacks(layer.attention, chosen, "decode_attention", scaled) for layer in model.layers]
            # What is in chunks keeps a ring, read whole. Prefill expands all latents of a bucket.
            read_live = (not lack or layer.attention.reach for lack, layer in zip(lacks, model.layers, strict=True))
            latent = any(isinstance(layer.attention, MlaSpec) for layer in model.layers)
            ragged = all(read_live) and not latent
        buckets = buckets or Buckets.default(max_batch, max_len, ragged=ragged, multiple=dealt)
        return EngineConfig(
            max_batch,
            max_len,
            buckets,
            platform=platform,
            decode_steps={"gpu": 4, "neuron": 1}.get(platform, 8),
            scan=platform == "tpu",
            free_layouts=platform == "tpu",
            kv_cache_dtype=kv_cache_dtype,
            backend=chosen,
            shards=shards,
        )


def _whole(name: str, size) -> int:
    try:
        return operator.index(size)
    except TypeError:
        raise ConfigurationError(f"{name} must be a whole number, got {size!r}") from None
