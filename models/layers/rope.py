"""Rotary position embedding: frequencies per scaling kind, angles, and the rotation.

Frequencies are computed in float32, by the same operations that the models were trained with: one unit in the last
place is visible at long contexts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.models.config import RopeScaling, RopeSpec


def inverse_frequencies(spec: RopeSpec, max_len: int) -> tuple[np.ndarray, float]:
    """Frequencies [dim / 2] float32 in radians per position, and the factor that multiplies cos and sin.

    max_len: the longest sequence that will be run. The kinds that depend on the sequence length ("dynamic", "longrope")
    use it instead of the current length, so that cached keys never change their rotation.
    """
    scaling = spec.scaling
    if scaling is None:
        return _frequencies(spec.base, spec.dim), 1.0
    return _KINDS[scaling.kind](spec, scaling, max_len)


def rope_angles(spec: RopeSpec, max_len: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [T, dim / 2] float32 at `positions` [T] int32."""
    frequencies, factor = inverse_frequencies(spec, max_len)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + dim/2) of x [T, ..., h] by cos and sin [T, dim / 2]; the rest stays."""
    half = cos.shape[-1]
    shape = (x.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return rotated if 2 * half == x.shape[-1] else jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


def _wavelengths(base: float, dim: int) -> np.ndarray:
    """base^(2i / dim) [dim / 2]: positions per radian."""
    return np.float32(base) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _frequencies(base: float, dim: int) -> np.ndarray:
    return np.float32(1.0) / _wavelengths(base, dim)


def _linear(spec: RopeSpec, scaling: RopeScaling, max_len: int) -> tuple[np.ndarray, float]:
    return _frequencies(spec.base, spec.dim) / np.float32(scaling.factor), 1.0


def _dynamic(spec: RopeSpec, scaling: RopeScaling, max_len: int) -> tuple[np.ndarray, float]:
    if scaling.alpha is not None:
        stretch = scaling.alpha
    else:
        length = max(max_len, scaling.original_context)
        stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    return _frequencies(spec.base * stretch ** (spec.dim / (spec.dim - 2)), spec.dim), 1.0


def _llama3(spec: RopeSpec, scaling: RopeScaling, max_len: int) -> tuple[np.ndarray, float]:
    """Short wavelengths stay, long ones are divided by the factor, those between are blended."""
    unscaled, factor = _frequencies(spec.base, spec.dim), np.float32(scaling.factor)
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
    wavelength = np.float32(2 * math.pi) / unscaled
    between = high - low or 1.0  # where they are equal (Llama 4), nothing is blended
    blend = (np.float32(context) / wavelength - np.float32(low)) / np.float32(between)
    blended = (1 - blend) * unscaled / factor + blend * unscaled
    scaled = np.where(wavelength > np.float32(context / low), unscaled / factor, blended)
    return np.where(wavelength < np.float32(context / high), unscaled, scaled), 1.0


def _yarn(spec: RopeSpec, scaling: RopeScaling, max_len: int) -> tuple[np.ndarray, float]:
    """Dimensions that turn often in the trained context stay, those that turn seldom are interpolated."""

    def dimension(turns: float) -> float:
        """The (fractional) index of the frequency that makes this many turns in the trained context."""
        wavelength = scaling.original_context / (turns * 2 * math.pi)
        return spec.dim * math.log(wavelength) / (2 * math.log(spec.base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    index = np.arange(spec.dim // 2, dtype=np.float32)
    keep = 1 - np.clip((index - np.float32(low)) / np.float32(high - low), 0, 1)
    wavelengths = _wavelengths(spec.base, spec.dim)
    interpolated = np.float32(1.0) / (np.float32(scaling.factor) * wavelengths)
    return interpolated * (1 - keep) + np.float32(1.0) / wavelengths * keep, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _longrope(spec: RopeSpec, scaling: RopeScaling, max_len: int) -> tuple[np.ndarray, float]:
    long = max_len > scaling.original_context
    stretch = np.array(scaling.long_factor if long else scaling.short_factor, np.float32)
    factor = scaling.attention_factor
    if factor is None:
        ratio = scaling.factor
        factor = math.sqrt(1 + math.log(ratio) / math.log(scaling.original_context)) if ratio > 1 else 1.0
    return np.float32(1.0) / (stretch * _wavelengths(spec.base, spec.dim)), factor


def _proportional(spec: RopeSpec, scaling: RopeScaling, max_len: int) -> tuple[np.ndarray, float]:
    turning = np.arange(spec.dim // 2) < int(scaling.partial_rotary_factor * spec.dim // 2)
    return np.where(turning, _frequencies(spec.base, spec.dim), np.float32(0)) / np.float32(scaling.factor), 1.0


_KINDS = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
