"""What the kernels cannot do is refused before launch, with the reason."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from inferlib.attention_values import AttentionOptions, KvCache, LatentCache
from inferlib.nki_kernels.decode_linear import rmsnorm_matmul, rmsnorm_mlp
from inferlib.nki_kernels.expert_mlp import expert_mlp
from inferlib.nki_kernels.flash_decode import flash_decode
from inferlib.nki_kernels.flash_prefill import flash_prefill
from inferlib.nki_kernels.mla_decode import mla_decode
from inferlib.nki_kernels.mx_matmul import mx_matmul

LENGTHS = jnp.array([3], jnp.int32)


def decode(*, tokens=1, group=4, size=64, dtype=jnp.bfloat16, page=128, table=None, ring=False, lnc=None, **options):
    q = jnp.zeros((1, tokens, 1, group, size), jnp.bfloat16)
    cache = KvCache(jnp.zeros((1, 1, page, size), dtype), pages=table, ring=ring)
    return flash_decode(q, cache, LENGTHS, AttentionOptions(**{"scale": 1.0, **options}), lnc=lnc)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(tokens=9, group=16), "at most 128 together"),
        (dict(size=320), "at most 256"),
        (dict(size=66, dtype=jnp.float8_e4m3), "multiple of 4 bytes"),
        (dict(page=48, table=jnp.zeros((1, 2), jnp.int32)), "powers of two"),
        (dict(ring=True), "pass the layer's window"),
        (dict(ring=True, window=128, tokens=2), "cannot hold a window"),
        (dict(scale=0.0), "must be positive"),
        (dict(softcap=-1.0), "must be positive"),
        (dict(lnc=4), "1 or 2 cores"),
    ],
)
def test_flash_decode(options, reason):
    with pytest.raises(ValueError, match=reason):
        decode(**options)


def test_flash_decode_of_more_rows_than_pages():
    q, cache = jnp.zeros((2, 1, 1, 4, 64), jnp.bfloat16), jnp.zeros((1, 1, 128, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="row b's page is b"):
        flash_decode(q, KvCache(cache), jnp.array([1, 1]), AttentionOptions(1.0))


def test_flash_decode_of_more_rows_of_pages_than_float32_counts():
    q, cache = jnp.zeros((1, 1, 1, 4, 4), jnp.bfloat16), jax.ShapeDtypeStruct((1 << 24, 1, 16, 4), jnp.bfloat16)
    with pytest.raises(ValueError, match="exact below"):
        flash_decode(q, KvCache(cache, pages=jnp.zeros((1, 2), jnp.int32)), LENGTHS, AttentionOptions(1.0))


def latents(
    *, rows=1, tokens=1, heads=4, rank=128, rotary=64, dtype=jnp.bfloat16, page=128, fold=1, table=None, scale=1.0
):
    q, keys = (jnp.zeros((rows, tokens, heads, size), jnp.bfloat16) for size in (rank, rotary))
    cells = jnp.zeros((1, 1, page, rank), dtype), jnp.zeros((1, 1, page // fold, rotary * fold), dtype)
    return mla_decode(q, keys, LatentCache(*cells, pages=table), jnp.full(rows, 3), scale)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(dtype=jnp.float8_e4m3), "float32, bfloat16 or float16"),
        (dict(fold=2), "are not those of 128 latents"),
        (dict(rank=576), "latents of 576"),
        (dict(rank=129), "latents of 129"),
        (dict(rotary=192), "rotary keys of 192"),
        (dict(tokens=9, heads=128), "exceed 1024"),
        (dict(rows=2), "2 rows exceed a cache of 1"),
        (dict(page=48, table=jnp.zeros((1, 2), jnp.int32)), "no power of two"),
        (dict(scale=0.0), "must be positive"),
    ],
)
def test_mla_decode(options, reason):
    with pytest.raises(ValueError, match=reason):
        latents(**options)


@pytest.mark.parametrize(
    ("size", "options", "reason"),
    [(320, {}, "at most 256"), (64, dict(ring=True), "window"), (64, dict(scale=-1.0), "must be positive")],
)
def test_flash_prefill(size, options, reason):
    q, cache = jnp.zeros((1, 2, 1, 4, size), jnp.bfloat16), jnp.zeros((1, 1, 128, size), jnp.bfloat16)
    cache, positions = KvCache(cache, ring=options.get("ring", False)), jnp.array([[0, 1]], jnp.int32)
    with pytest.raises(ValueError, match=reason):
        flash_prefill(q, cache, jnp.array([0]), positions, AttentionOptions(options.get("scale", 1.0)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(element="float6"), "MX has"),
        (dict(w=jnp.zeros((8, 6), jnp.uint16)), "stored in uint32"),
        (dict(w=jnp.zeros((9, 6), jnp.uint32)), "multiple of 32"),
        (dict(scales=jnp.zeros((1, 6), jnp.int8)), "uint8 scales"),
        (dict(x=jnp.zeros((2, 32), jnp.float32)), "bfloat16"),
        (dict(x_element="float8_e5m2"), "both x_scales and x_element"),
        (dict(x=jnp.zeros((8, 2), jnp.uint32), x_element="float8_e5m2", x_scales=jnp.zeros((2, 2), jnp.uint8)),
         "do not match"),
    ],
)  # fmt: skip
def test_mx_matmul(change, reason):
    options = dict(
        x=jnp.zeros((2, 32), jnp.bfloat16),
        w=jnp.zeros((8, 6), jnp.uint32),
        scales=jnp.zeros((1, 6), jnp.uint8),
        element="float8_e4m3fn",
    )
    with pytest.raises(ValueError, match=reason):
        mx_matmul(**(options | change))


@pytest.mark.parametrize(
    ("tokens", "width", "weight", "reason"),
    [(129, 64, jnp.float32, "at most 128"), (2, 64, jnp.bfloat16, "must be float32"), (2, 131, jnp.float32, "divisor")],
)
def test_norm_and_projection(tokens, width, weight, reason):
    x, w = jnp.zeros((tokens, width), jnp.bfloat16), jnp.zeros((width, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=reason):
        rmsnorm_matmul(x, jnp.zeros((width,), weight), w, eps=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(tokens=129), "129 tokens exceed 128"),
        (dict(halves=1), "experts with gates"),
        (dict(activation="relu2"), "no activation relu2"),
        (dict(dtype=jnp.float32), "all alike"),
        (dict(features=131), "lanes would be empty"),
        (dict(features=33), "odd sizes"),
    ],
)
def test_experts(options, reason):
    size = dict(tokens=2, halves=2, features=64, activation="silu", dtype=jnp.bfloat16) | options
    x, factors = jnp.zeros((size["tokens"], 64), jnp.bfloat16), jnp.zeros((size["tokens"], 2))
    gate_up = jnp.zeros((2, size["halves"], 64, size["features"]), size["dtype"])
    with pytest.raises(ValueError, match=reason):
        expert_mlp(
            x, gate_up, jnp.zeros((2, size["features"], 64), size["dtype"]), factors, activation=size["activation"]
        )


def test_feed_forward():
    x, weight, gate = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((64,)), jnp.zeros((64, 128), jnp.bfloat16)
    down = jnp.zeros((128, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="the kernel has silu"):
        rmsnorm_mlp(x, weight, gate, gate, down, eps=1e-6, activation="relu")
    with pytest.raises(ValueError, match="do not match gate"):
        rmsnorm_mlp(x, weight, gate, gate, gate, eps=1e-6)
    wide = jnp.zeros((64, 131), jnp.bfloat16)
    with pytest.raises(ValueError, match="sum over 131"):
        rmsnorm_mlp(x, weight, wide, wide, wide.T, eps=1e-6)
