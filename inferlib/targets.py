"""Targets: the chips and slices for which programs are planned and compiled, as data with sources.

Names follow the clouds and the TPU compiler: `v5e-8` counts what the cloud counts (chips, or TensorCores for v4, v5p
and v7x), `v5e:2x4` is a topology of chips. Nothing here touches a device or a compiler.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

from inferlib.pallas_kernels.generations_tpu import CORES, SCRATCH_BYTES, VMEM_BYTES

_GIB = 1024**3
_MIB = 1024**2

Platform = Literal["cpu", "gpu", "tpu", "neuron"]


class TargetError(ValueError):
    """A target that does not exist or cannot do what is asked. The message says which can."""


@dataclass(frozen=True)
class Chip:
    """One chip's published figures; zero where nothing is published. Bandwidths in bytes/s, times in s.

    hbm_bytes: bytes that a program may use. vmem_bytes: on-chip memory of one core that kernels address. scratch_bytes:
    the part of vmem_bytes that the compiler sets aside; the rest has room for weights that are fetched ahead. flops:
    FLOP/s by dtype of the operands; a dtype that is not listed runs at the rate of bfloat16. devices: JAX devices per
    chip, which share its figures equally. cores: computing cores of a device, each with its own on-chip memory. links,
    link_bandwidth: number of ports to neighbours, and bandwidth of one in one direction. torus: dimensions of the
    network, 0 for a switch. ring: an axis closes to a ring if its size is a multiple of this (0: never). die_bandwidth:
    between the devices of a chip, in one direction. hop_latency: of an exchange between neighbours, or of one phase
    over a switch. dcn_bandwidth: this chip's share of its host's network.
    """

    name: str
    platform: Platform
    source: str
    hbm_bytes: int = 0
    hbm_bandwidth: float = 0.0
    vmem_bytes: int = 0
    scratch_bytes: int = 0
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    devices: int = 1
    cores: int = 1
    links: int = 0
    link_bandwidth: float = 0.0
    torus: int = 0
    ring: int = 0
    die_bandwidth: float = 0.0
    hop_latency: float = 0.0
    dcn_bandwidth: float = 0.0

    def rate(self, dtype: str) -> float:
        """FLOP/s of a matrix product of this dtype."""
        return self.flops.get(dtype) or self.flops.get("bfloat16", 0.0)


@dataclass(frozen=True)
class Target:
    """A slice of chips. topology: chips along each axis of the network.

    topology_name, topology_options: arguments of `jax.experimental.topologies.get_topology_desc` on TPUs; elsewhere the
    name is empty. accelerator_type: the cloud's name, which the TPU compiler reads from TPU_ACCELERATOR_TYPE.
    """

    name: str
    chip: Chip
    topology: tuple[int, ...]
    topology_name: str = ""
    accelerator_type: str = ""
    topology_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def platform(self) -> Platform:
        return self.chip.platform

    @property
    def chips(self) -> int:
        return prod(self.topology)

    @property
    def devices(self) -> int:
        """The number of JAX devices, of which a mesh consists."""
        return self.chips * self.chip.devices

    @property
    def hbm_bytes(self) -> int:
        """Usable bytes of one device."""
        return self.chip.hbm_bytes // self.chip.devices

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes/s of one device."""
        return self.chip.hbm_bandwidth / self.chip.devices

    def rate(self, dtype: str) -> float:
        """FLOP/s of one device in a matrix product of this dtype."""
        return self.chip.rate(dtype) / self.chip.devices

    def __str__(self) -> str:
        return self.name


# "Typically around 1us" for a hop: https://jax-ml.github.io/scaling-book/sharding. Assumed for Trainium too.
_HOP_LATENCY = 1e-6
_CLOUD = "https://cloud.google.com/tpu/docs/"
_NEURON = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-hardware/"

