"""The residual stream, and the branches that layers add to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from inferlib.ops.partial_sums import PartialSums
from inferlib.ops.residual_norm import Mailboxes
from inferlib.sharding.shards import Shards


@dataclass(frozen=True)
class Branch:
    """The addition of a mixer or a feed-forward to the residual.

    partials: this device's partial sum [T, D], which is still to be summed over the logical axes `over`; or split-K
    partial sums of one product. biases [D]: added after the sum.
    """

    partials: Any  # an array or `PartialSums`
    over: tuple[str, ...] = ()
    biases: tuple[jax.Array, ...] = ()

    def total(self, shards: Shards) -> jax.Array:
        """The whole sum [T, D]; where tokens are split, of this device's tokens."""
        assert not isinstance(self.partials, PartialSums)
        return sum(self.biases, shards.sum_tokens(self.partials, *self.over) if self.over else self.partials)

    def local(self) -> jax.Array | PartialSums:
        """The partial sums of this device, with the biases added, which split-K partial sums do not have."""
        return self.partials if isinstance(self.partials, PartialSums) else sum(self.biases, self.partials)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residual:
    """The residual stream between two branches.

    x [T, D]: the residual, or several of them [T, N, D]; where tokens or the width are split, this device's share.
    pending: a branch [T, D] that is still to be added, or its split-K partial sums; one kernel adds it and norms the
    sum (see `ops.residual_norm`). deferred [T, D]: this device's partial sum of experts, which is summed with the next
    feed-forward (see `MoeSpec.deferred`). late: of a model with lanes, what the next layers add (see
    `inferlib.models.lanes.LateSums`). mailboxes: state of the kernel that also sums over devices. lazy: branches
    are left pending.
    """

    x: jax.Array
    pending: jax.Array | PartialSums | None = None
    deferred: jax.Array | None = None
    late: tuple[Any, ...] = ()
    mailboxes: Mailboxes | None = None
    lazy: bool = field(default=False, metadata={"static": True})

    @property
    def value(self) -> jax.Array:
        """x with the pending branch added, rounded as the kernel that adds it does; of one device."""
        if self.pending is None:
            return self.x
        branch = self.pending
        return self.x + (branch.total(self.x.dtype) if isinstance(branch, PartialSums) else branch)

    def plus(self, branch: Branch, shards: Shards, scale: float = 1.0) -> Residual:
        """The residual with a branch times `scale` added, or left pending."""
        if self.lazy:
            return replace(self, pending=branch.local())
        y = branch.total(shards)
        return replace(self, x=self.x + (y if scale == 1.0 else y * scale))
