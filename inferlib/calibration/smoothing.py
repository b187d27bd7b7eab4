"""Factors that move between the inputs of products and their weights, without changing the model in exact arithmetic.

Inputs are divided by a factor for each channel where they are made, in a norm, in values or in the feed-forward's
up-projection, and weights are multiplied by it. AWQ (Lin et al. 2023) chooses factors by which weights lose less when
they are rounded, SmoothQuant (Xiao et al. 2022) such that inputs lose less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.calibration.compiled import compiled
from inferlib.calibration.layer_weights import LayerParts, Weights, values_of
from inferlib.calibration.matrices import MatrixForm
from inferlib.calibration.rounding import losses, round_to, search_scales
from inferlib.ops.observed import InputSums
from inferlib.ops.quantized import Scheme

# Exponents of mean magnitudes that AWQ tries, and SmoothQuant's share of the inputs' outliers that weights take over.
_EXPONENTS = tuple(np.linspace(0.0, 0.9, 10).tolist())
_MIGRATION = 0.5
_LEAST = 1e-5


@dataclass(frozen=True)
class Site:
    """Inputs that can be divided by factors.

    made_by: a norm, "values", or the feed-forward whose up-projection makes them. readers: the parts that multiply
    them, which take the factors; of these, products are those whose inputs are recorded.
    """

    made_by: str
    readers: tuple[str, ...]
    products: tuple[str, ...]


def sites(layer: LayerParts, observed: set[str]) -> Iterator[Site]:
    """The sites of a layer, those first that change what others round. observed: the parts whose inputs were
    recorded."""
    if layer.scales_values and "attn.o" in observed:
        yield Site("values", ("attn.o",), ("attn.o",))
    if layer.scaled_mlp and f"{layer.scaled_mlp}.down" in observed:
        down = f"{layer.scaled_mlp}.down"
        yield Site(layer.scaled_mlp, (down,), (down,))
    for norm in layer.smoothed_norms:
        readers = layer.readers(norm)
        if products := tuple(part for part in readers if part in observed):
            yield Site(norm, readers, products)


def smooth(
    layer: LayerParts,
    weights: Weights,
    sums: dict[str, InputSums],
    kind: Literal["awq", "smoothquant"],
    scheme: Scheme,
    dtype: np.dtype,
) -> tuple[Weights, dict[str, InputSums]]:
    """A layer's weights and the sums over its inputs, after factors have moved. dtype: of norms as they are stored."""
    weights, sums = dict(weights), dict(sums)
    for site in sites(layer, set(sums)):
        factors = _factors(layer, site, weights, sums, kind, scheme)
        if site.made_by == "values":
            factors = _move_from_values(layer, weights, factors)
        elif site.made_by == layer.scaled_mlp:
            _move_from_up(site.made_by, weights, factors)
        else:
            factors = _move_from_norm(layer, site.made_by, weights, factors, dtype)
        for part in site.readers:
            dims = range(3) if site.made_by == "values" else [_input_dim(layer, site, part)]
            shape = [weights[part].shape[i] if i in dims else 1 for i in range(weights[part].ndim)]
            weights[part] = weights[part] * factors.reshape(shape)
        for part in site.products:
            sums[part] = _divided(sums[part], factors.reshape(-1))
    return weights, sums


def _input_dim(layer: LayerParts, site: Site, part: str) -> int:
    return 0 if site.made_by == layer.scaled_mlp else layer.width_dim(part)


def _divided(sums: InputSums, factors: jax.Array) -> InputSums:
    """The sums over inputs that are divided by factors [I]."""
    return InputSums(
        sums.products / factors[:, None] / factors, sums.magnitudes / factors, sums.largest / factors, sums.counts
    )


# ---- where inputs are made


def _move_from_values(layer: LayerParts, weights: Weights, factors: jax.Array) -> jax.Array:
    """Divide values; the factors of the output projection's inputs [K, G, h], equal within a group."""
    groups, queries, size, _ = weights["attn.o"].shape
    shared = factors.reshape(groups, queries, size)[:, 0]
    for part, place in values_of(layer, weights):
        weights[part] = weights[part].at[place].divide(shared)
    return factors