# Usable HBM is what a TPU's compiler (libtpu 0.0.42) calls available (v4: nominal), and what a GPU's driver reports.
# Link bandwidths are the published sums over a chip's ports and both directions, divided. Rates by dtype are published.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("cpu", "cpu", source="the machine it runs on"),
        Chip("cuda", "gpu", source="the machine it runs on"),
        Chip(
            "h100",
            "gpu",
            source="https://www.nvidia.com/en-us/data-center/h100 (SXM)",
            hbm_bytes=79 * _GIB,
            hbm_bandwidth=3.35e12,
            flops={"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 67e12},
            links=1,
            link_bandwidth=450e9,
            hop_latency=2.8e-6,  # measured: half of a one-token NCCL all-reduce, which takes 13 to 19 us on four H200
        ),
        Chip(
            "h200",
            "gpu",
            source="https://www.nvidia.com/en-us/data-center/h200 (SXM)",
            hbm_bytes=139 * _GIB,
            hbm_bandwidth=4.8e12,
            flops={"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 67e12},
            links=1,
            link_bandwidth=450e9,
            hop_latency=2.8e-6,
        ),
        Chip(
            "v4",
            "tpu",
            source=f"{_CLOUD}v4; links: https://jax-ml.github.io/scaling-book/tpus",
            hbm_bytes=32 * _GIB,
            hbm_bandwidth=1.2e12,
            vmem_bytes=VMEM_BYTES["v4"],
            scratch_bytes=SCRATCH_BYTES["v4"],
            flops={"bfloat16": 275e12, "int8": 275e12},
            cores=CORES["v4"],
            links=6,
            link_bandwidth=45e9,
            torus=3,
            ring=4,
            hop_latency=_HOP_LATENCY,
        ),
        Chip(
            "v5e",
            "tpu",
            source=f"{_CLOUD}v5e",
            hbm_bytes=int(15.75 * _GIB),
            hbm_bandwidth=819e9,
            vmem_bytes=VMEM_BYTES["v5e"],
            scratch_bytes=SCRATCH_BYTES["v5e"],
            flops={"bfloat16": 197e12, "int8": 393e12},
            links=4,
            link_bandwidth=50e9,
            torus=2,
            ring=16,
            hop_latency=_HOP_LATENCY,
            dcn_bandwidth=3.125e9,
        ),
        Chip(
            "v5p",
            "tpu",
            source=f"{_CLOUD}v5p",
            hbm_bytes=int(95.74 * _GIB),
            hbm_bandwidth=2765e9,
            vmem_bytes=VMEM_BYTES["v5p"],
            scratch_bytes=SCRATCH_BYTES["v5p"],
            flops={"bfloat16": 459e12, "int8": 918e12, "float8": 459e12},
            cores=CORES["v5p"],
            links=6,
            link_bandwidth=100e9,
            torus=3,
            ring=4,
            hop_latency=_HOP_LATENCY,
            dcn_bandwidth=6.25e9,
        ),
        Chip(
            "v6e",
            "tpu",
            source=f"{_CLOUD}v6e",
            hbm_bytes=int(31.25 * _GIB),
            hbm_bandwidth=1638e9,
            vmem_bytes=VMEM_BYTES["v6e"],
            scratch_bytes=SCRATCH_BYTES["v6e"],
            flops={"bfloat16": 918e12, "int8": 1836e12, "float8": 918e12},
            links=4,
            link_bandwidth=100e9,
            torus=2,
            ring=16,
            hop_latency=_HOP_LATENCY,
            dcn_bandwidth=12.5e9,
        ),
        Chip(
            "v7x",
            "tpu",
            source=f"{_CLOUD}tpu7x",
            hbm_bytes=int(2 * 94.75 * _GIB),
            hbm_bandwidth=7380e9,
            vmem_bytes=VMEM_BYTES["v7x"],
            scratch_bytes=SCRATCH_BYTES["v7x"],
            flops={"bfloat16": 2307e12, "float8": 4614e12},
            devices=2,
            links=6,
            link_bandwidth=100e9,
            torus=3,
            ring=4,
            die_bandwidth=600e9,  # six times a link, by the same page
            hop_latency=_HOP_LATENCY,
            dcn_bandwidth=12.5e9,
        ),
        # Devices are the logical cores of the default configuration (LNC 2), each a quarter of a chip.
        Chip(
            "trn2",
            "neuron",
            source=f"{_NEURON}trainium2.html; 4 of 6 links join the 4x4 torus of an instance",
            hbm_bytes=96 * _GIB,
            hbm_bandwidth=2.9e12,
            vmem_bytes=28 * _MIB,
            scratch_bytes=28 * _MIB,
            flops={"bfloat16": 667e12, "float8": 1299e12, "float32": 181e12},
            devices=4,
            links=4,
            link_bandwidth=128e9,
            torus=2,
            ring=4,
            die_bandwidth=2.9e12 / 4,
            hop_latency=_HOP_LATENCY,
        ),
        Chip(
            "trn3",
            "neuron",
            source=f"{_NEURON}trainium3.html",
            hbm_bytes=144 * _GIB,
            hbm_bandwidth=4.9e12,
            vmem_bytes=32 * _MIB,
            scratch_bytes=32 * _MIB,
            flops={"bfloat16": 671e12, "mxfp8": 2517e12, "mxfp4": 2517e12, "float32": 183e12},
            devices=4,
            die_bandwidth=4.9e12 / 4,
            hop_latency=_HOP_LATENCY,
        ),
    )
}


