"""The all-reduce fused with the norm: its lowering anywhere (seconds), its numbers where a process has several GPUs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from inferlib.pallas_kernels.all_reduce_norm_gpu import Mailboxes, all_reduce_norm, fits, open_mailboxes

EPS = 1e-5
several_gpus = pytest.mark.skipif(
    jax.default_backend() != "gpu" or jax.local_device_count() < 2, reason="needs several GPUs in this process"
)


def on_all(run, inputs, outputs, **options):
    """jit(shard_map(run)) over all devices; True marks an argument or result with one share per device."""
    mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(AxisType.Auto,))
    spec = lambda split: PartitionSpec("tensor") if split else PartitionSpec()  # noqa: E731
    inputs, outputs = jax.tree.map(spec, (inputs, outputs))
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False), **options)


def draw(seed, tokens, width):
    """Partial sums [devices, T, D], residual, weight; among the values, pairs of negative zeros."""
    rng = np.random.default_rng(seed)
    parts, residual = (rng.normal(size=(n, tokens, width)) for n in (jax.device_count(), 1))
    parts[:, :, : width // 4] = -0.0
    weight = rng.uniform(0.5, 1.5, width)
    return *(jnp.asarray(x, jnp.bfloat16) for x in (parts, residual[0])), jnp.asarray(weight, jnp.bfloat16)


def scaled(parts, call):
    return (parts.astype(jnp.float32) * (1 + call / 4)).astype(parts.dtype)


def oracle(parts, x, weight):
    parts, x, weight = (np.asarray(v.astype(jnp.float32), np.float64) for v in (parts, x, weight))
    x = np.asarray(jnp.asarray(parts.sum(0) + x, jnp.bfloat16).astype(jnp.float32), np.float64)
    return x, x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def calls_of(loop, calls, tokens, width):
    """`calls` dependent calls -> every call's (x, norm), each [1, calls, T, D]."""

    def run(parts, residual, weight):
        def call(i, carry):
            x, mailboxes, xs, ys = carry
            x, y, mailboxes = all_reduce_norm(scaled(parts[0], i), x, weight, EPS, mailboxes)
            return x, mailboxes, xs.at[i].set(x), ys.at[i].set(y)

        space = jnp.zeros((calls, tokens, width), residual.dtype)
        carry = residual, open_mailboxes(tokens, width, "tensor"), space, space
        if loop:
            carry = lax.fori_loop(0, calls, call, carry)
        else:
            for i in range(calls):
                carry = call(i, carry)
        return carry[2][None], carry[3][None]

    return run


def check(got, parts, residual, weight):
    xs, ys = (np.asarray(v.astype(jnp.float32)) for v in got)
    assert all((v == v[:1]).all() for v in (xs, ys))  # the same bits on all devices
    x = residual
    for call in range(xs.shape[1]):
        for value, right in zip((xs[0, call], ys[0, call]), oracle(scaled(parts, call), x, weight), strict=True):
            error = np.linalg.norm(value - right)
            assert error <= 4e-3 * np.linalg.norm(right)  # bfloat16's rounding
        x = xs[0, call]


@several_gpus
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1, 4096), (3, 1024), (16, 4096), (64, 8192), (200, 5120)])
def test_all_reduce_norm_equals_sum_and_norm(loop, tokens, width):
    run = on_all(calls_of(loop, 7, tokens, width), (True, False, False), (True, True))
    for seed in range(4):
        case = draw(seed, tokens, width)
        check(run(*case), *case)


@several_gpus
def test_mailboxes_serve_several_programs():
    per_device = (True, True, True)
    opened = on_all(lambda: jax.tree.map(lambda v: v[None], tuple(open_mailboxes(8, 2048, "tensor"))), (), per_device)()

    def step(parts, residual, weight, mailboxes):
        mailboxes = Mailboxes(*(v[0] for v in mailboxes))
        x, y, mailboxes = all_reduce_norm(parts[0], residual, weight, EPS, mailboxes)
        return x[None, None], y[None, None], tuple(v[None] for v in mailboxes)

    run = on_all(step, (True, False, False, per_device), (True, True, per_device), donate_argnums=3)
    for seed in range(5):
        case = draw(seed, 8, 2048)
        x, y, opened = run(*case, opened)
        check((x, y), *case)


def test_mailboxes_need_a_mesh_of_one_axis():
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    run = jax.shard_map(
        lambda: open_mailboxes(1, 1024, "tensor").calls, mesh=mesh, in_specs=(), out_specs=PartitionSpec()
    )
    with pytest.raises(ValueError, match="mesh of one axis"):
        jax.eval_shape(run)


@pytest.mark.parametrize(("tokens", "width"), [(1, 4096), (64, 8192), (200, 5120)])
def test_lowers_for_gpus_and_exchanges_addresses_once(tokens, width):
    run = on_all(calls_of(False, 3, tokens, width), (True, False, False), (True, True))
    text = run.trace(*draw(0, tokens, width)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 4
    assert text.count("uses_xla_collective_metadata = true") == 1  # pointers are exchanged by the host: slow
    assert text.count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize(
    ("tokens", "width", "dtype"), [(257, 1024, "bfloat16"), (1, 1536, "bfloat16"), (1, 1024, "float32")]
)
def test_says_what_it_cannot_take(tokens, width, dtype):
    assert not fits(tokens, width, jnp.dtype(dtype))
    rows = jax.ShapeDtypeStruct((tokens, width), dtype)
    with pytest.raises(ValueError, match=r"lax\.psum"):
        jax.eval_shape(
            partial(all_reduce_norm, eps=EPS, mailboxes=None), rows, rows, jax.ShapeDtypeStruct((width,), dtype)
        )
