"""Sums of rows over segments by the TPU kernel, interpreted, against the form of XLA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops import segment_sum as op
from inferlib.ops.segment_sum import Pieces, Segments, segment_sum
from inferlib.pallas_kernels import segment_sum_tpu

# Segments, choices of each, groups here (of three times as many), numbers of a row, tiles that are summed
CASES = {
    "some tiles": (512, 4, 4, 256, (1, 2)),
    "columns that fill no register": (256, 4, 4, 1280, (0, 1)),
    "all choose one group": (512, 8, 16, 256, (0, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_sums_as_xla_does_whatever_unused_rows_hold(name, monkeypatch):
    segments, chosen, groups, width, (first, stop) = CASES[name]
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(3 * groups)[:chosen] for _ in range(segments)]).astype(np.int32)
    if "one group" in name:
        ids[:, 1:][ids[:, 1:] == 0], ids[:, 0] = 1, 0
    ids = np.minimum(ids, groups)
    inside = ids < groups
    group, count = ids[inside], int(inside.sum())
    segment = np.repeat(np.arange(segments, dtype=np.int32), chosen).reshape(ids.shape)[inside]
    places = np.empty(count, np.int32)
    places[np.argsort(group, kind="stable")] = np.arange(count)
    room = -(-count // 8) * 8 + 64
    rows = jnp.asarray(np.pad(random.standard_normal((count, width)), ((0, room - count), (0, 0))), jnp.bfloat16)
    rows = rows.at[count:].set(jnp.nan)
    padded = [np.pad(a, (0, room - count), constant_values=groups) for a in (places, group, segment)]
    # Powers of two: a product that is exact may be rounded before the sum or not, as CPUs like.
    factors = np.pad(2.0 ** random.integers(-2, 3, count), (0, room - count), constant_values=np.nan)
    counts = inside.sum(axis=1).astype(np.int32)
    starts = np.cumsum(counts, dtype=np.int32) - counts
    taken = Segments(*(jnp.asarray(a) for a in (padded[0], factors.astype(np.float32), starts, counts)))
    into = jnp.asarray(random.standard_normal((segments, width)), jnp.bfloat16)
    pieces = Pieces.of(jnp.asarray(ids), groups, rows, count, "pallas_tpu")
    assert pieces is not None
    sizes = jnp.bincount(group, length=groups)
    runs = pieces.runs(jnp.int32(0), jnp.asarray(padded[1]), jnp.asarray(padded[2]), sizes)
    interpreted = partial(segment_sum_tpu.segment_sum, interpret=True)
    monkeypatch.setattr(segment_sum_tpu, "segment_sum", interpreted)
    by_kernel = jax.jit(op._by_kernel)(into, rows, taken, runs, jnp.int32(first), jnp.int32(stop))
    by_xla = jax.jit(partial(segment_sum, tiles=1, longest=1))(into, rows, taken, first, stop)
    np.testing.assert_array_equal(np.asarray(by_kernel, np.float32), np.asarray(by_xla, np.float32))


def test_what_the_kernel_does_not_take():
    sizes = segment_sum_tpu.Sizes(rows=1024, pairs=1024, segments=512, groups=8, most=4, width=256)
    assert segment_sum_tpu.unsupported(sizes, jnp.bfloat16) is None
    assert "float32" in str(segment_sum_tpu.unsupported(sizes, jnp.float32))
    assert "whole tiles" in str(segment_sum_tpu.unsupported(sizes._replace(width=2880), jnp.bfloat16))
    assert "keys" in str(segment_sum_tpu.unsupported(sizes._replace(groups=1 << 10), jnp.bfloat16))
    assert "on chip" in str(segment_sum_tpu.unsupported(sizes._replace(width=1 << 20), jnp.bfloat16))
    assert "scalar" in str(segment_sum_tpu.unsupported(sizes._replace(pairs=1 << 17), jnp.bfloat16))
