"""Matrix product with a weight that adapters change, each token's by an adapter of its own (LoRA, Hu et al., 2021; of
many at once: Punica, Chen et al., MLSys 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from inferlib.ops.matmul import Activations, Weight, as_array, matmul
from inferlib.ops.read_whole import ReadWhole
from inferlib.ops.thin_products import beside, thin_products


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedWeight(ReadWhole):
    """A weight [*I, *O], and the factors of the adapters in S slots.

    a [*I, P, S, R]; b [P, S, R, *O], without the dimension of P parts if the weight's results begin with one: then they
    are `apart`, else P is 1. Where an adapter does not change the weight, its factors are zeros.
    """

    base: Any  # `Weight`, which jax cannot check
    a: jax.Array
    b: jax.Array
    apart: bool = field(metadata={"static": True})

    def of_layer(self, layer: jax.Array, base: Weight) -> AdaptedWeight:
        """One layer of stacked factors, beside that layer's weight."""
        a, b = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (self.a, self.b))
        return AdaptedWeight(base, a, b, self.apart)


def adapted_matmul(
    x: Activations,
    w: AdaptedWeight,
    slots: jax.Array,
    *,
    contract: int = 1,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    out_dtype=None,
    backend: str | None = None,
) -> jax.Array:
    """x [T, *I] times the weight and, for each token, times its adapter's factors -> [T, *O].

    slots [T] int32: the slot of each token's adapter, 1 to S; any other number, usually 0, is none. The other arguments
    are those of `matmul`. Where a device has a part of *I or *O, the result is its part of the sum, as it is of the
    weight's own product.
    """
    y = matmul(x, w.base, contract=contract, out_dtype=out_dtype, backend=backend)
    if beside(x.shape[0], x.dtype, backend):
        y = lax.optimization_barrier(y)  # XLA would add inside the weight's product, which would wait for the change
    y = y + change(as_array(x), w, slots, backend).astype(y.dtype)
    return y if activation is None else activation(y[:, 0], y[:, 1])


def change(x: jax.Array, w: AdaptedWeight, slots: jax.Array, backend: str | None) -> jax.Array:
    """What adapters add to the product, [T, *O].

    One product with the factors of all slots, of which each token keeps those of its own, and one back: for a few
    adapters of low rank these are two small products, however tokens and adapters are mixed.
    """
    parts, count, rank = w.a.shape[-3:]
    a = w.a.reshape(*w.a.shape[:-3], parts, count * rank)
    b = w.b.reshape(parts, count * rank, *w.b.shape[3:])
    slot_of_column = np.repeat(np.arange(1, count + 1, dtype=np.int32), rank)
    y = thin_products(x, a, b, slots[:, None] == slot_of_column, backend=backend)
    return y if w.apart else y[:, 0]
