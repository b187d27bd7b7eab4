"""The residual plus a branch, and the RMS norm of their sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.partial_sums import PartialSums
from inferlib.pallas_kernels.mailboxes import Mailboxes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeferredNorm:
    """An RMS norm [T, D] without its factor. The factor is one number for each row, so it can multiply the norm's
    products instead.

    y [T, D]: x times the norm's weight; squares [T, P] float32, which sum over P to the sum of x squared.
    """

    y: jax.Array
    squares: jax.Array
    eps: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.y.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.y.dtype

    def array(self) -> jax.Array:
        """The norm [T, D], of y's dtype."""
        factor = lax.rsqrt(jnp.sum(self.squares, axis=1, keepdims=True) / self.y.shape[1] + self.eps)
        return (self.y.astype(jnp.float32) * factor).astype(self.y.dtype)


def choose(tokens: int, width: int, *, backend: str) -> Choice:
    """The implementation of `residual_norm` for rows [tokens, width] on one device; backend: `Backend.add_norm`."""
    from inferlib.pallas_kernels.add_norm_gpu import fits

    reason = None if backend == "xla" or fits(tokens, width) else f"{tokens} rows of {width} numbers"
    return Choice.of(backend, reason)


def choose_all_reduce(tokens: int, width: int, dtype: jnp.dtype, *, backend: str) -> Choice:
    """The implementation of `residual_norm` for partial sums [tokens, width] of several devices; backend:
    `Backend.all_reduce`."""
    if backend == "xla":
        return Choice(backend)
    from inferlib.pallas_kernels.all_reduce_norm_gpu import fits

    return Choice.of(backend, None if fits(tokens, width, dtype) else f"{tokens} rows of {width} {dtype} numbers")


def open_mailboxes(tokens: int, width: int, axis: str) -> Mailboxes:
    """Mailboxes for partial sums [tokens, width] of the devices along `axis`, the only axis of the mesh."""
    from inferlib.pallas_kernels.all_reduce_norm_gpu import open_mailboxes as open_them

    return open_them(tokens, width, axis)


def residual_norm(
    x: jax.Array,
    branch: jax.Array | PartialSums,
    weight: jax.Array,
    eps: float,
    *,
    mailboxes: Mailboxes | None = None,
    backend: str = "pallas_gpu",
) -> tuple[jax.Array, jax.Array | DeferredNorm, Mailboxes | None]:
    """The residual x [T, D] plus a branch, the RMS norm of the sum times weight [D], and the mailboxes.

    branch: [T, D]; or split-K partial sums of it, which give a norm without its factor; or, with mailboxes, this
    device's partial sum [T, D]. The sum is rounded, then normed in float32. GPU kernels are interpreted on CPU,
    except for the one with mailboxes.
    """
    if mailboxes is not None:
        assert not isinstance(branch, PartialSums)
        from inferlib.pallas_kernels.all_reduce_norm_gpu import all_reduce_norm

        return all_reduce_norm(branch, x, weight, eps, mailboxes)
    if backend == "xla":
        return *reference(x, branch, weight, eps), None
    if not isinstance(branch, PartialSums):
        from inferlib.pallas_kernels.add_norm_gpu import add_norm

        x, y = run_kernel(partial(add_norm, eps=eps), branch, x, weight)
        return x, y, None
    from inferlib.pallas_kernels.partial_sums_gpu import added

    x, y, squares = run_kernel(added, branch.splits, x, weight, branch.addend)
    return x, DeferredNorm(y, squares, eps), None


def reference(
    x: jax.Array, branch: jax.Array | PartialSums, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """`residual_norm` on one device, with a whole norm. Kernels are compared with it."""
    x = x + (branch.total(x.dtype) if isinstance(branch, PartialSums) else branch)
    y = x.astype(jnp.float32)
    factor = lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return x, (y * factor * weight.astype(jnp.float32)).astype(x.dtype)