def _move_from_up(mlp: str, weights: Weights, factors: jax.Array) -> None:
    weights[f"{mlp}.gate_up"] = weights[f"{mlp}.gate_up"].at[:, 1].divide(factors)
    if (bias := f"{mlp}.gate_up_bias") in weights:
        weights[bias] = weights[bias].at[1].divide(factors)


def _move_from_norm(layer: LayerParts, norm: str, weights: Weights, factors: jax.Array, dtype: np.dtype) -> jax.Array:
    """Divide a norm's weight; the factors by which it is divided exactly, once it has its dtype."""
    offset = float(layer.config.norm.unit_offset)
    old = weights[norm] + offset
    rounded = ((old / factors) - offset).astype(dtype).astype(jnp.float32)
    exact = old / (rounded + offset)
    moves = jnp.isfinite(exact) & (exact > 0)
    weights[norm] = jnp.where(moves, rounded, weights[norm])
    factors = jnp.where(moves, exact, 1.0)
    if (bias := f"{norm}.bias") in weights:
        weights[bias] = weights[bias] / factors
    return factors


# ---- the choice of factors


def _factors(
    layer: LayerParts,
    site: Site,
    weights: Weights,
    sums: dict[str, InputSums],
    kind: Literal["awq", "smoothquant"],
    scheme: Scheme,
) -> jax.Array:
    """Factors [I] of a site."""
    forms = {part: MatrixForm.of(layer.specs[part]) for part in site.products}
    if kind == "smoothquant":
        largest = jnp.max(jnp.stack([jnp.max(sums[part].largest, axis=0) for part in site.products]), axis=0)
        matrices = [forms[part].matrices(weights[part]) for part in site.products]
        widest = jnp.max(jnp.stack([jnp.max(jnp.abs(w), axis=(0, 2)) for w in matrices]), axis=0)
        largest, widest = (_over_groups(x, layer, site, jnp.max) for x in (largest, widest))
        factors = jnp.maximum(largest, _LEAST) ** _MIGRATION / jnp.maximum(widest, _LEAST) ** (1 - _MIGRATION)
        return factors / jnp.exp(jnp.mean(jnp.log(factors)))
    counts = jnp.stack([jnp.sum(sums[part].counts) for part in site.products])
    magnitudes = jnp.stack([jnp.sum(sums[part].magnitudes, axis=0) for part in site.products])
    mean = _over_groups(jnp.sum(magnitudes, axis=0) / jnp.sum(counts), layer, site, jnp.mean)
    best, lowest = jnp.ones_like(mean), np.inf
    for exponent in _EXPONENTS:
        factors = _powers(mean, exponent)
        loss = 0.0
        for part in site.products:
            form, h = forms[part], sums[part]
            matrices = form.matrices(weights[part])
            for w, products, count in zip(matrices, h.products, h.counts, strict=True):
                loss += float(_loss(w, products / jnp.maximum(count, 1), factors, scheme, form.group(scheme)) * count)
        if loss < lowest:
            best, lowest = factors, loss
    return best


def _over_groups(x: jax.Array, layer: LayerParts, site: Site, reduce) -> jax.Array:
    """x [I], equal for the queries of a group, which read the same values."""
    if site.made_by != "values":
        return x
    groups, queries, size, _ = layer.specs["attn.o"].shape
    shared = reduce(x.reshape(groups, queries, size), axis=1, keepdims=True)
    return jnp.broadcast_to(shared, (groups, queries, size)).reshape(-1)


@jax.jit
def _powers(mean: jax.Array, exponent: float) -> jax.Array:
    factors = jnp.maximum(mean, _LEAST) ** exponent
    return factors / jnp.sqrt(jnp.max(factors) * jnp.min(factors))


@compiled(static_argnames=("scheme", "group"))
def _loss(w: jax.Array, h: jax.Array, factors: jax.Array, scheme: Scheme, group: int) -> jax.Array:
    """tr(D^T H D) of a matrix that is rounded times factors."""
    scaled, h = w * factors[:, None], h / factors[:, None] / factors
    scales = search_scales(scaled, jnp.diag(h), scheme, group)
    return jnp.sum(losses(scaled, round_to(scaled, scales, scheme), scales, h))
