"""The state of the fused all-reduce, apart from its kernel, which is slow to import."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Mailboxes(NamedTuple):
    """Arrays that successive calls of `all_reduce_norm` share: each call takes the ones that the last call returned.
    Donate them between programs."""

    rows: jax.Array  # [2, devices, T, D]: the rows of every device, in turn
    calls: jax.Array  # [T] int32: calls so far
    peers: jax.Array  # [2 * (devices + 1)] int32: the 64-bit addresses of every device's rows, then this one's index
