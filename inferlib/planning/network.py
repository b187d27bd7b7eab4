"""How long collectives take on a mesh that is laid on a torus or a switch.

The model of the JAX scaling book (https://jax-ml.github.io/scaling-book/sharding): a phase (an all-gather or a
reduce-scatter) moves (n - 1) / n of the whole array over every link of the axis at once, and takes at least the latency
of its hops. All-reduces on TPUs follow `planning.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from inferlib.planning.all_reduce import ONE_WAY, Algorithm, as_ring, of_sent, path
from inferlib.planning.collectives import Collective
from inferlib.targets import Target, TargetError


@dataclass(frozen=True)
class Efficiency:
    """The attained share of published figures; for latency, the attained multiple of the published hop."""

    memory: float
    compute: float
    link: float
    latency: float


IDEAL = Efficiency(1.0, 1.0, 1.0, 1.0)
# Measured, the same for all chips. memory: decoding reached 85 % on TPU v5e (jax-llm-examples), 86 % on v7x (ragged
# paged attention) and 75 to 86 % on H200 (this library). compute: large matrix products are within 2 to 10 % of the
# peak of the systolic array by the TPU compiler's listings. link, latency: an all-gather on v5e took 680 us where 560
# were expected, and 8 us where three hops were (scaling book, "AllGather time").
ATTAINED = Efficiency(memory=0.86, compute=0.9, link=560 / 680, latency=8 / 3)


@dataclass(frozen=True)
class Span:
    """The devices of a mesh axis: `dims` (size, ring) along the network, and `die` devices within each chip."""

    dims: tuple[tuple[int, bool], ...] = ()
    die: int = 1

    @property
    def devices(self) -> int:
        return self.die * prod(size for size, _ in self.dims)


@dataclass(frozen=True)
class Network:
    """A mesh on a target. spans: where each mesh axis lies; the last axis has the closest neighbours."""

    target: Target
    spans: Mapping[str, Span]

    def seconds(self, collective: Collective, efficiency: Efficiency, algorithm: Algorithm | None = None) -> float:
        """Seconds of one of `collective.count` collectives; if a product hides it, only the time beyond the product's.
        algorithm: of an all-reduce on a TPU, by default the compiler's choice for its size."""
        if collective.flops:
            hidden = collective.flops / (self.target.rate("bfloat16") * efficiency.compute)
            return max(self.seconds(replace(collective, flops=0), efficiency) - hidden, 0.0)
        span, nbytes = self._span(collective.axis), collective.nbytes
        if collective.kind == "collective-permute":
            return self._permute(span, nbytes, efficiency)
        if collective.kind.endswith("all-to-all"):
            return self._all_to_all(span, nbytes, efficiency) + self._latency(span, efficiency)
        if collective.kind.endswith("all-reduce") and self.target.platform == "tpu":
            algorithm = algorithm or self.algorithm(collective.axis, nbytes)
            return self._all_reduce(span, nbytes, efficiency, algorithm)
        phases = 2 if collective.kind.endswith("all-reduce") else 1
        return phases * (self._gather(span, nbytes, efficiency) + self._latency(span, efficiency))

    def algorithm(self, axis: str, nbytes: float) -> Algorithm:
        """How the compiler for TPUs makes an all-reduce of an array over a mesh axis."""
        span = self._span(axis)
        if nbytes / span.devices >= ONE_WAY:
            return "one way"
        kinds: tuple[Algorithm, ...] = ("exchange", "scatter and gather")
        return min(kinds, key=lambda kind: self._all_reduce(span, nbytes, IDEAL, kind))

    def sends(self, axis: str, share: float) -> Algorithm:
        """The algorithm of an all-reduce by how many times the array a device sends."""
        return of_sent(as_ring(self._span(axis).dims), share)

    def _all_reduce(self, span: Span, nbytes: float, efficiency: Efficiency, algorithm: Algorithm) -> float:
        """Between chips by the algorithm, and within each chip by an exchange beside it."""
        over = path(algorithm, as_ring(span.dims), nbytes, self._bandwidth)
        phases = 1 if algorithm == "exchange" else 2
        within = phases * (span.die > 1), 2 * self._within(span, nbytes)
        hops = (over.hops + within[0]) * self.target.chip.hop_latency * efficiency.latency
        return hops + (over.seconds + within[1]) / efficiency.link

    def _span(self, axis: str) -> Span:
        """The span of a mesh axis, or of several joined by "+"."""
        spans = [self.spans[name] for name in axis.split("+")]
        return Span(tuple(dim for s in spans for dim in s.dims), prod(s.die for s in spans))

    def _bandwidth(self, ring: bool) -> float:
        """Bytes/s along a network axis; a ring sends both ways."""
        return self.target.chip.link_bandwidth * (2 if ring else 1)

    def _latency(self, span: Span, efficiency: Efficiency) -> float:
        switched = not self.target.chip.torus
        hops = sum(1 if switched else size // 2 if ring else size - 1 for size, ring in span.dims)
        return (hops + (span.die > 1)) * self.target.chip.hop_latency * efficiency.latency

    def _gather(self, span: Span, nbytes: float, efficiency: Efficiency) -> float:
        chips = span.devices // span.die
        bandwidth = sum(self._bandwidth(ring) for _, ring in span.dims)
        between = nbytes * (chips - 1) / chips / bandwidth if chips > 1 else 0.0
        return (between + self._within(span, nbytes)) / efficiency.link

    def _all_to_all(self, span: Span, nbytes: float, efficiency: Efficiency) -> float:
        """The bound is the middle links of the longest axis, which half of all bytes cross; a switch has none."""
        if self.target.chip.torus:
            between = max((nbytes * size / 4 / self._bandwidth(ring) for size, ring in span.dims), default=0.0)
        else:
            between = sum(nbytes * (size - 1) / size / self._bandwidth(ring) for size, ring in span.dims)
        return (between + self._within(span, nbytes)) / efficiency.link

    def _permute(self, span: Span, nbytes: float, efficiency: Efficiency) -> float:
        chip = self.target.chip
        bandwidth = chip.link_bandwidth if span.dims else chip.die_bandwidth
        return nbytes / bandwidth / efficiency.link + chip.hop_latency * efficiency.latency

    def _within(self, span: Span, nbytes: float) -> float:
        """Seconds to move the bytes among the devices of one chip."""
        return nbytes * (span.die - 1) / span.die / self.target.chip.die_bandwidth if span.die > 1 else 0.0


@lru_cache(maxsize=4096)
def place(target: Target, mesh: tuple[tuple[str, int], ...]) -> Network:
    """Lay a mesh (axis, size) on a target; the last axis takes the closest neighbours, as `sharding.mesh` does.

    Raises TargetError if the mesh and the slice differ in size.
    """
    if prod(size for _, size in mesh) != target.devices:
        sizes = ", ".join(f"{name} {size}" for name, size in mesh) or "one device"
        raise TargetError(f"a mesh of {sizes} is not {target}, which has {target.devices} devices")
    chip = target.chip
    left = [(size, size) for size in target.topology]  # chips along each axis: still free, and in all
    die, spans = chip.devices, {}
    for name, size in reversed(mesh):
        inner = gcd(size, die)
        die //= inner
        taken = _nearest(chip.ring, left, size // inner)
        spans[name] = Span(
            tuple((n, _is_ring(chip.ring, n, all_)) for n, (_, all_) in zip(taken, left, strict=True) if n > 1), inner
        )
        left = [(free // n, all_) for n, (free, all_) in zip(taken, left, strict=True)]
    return Network(target, spans)


def _is_ring(multiple: int, size: int, whole: int) -> bool:
    return multiple > 0 and size == whole and size % multiple == 0


def _nearest(multiple: int, left: list[tuple[int, int]], chips: int) -> tuple[int, ...]:
    """Chips to take along each axis: whole axes where possible, as in `jax.make_mesh`, with the fewest hops."""

    def choices(at: int, need: int):
        if at == len(left):
            if need == 1:
                yield ()
            return
        for size in range(1, min(left[at][0], need) + 1):
            if left[at][0] % size == 0 and need % size == 0:
                for rest in choices(at + 1, need // size):
                    yield (size, *rest)

    def cost(taken: tuple[int, ...]) -> tuple[int, int]:
        split = sum(1 < n < free for n, (free, _) in zip(taken, left, strict=True))
        hops = (n // 2 if _is_ring(multiple, n, all_) else n - 1 for n, (_, all_) in zip(taken, left, strict=True))
        return split, sum(hops)

    return min(choices(0, chips), key=cost)
