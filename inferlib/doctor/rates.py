"""Rates of a device: copying memory and multiplying matrices, beside the chip's data sheet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from inferlib.doctor.findings import Finding
from inferlib.targets import Chip

AREA = "rate"
# Shares of the published figure. Copies reached 89 % on an H200 and large products 90 to 98 % of a TPU's peak; below
# these something is wrong: another program uses the device, its clock is lowered, or its memory is not what we think.
LEAST_COPY, LEAST_PRODUCT = 0.7, 0.5


def copy_bandwidth(count: int, loops: int = 20) -> float:
    """Bytes per second, read plus written, of copying `count` float32: the faster of a device copy and a compiled
    loop."""
    x = jax.random.normal(jax.random.key(0), (count,), jnp.float32)
    copy = jax.jit(jnp.copy)
    scale = jax.jit(lambda x: jax.lax.fori_loop(0, loops, lambda _, y: y * 1.0001, x))

    def copies() -> None:
        for _ in range(loops):
            y = copy(x)
        y.block_until_ready()

    fastest = min(seconds(copies), seconds(lambda: scale(x).block_until_ready()))
    return 2 * x.nbytes * loops / fastest


def product_rate(size: int, dtype: str, loops: int = 20) -> float:
    """FLOP per second of products of two matrices [size, size]."""
    x, w = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in range(2))
    w = w * size**-0.5
    multiply = partial(jnp.matmul, preferred_element_type=jnp.dtype(dtype))
    chain = jax.jit(lambda x, w: jax.lax.fori_loop(0, loops, lambda _, y: multiply(y, w), x))
    return 2 * size**3 * loops / seconds(lambda: chain(x, w).block_until_ready())


def seconds(run: Callable[[], object]) -> float:
    """The median of three runs, after one that compiles."""
    run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measured(platform: str, chip: Chip | None) -> Iterator[Finding]:
    """The rates of the default device. chip: its data sheet, None if there is none."""
    small = platform == "cpu"
    share = chip.devices if chip else 1
    bandwidth = copy_bandwidth(1 << 24 if small else 1 << 28, 5 if small else 20)
    yield _compared("copy", bandwidth, chip.hbm_bandwidth / share if chip else 0.0, LEAST_COPY, "GB/s", 1e9)
    dtype = "float32" if small else "bfloat16"
    rate = product_rate(1024 if small else 8192, dtype, 5 if small else 20)
    published = chip.rate(dtype) / share if chip else 0.0
    yield _compared(f"matrix product in {dtype}", rate, published, LEAST_PRODUCT, "GFLOP/s", 1e9)


def _compared(name: str, rate: float, published: float, least: float, unit: str, scale: float) -> Finding:
    figures = {"rate": rate, "published": published or None, "least_share": least}
    if not published:
        return Finding(AREA, name, "note", f"{rate / scale:,.1f} {unit}; there is no data sheet to compare", figures)
    share = rate / published
    text = f"{rate / scale:,.0f} of {published / scale:,.0f} {unit} published, {share:.0%}"
    if share < least:
        text += f"; under {least:.0%}, something else uses the device or its clock is lowered"
    return Finding(AREA, name, "ok" if share >= least else "wrong", text, figures)
