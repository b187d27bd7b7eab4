"""From checkpoint tensors to the weights of `models.layers.short_conv`: b, c and x of all channels are one tensor.

Letters: K heads of h channels, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from inferlib.checkpoint.pieces import Piece
from inferlib.models.config import LayerSpec
from inferlib.models.recurrent import ShortConvSpec


def short_conv_pieces(names: Mapping[str, str], spec: ShortConvSpec, module: str, dim: int) -> tuple[Piece, ...]:
    """The tensors of one layer's `module`; see `inferlib.checkpoint.assemble.layer_pieces`."""
    channels, part = spec.heads * spec.head_dim, module.removeprefix("attn.")
    shape = {"bcx": (3 * channels, dim), "conv": (channels, 1, spec.taps), "o": (dim, channels)}[part]
    return (Piece(names["conv." + part] + ".weight", shape),)


def short_conv_rule(spec: LayerSpec, part: str, pieces: tuple[jax.Array, ...]) -> jax.Array:
    """Lay out the piece of a part. Traceable."""
    (x,), heads = pieces, spec.attention.heads
    match part:
        case "attn.bcx":  # [D, K, 3 h]
            of_heads = jnp.moveaxis(x.reshape(3, heads, -1, x.shape[1]), (3, 1), (0, 1))
            return of_heads.reshape(*of_heads.shape[:2], -1)
        case "attn.conv":
            return x[:, 0].T.reshape(-1, heads, spec.attention.head_dim)
    return x.T.reshape(heads, 1, spec.attention.head_dim, -1)