# ---- slices

_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))


def _cubes(most: int) -> tuple[tuple[int, ...], ...]:
    """Slices of a 3-D torus of up to `most` chips, ascending: parts of a cube of 4 x 4 x 4 chips, then whole cubes."""
    sizes = [4 * n for n in range(1, most // 64 + 1)]
    parts = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    whole = [(a, b, c) for a in sizes for b in sizes if b >= a and a * b * b <= most for c in sizes if c >= b]
    return (*parts, *(t for t in whole if prod(t) <= most))


@dataclass(frozen=True)
class _Generation:
    """The slices of a chip. unit: the cloud's count per chip. prefix: prefix of the cloud's or a GPU's names. compiler:
    prefix of the TPU compiler's names. options: the `Target.topology_options`."""

    chip: Chip
    topologies: tuple[tuple[int, ...], ...]
    unit: int = 1
    prefix: str = ""
    compiler: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @cached_property
    def by_count(self) -> dict[int, tuple[int, ...]]:
        """The topology of each cloud count: the most cubic one."""
        nearest: dict[int, tuple[int, ...]] = {}
        for topology in sorted(self.topologies, key=sum):
            nearest.setdefault(prod(topology) * self.unit, topology)
        return dict(sorted(nearest.items()))

    def target(self, topology: tuple[int, ...]) -> Target:
        chips = prod(topology)
        if self.chip.platform != "tpu":
            name = self.prefix + self.chip.name
            return Target(name if chips == 1 else f"{name}-{chips}", self.chip, topology)
        dims = "x".join(map(str, topology))
        single = {"chips_per_host_bounds": (1, 1, 1)} if chips == 1 else {}
        return Target(
            f"{self.chip.name}:{dims}",
            self.chip,
            topology,
            topology_name=f"{self.compiler}:{dims}",
            accelerator_type=f"{self.prefix}-{chips * self.unit}",
            topology_options={**self.options, **single},
        )

    def names(self) -> tuple[str, ...]:
        """The cloud's name for each power of two of chips."""
        counts = [n for n in self.by_count if (n & (n - 1)) == 0]
        if self.chip.platform == "tpu":
            return tuple(f"{self.chip.name}-{n}" for n in counts)
        return tuple(self.target(self.by_count[n]).name for n in counts)


# v4's two TensorCores are one device ("megacore") on the cloud, but two for the compiler by default.
_GENERATIONS = {
    g.chip.name: g
    for g in (
        _Generation(CHIPS["cpu"], tuple((n,) for n in range(1, 513))),
        _Generation(CHIPS["cuda"], tuple((n,) for n in range(1, 9))),
        *(_Generation(CHIPS[name], ((1,), (2,), (4,), (8,)), prefix="cuda:") for name in ("h100", "h200")),
        _Generation(CHIPS["v4"], _cubes(4096), 2, "v4", "v4", {"chip_config_name": "megacore"}),
        _Generation(CHIPS["v5e"], _FLAT, 1, "v5litepod", "v5e"),
        _Generation(CHIPS["v5p"], _cubes(6144), 2, "v5p", "v5p"),
        _Generation(CHIPS["v6e"], _FLAT, 1, "v6e", "v6e"),
        _Generation(CHIPS["v7x"], _cubes(9216), 2, "tpu7x", "tpu7x"),
        _Generation(CHIPS["trn2"], ((1, 1), (4, 4))),
        _Generation(CHIPS["trn3"], ((1,),)),
    )
}
_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x"}
_PLATFORMS = {"tpu": "tpu", "cuda": "gpu", "gpu": "gpu"}


def target_names(chip: str | None = None) -> tuple[str, ...]:
    """Names of the common targets, of one chip or of all."""
    generations = _GENERATIONS.values() if chip is None else (_GENERATIONS[chip],)
    return tuple(name for g in generations for name in g.names())


def parse_target(text: str) -> Target:
    """Read `cpu`, `cuda`, `cuda:h200-4`, `tpu:v5e-8`, `v5e:2x4`, `v5p:4x4x4`, `trn2`...

    The number is the cloud's count: chips, but TensorCores for v4, v5p and v7x (v5p-8 is 4 chips). Raises TargetError,
    which names the nearest targets or the sizes that exist.
    """
    rest, platform = text.strip().lower(), None
    prefix, colon, tail = rest.partition(":")
    if colon and prefix in _PLATFORMS:
        rest, platform = tail, _PLATFORMS[prefix]
    match = re.fullmatch(r"([a-z0-9]+?)(?:[-:](\d+(?:x\d+)*))?", rest)
    generation = match and _GENERATIONS.get(_ALIASES.get(match[1], match[1]))
    if match is None or generation is None or (platform and generation.chip.platform != platform):
        raise TargetError(_unknown(text))
    size = match[2]
    if size is None and (1,) not in generation.topologies and generation.chip.platform == "tpu":
        raise TargetError(f"target {text!r} needs a size: {_sizes(generation)}")
    numbers = tuple(map(int, (size or "1").split("x")))
    topology = numbers if "x" in (size or "") else generation.by_count.get(numbers[0])
    if topology not in generation.topologies:
        raise TargetError(f"there is no target {text!r}: {_sizes(generation)}")
    return generation.target(topology)


def _unknown(text: str) -> str:
    known = (*target_names(), *(f"tpu:{n}" for n in target_names() if n.startswith("v")))
    near = difflib.get_close_matches(text.strip().lower(), known, n=3, cutoff=0.5)
    chips = ", ".join(CHIPS)
    hint = f"did you mean {' or '.join(near)}?" if near else "write for example v5e-8, v5p:4x4x4, cuda:h200 or trn2"
    return f"no target is called {text!r}: {hint} (chips: {chips})"


def _sizes(generation: _Generation) -> str:
    chip = generation.chip
    counts = " (the number counts TensorCores, two a chip)" if generation.unit > 1 else ""
    names = ", ".join(generation.names())
    if chip.platform != "tpu":
        return f"{chip.name} comes as {names}"
    shapes = "; ascending multiples of 4, such as 4x4x12, are topologies too" if chip.torus == 3 else ""
    some = ", ".join("x".join(map(str, generation.by_count[n])) for n in generation.by_count if n & (n - 1) == 0)
    return f"{chip.name} comes as {names}{counts}, or by topology as {some}{shapes}"
