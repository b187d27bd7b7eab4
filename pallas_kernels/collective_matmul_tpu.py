"""Matrix products that overlap with their collective on TPUs: all-gather before, or reduce-scatter after.

The devices of a mesh axis form a ring. In each of n steps a device multiplies the rows that it has while the next ones
travel, half of them to the right and half to the left, so that both directions of the links are busy. On-chip memory
has two buffers for the rows that travel: a device multiplies and passes on one while a neighbour writes the other, as
soon as it is told that this one is free. Weights stay on chip for all steps if they fit. (Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition".)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import Shaped
from inferlib.pallas_kernels.arithmetic_tpu import div, rem
from inferlib.pallas_kernels.generations_tpu import by_vmem
from inferlib.pallas_kernels.tuned_tpu import tuned

LANES, SUBLANES = 128, 16
VMEM_BYTES = 48 << 20  # of 64 MiB, see `by_vmem`
MARGIN_BYTES = 4 << 20  # of VMEM, for the compiler
COLUMNS = 512
# Rows of a product, the best number first: with many rows, the weight is pushed into the matrix unit less often.
_HEIGHTS = (*range(576, 112, -SUBLANES), *range(1024, 576, -SUBLANES), *range(112, 0, -SUBLANES))
# Neighbours meet before they write to each other. A neighbour that has finished a call needed this device's rows for
# it, so this device had met both neighbours by then. A neighbour that is early for the next call is therefore not
# mistaken for one in this call.
_GATHER_ID, _SCATTER_ID = 0, 1


@dataclass(frozen=True)
class Blocks:
    """columns: columns of the weight that are copied together. resident: columns that are on chip at a time; all of
    them, if the weight stays there for all steps. rows: rows of a product."""

    columns: int
    resident: int
    rows: int

    def __post_init__(self):
        if self.columns % LANES or self.rows % SUBLANES or min(self.columns, self.rows) < 1:
            raise ValueError(f"columns are multiples of {LANES} and rows of {SUBLANES}, not as in {self}")
        if self.resident % self.columns or self.resident < self.columns:
            raise ValueError(f"{self.resident} columns on chip are not one or more copies of {self.columns}")

    @property
    def buffers(self) -> int:
        return self.resident // self.columns

    def vmem_bytes(self, rows: int, inner: int, outer: int, itemsize: int, *, scatters: bool) -> int:
        """Bytes of VMEM for `rows` rows of a device and weights [L, P, inner, outer]."""
        arrays = self.resident * inner + 2 * rows * (inner + (outer if scatters else self.columns))
        product = self.rows * (inner * itemsize + 4 * self.columns)  # the compiler's copy of a product
        return arrays * itemsize + product + by_vmem(MARGIN_BYTES)


@tuned("collective_matmul", Blocks)
def blocks(rows: int, parts: int, inner: int, outer: int, itemsize: int, scatters: bool) -> Blocks:
    """Blocks for `rows` rows of a device and weights [L, parts, inner, outer]: all of the weight is on chip if it
    fits, otherwise four or two blocks."""
    columns, whole = _columns(parts, outer)
    heights = _heights(rows)
    choices = [Blocks(columns, resident, n) for resident in (whole, 4 * columns, 2 * columns) for n in heights]
    need = (one.vmem_bytes(rows, inner, outer, itemsize, scatters=scatters) for one in choices)
    return next((one for one, n in zip(choices, need, strict=True) if n <= by_vmem(VMEM_BYTES)), choices[-1])


def stays(rows: int, parts: int, inner: int, outer: int, itemsize: int, scatters: bool) -> bool:
    """True if weights [L, parts, inner, outer] stay on chip beside `rows` rows of a device; otherwise they are read in
    each step."""
    least = Blocks(*_columns(parts, outer), min(_heights(rows)))
    return least.vmem_bytes(rows, inner, outer, itemsize, scatters=scatters) <= by_vmem(VMEM_BYTES)


def _columns(parts: int, outer: int) -> tuple[int, int]:
    """The columns that are copied together, and all columns."""
    columns = next((n for n in range(COLUMNS, LANES, -LANES) if outer % n == 0), LANES)
    return columns, max(parts * outer // columns, 1) * columns


def _heights(rows: int) -> list[int]:
    """Possible numbers of rows of a product, the best first; fewer than LANES only if no larger number divides."""
    heights = [n for n in _HEIGHTS if rows % n == 0] or [SUBLANES]
    return [n for n in heights if n >= LANES] or heights[:1]


def unsupported(rows: int, x: Shaped, w: Shaped, *, scatters: bool, blocks_: Blocks | None = None) -> str | None:
    """Why the kernels cannot multiply x [..., K] by w [L, P, K, N]; None if they can. rows: rows of x, or of the
    result if `scatters`, on each device. scatters: ask for `matmul_reduce_scatter`."""
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"they take rows and weights of bfloat16, or both of float32, not {x.dtype} and {w.dtype}"
    if rows % SUBLANES or rows < 2 * SUBLANES:
        return (
            f"a device has {rows} rows, not a multiple of {SUBLANES} from {2 * SUBLANES} on: half of them go each way"
        )
    chosen, (inner, outer) = blocks_ or _default(rows, w, scatters), w.shape[2:]
    if inner % LANES or outer % chosen.columns:
        return f"weights of {inner} x {outer} do not divide into tiles of {LANES} and columns of {chosen.columns}"
    if rows % chosen.rows:
        return f"{rows} rows do not divide into products of {chosen.rows}"
    if (need := _vmem_bytes(chosen, rows, w, scatters)) > (have := by_vmem(VMEM_BYTES)):
        return f"{rows} rows and weights {inner} x {outer} need {need} bytes on chip, and there are {have}"
    return None


def _default(rows: int, w: Shaped, scatters: bool) -> Blocks:
    return blocks(rows, *w.shape[1:], w.dtype.itemsize, scatters)


def _vmem_bytes(chosen: Blocks, rows: int, w: Shaped, scatters: bool) -> int:
    return chosen.vmem_bytes(rows, w.shape[2], w.shape[3], w.dtype.itemsize, scatters=scatters)


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis: str,
    ring: Sequence[int] | None = None,
    layer: jax.Array | int = 0,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Gather x [T / n, K] of the n devices along a mesh axis to [T, K] and multiply it by a layer of this device's
    w [L, P, K, N] -> [P, T, N] in x's dtype; inside `shard_map`. Products are summed over K in float32.

    ring: the devices' indices on the axis in an order in which neighbours are near to each other, the last to the first
    too; 0, 1, ... if None. The same rows times the same weight give the same bits on every device, in any ring.
    Raises ValueError with the reason of `unsupported`.
    """
    rows, inner = x.shape
    chosen = _checked(rows, x, w, blocks, scatters=False)
    devices, (_, parts, _, outer) = lax.axis_size(axis), w.shape
    call = _Call(
        "all_gather_matmul",
        functools.partial(_gather_kernel, axis=axis, height=chosen.rows),
        jax.ShapeDtypeStruct((parts, devices * rows, outer), x.dtype),
        scratch=[
            pltpu.VMEM((2, rows, inner), x.dtype),
            pltpu.VMEM((chosen.buffers, inner, chosen.columns), w.dtype),
            pltpu.VMEM((2, rows, chosen.columns), x.dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((chosen.buffers,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.REGULAR((2,)),
        ],
        flops=2 * devices * x.size * parts * outer,
        sent=rows * inner,
        weights=(1 if chosen.resident >= parts * outer else devices) * inner * parts * outer,
        vmem_bytes=_vmem_bytes(chosen, rows, w, scatters=False),
        collective_id=_GATHER_ID,
    )
    return call(x, w, layer, axis=axis, ring=ring, interpret=interpret)


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis: str,
    ring: Sequence[int] | None = None,
    layer: jax.Array | int = 0,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Multiply this device's x [T, K] by a layer of its w [L, K, N] and sum over the n devices along a mesh axis; each
    device gets its shard [T / n, N] of the sum [T, N] in x's dtype; inside `shard_map`.

    ring: see `all_gather_matmul`. Order of summation: over K in float32, then along the ring. The first half of a
    device's rows travels to the right, from its right neighbour all around to itself; the second half travels to the
    left, from its left neighbour. Each addition is in float32, and the sum that is sent on is rounded to x's dtype.
    Raises ValueError with the reason of `unsupported`.
    """
    devices, (total, inner), outer = lax.axis_size(axis), x.shape, w.shape[-1]
    if total % devices:
        raise ValueError(f"the reduce-scatter of a product splits {total} rows over {devices} devices: pad them")
    rows, w = total // devices, w[:, None]
    chosen = _checked(rows, x, w, blocks, scatters=True)
    count = outer // chosen.columns
    call = _Call(
        "matmul_reduce_scatter",
        functools.partial(_scatter_kernel, axis=axis, height=chosen.rows),
        jax.ShapeDtypeStruct((rows, outer), x.dtype),
        scratch=[
            pltpu.VMEM((2, rows, inner), x.dtype),
            pltpu.VMEM((chosen.buffers, inner, chosen.columns), w.dtype),
            pltpu.VMEM((2, count, rows, chosen.columns), x.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((chosen.buffers,)),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((2, count)),
            pltpu.SemaphoreType.DMA((2, 2, count)),
            pltpu.SemaphoreType.REGULAR((2,)),
        ],
        flops=2 * x.size * outer,
        sent=rows * outer,
        weights=(1 if chosen.resident >= outer else devices) * inner * outer,
        vmem_bytes=_vmem_bytes(chosen, rows, w, scatters=True),
        collective_id=_SCATTER_ID,
    )
    return call(x, w, layer, axis=axis, ring=ring, interpret=interpret)


def _checked(rows: int, x: jax.Array, w: jax.Array, chosen: Blocks | None, *, scatters: bool) -> Blocks:
    if x.shape[-1] != w.shape[-2]:
        raise ValueError(f"x {x.shape} and a layer's weight {w.shape[1:]} do not go together")
    if reason := unsupported(rows, x, w, scatters=scatters, blocks_=chosen):
        raise ValueError(f"the TPU kernel does not run this product with its collective: {reason}")
    return chosen or _default(rows, w, scatters)


@dataclass(frozen=True)
class _Call:
    """One of the two kernels for arrays of given shapes.

    out: the result. flops: of all steps. sent: elements that a device sends to others in a step. weights: elements of
    the weight that a device reads in all steps.
    """

    name: str
    kernel: Callable
    out: jax.ShapeDtypeStruct
    scratch: list
    flops: int
    sent: int
    weights: int
    vmem_bytes: int
    collective_id: int

    def __call__(
        self,
        x: jax.Array,
        w: jax.Array,
        layer: jax.Array | int,
        *,
        axis: str,
        ring: Sequence[int] | None,
        interpret: bool | pltpu.InterpretParams,
    ) -> jax.Array:
        """x times a layer of w [L, P, K, N] by the kernel, over the devices of a mesh axis in the order of `ring`."""
        devices, me = lax.axis_size(axis), lax.axis_index(axis)
        around = _around(devices, axis, ring)
        if not interpret:  # otherwise XLA would bring small weights to VMEM
            w = pltpu.with_memory_space_constraint(w, pltpu.HBM)
        return pl.pallas_call(
            self.kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(),
                in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
                out_specs=pl.BlockSpec(memory_space=pl.ANY),
                scratch_shapes=self.scratch,
            ),
            out_shape=self.out,
            compiler_params=pltpu.CompilerParams(
                collective_id=self.collective_id, disable_bounds_checks=True, vmem_limit_bytes=self.vmem_bytes
            ),
            cost_estimate=pl.CostEstimate(
                flops=self.flops,
                bytes_accessed=(self.weights + x.size + self.out.size) * x.dtype.itemsize,
                transcendentals=0,
                remote_bytes_transferred=(devices - 1) * self.sent * x.dtype.itemsize,
            ),
            interpret=interpret,
            name=self.name,
        )(jnp.asarray(layer, jnp.int32).reshape(1), jnp.asarray(around, jnp.int32)[me], x, w)


def _around(devices: int, axis: str, ring: Sequence[int] | None) -> np.ndarray:
    """[n, 2, n]: for each device the devices 0, 1, ... places to its left, and to its right."""
    order = np.arange(devices) if ring is None else np.asarray(ring)
    if sorted(order.tolist()) != list(range(devices)):
        raise ValueError(f"a ring of {devices} devices names each once, not {order.tolist()}")
    if devices < 2:
        raise ValueError(f"there is one device along {axis!r}: it needs no collective")
    places, steps = np.argsort(order)[:, None], np.arange(devices)
    return np.stack([order[(places - steps) % devices], order[(places + steps) % devices]], axis=1)


# ---- parts that both kernels use


class _Weights:
    """The blocks of a layer's weight in the order in which every step takes them."""

    def __init__(self, layer_ref, w_hbm, buf, sems, steps):
        self.layer, self.w_hbm, self.buf, self.sems, self.steps = layer_ref[0], w_hbm, buf, sems, steps
        (self.buffers, _, self.columns), (_, parts, _, outer) = buf.shape, w_hbm.shape
        self.pieces = outer // self.columns
        self.count = parts * self.pieces
        self.stays = self.buffers >= self.count

    def place(self, block):
        """Part and first column of a block."""
        return div(block, self.pieces), pl.multiple_of(rem(block, self.pieces) * self.columns, LANES)

    def copy(self, at):
        """The copy of the block that is `at`-th in all steps."""
        part, column = self.place(rem(at, self.count))
        source = self.w_hbm.at[self.layer, part, :, pl.ds(column, self.columns)]
        slot = rem(at, self.buffers)
        return pltpu.make_async_copy(source, self.buf.at[slot], self.sems.at[slot])

    def begin(self):
        lax.fori_loop(0, min(self.buffers, self.count), lambda at, _: self.copy(at).start(), None)

    def of(self, step, block):
        """The ref of a block, after its copy has arrived."""
        at = step * self.count + block
        pl.when((step == 0) | (not self.stays))(lambda: self.copy(at).wait())
        return self.buf.at[block if self.stays else rem(at, self.buffers)]

    def done(self, step, block):
        """Start the copy of the next block into this block's buffer."""
        if not self.stays:
            at = step * self.count + block + self.buffers
            pl.when(at < self.steps * self.count)(lambda: self.copy(at).start())


def _meet(ring_ref, axis):
    """Wait until both neighbours run this kernel."""
    barrier = pltpu.get_barrier_semaphore()
    for side in range(2):
        _signal(barrier, ring_ref[side, 1], axis)
    pl.semaphore_wait(barrier, 2)


def _signal(sem, device, axis):
    pl.semaphore_signal(sem, 1, device_id={axis: device}, device_id_type=pl.DeviceIdType.MESH)


def _product(x, w):
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, w, precision=exact, preferred_element_type=jnp.float32)


def _half(side, rows):
    """Start and count of a device's rows that travel to the right (side 0) or to the left."""
    first = pl.cdiv(rows, 2 * SUBLANES) * SUBLANES
    return (0, first) if side == 0 else (first, rows - first)


# ---- kernels


def _gather_kernel(layer_ref, ring_ref, x_hbm, w_hbm, out_hbm, *scratch, axis, height):
    """In step s, multiply the first half of the rows of the device s places to the left, and the second half of those
    of the device s places to the right.

    Scalars: layer [1], ring [2, n] (see `_around`). x [R, K], w [L, P, K, N], out [P, n R, N] in HBM. Scratch: rows
    [2, R, K]; blocks of weights [BUFFERS, K, C]; results [2, R, C]; semaphores: of x, of blocks, of results, of sent
    rows for each side, of received rows for each buffer and side, and how often the neighbour's next buffer is free.
    """
    gathered, w_buf, staged, x_sem, w_sems, out_sems, send_sems, recv_sems, free_sems = scratch
    steps, (_, rows, _) = ring_ref.shape[1], gathered.shape
    weights = _Weights(layer_ref, w_hbm, w_buf, w_sems, steps)

    def send(step, side):
        here, there, at = rem(step, 2), rem(step + 1, 2), pl.ds(*_half(side, rows))
        return pltpu.make_async_remote_copy(
            gathered.at[here, at],
            gathered.at[there, at],
            send_sems.at[side],
            recv_sems.at[there, side],
            device_id={axis: ring_ref[1 - side, 1]},
            device_id_type=pl.DeviceIdType.MESH,
        )

    def store(at, side):
        """Copy one half of the `at`-th block's results to HBM."""
        step, slot, (start, count) = div(at, weights.count), rem(at, 2), _half(side, rows)
        part, column = weights.place(rem(at, weights.count))
        row = pl.multiple_of(ring_ref[side, step] * rows + start, SUBLANES)
        target = out_hbm.at[part, pl.ds(row, count), pl.ds(column, weights.columns)]
        return pltpu.make_async_copy(staged.at[slot, pl.ds(start, count)], target, out_sems.at[slot])

    def stored(at):
        for side in range(2):
            store(at, side).wait()

    local_copy = pltpu.make_async_copy(x_hbm, gathered.at[0], x_sem)
    local_copy.start()
    weights.begin()
    _meet(ring_ref, axis)
    local_copy.wait()

    def take_step(step, _):
        for side in range(2):

            @pl.when(step > 0)
            def _(side=side):
                send(step - 1, side).wait_recv()

            @pl.when((step > 0) & (step < steps - 1))
            def _(side=side):
                pl.semaphore_wait(free_sems.at[side], 1)

            @pl.when(step < steps - 1)
            def _(side=side):
                send(step, side).start()

        def take_block(block, _):
            at, w = step * weights.count + block, weights.of(step, block)
            pl.when(at >= 2)(lambda: stored(at - 2))

            def multiply(tile, _):
                these = pl.ds(pl.multiple_of(tile * height, SUBLANES), height)
                y = _product(gathered[rem(step, 2), these], w[...])
                staged[rem(at, 2), these] = y.astype(staged.dtype)

            lax.fori_loop(0, rows // height, multiply, None)
            for side in range(2):
                store(at, side).start()
            weights.done(step, block)

        lax.fori_loop(0, weights.count, take_block, None)
        for side in range(2):

            @pl.when(step < steps - 1)
            def _(side=side):
                send(step, side).wait_send()

            @pl.when(step < steps - 2)
            def _(side=side):
                _signal(free_sems.at[side], ring_ref[side, 1], axis)

    lax.fori_loop(0, steps, take_step, None)
    last = steps * weights.count
    for at in range(last - min(2, last), last):
        stored(at)


def _scatter_kernel(layer_ref, ring_ref, x_hbm, w_hbm, out_hbm, *scratch, axis, height):
    """In step s, add to the sums that belong to two devices s + 1 places away: the first half of the rows of the left
    one, and the second half of the rows of the right one. In the last step both are this device.

    Scalars: layer [1], ring [2, n] (see `_around`). x [n R, K], w [L, 1, K, N], out [R, N] in HBM. Scratch: rows
    [2, R, K]; blocks of weights [BUFFERS, K, C]; sums [2, N / C, R, C]; semaphores: of x, of blocks, of the result, of
    sent blocks for each side, of received blocks for each buffer and side, and how often the neighbour's is free.
    """
    x_buf, w_buf, sums, x_sems, w_sems, out_sem, send_sems, recv_sems, free_sems = scratch
    steps, (_, _, rows, columns) = ring_ref.shape[1], sums.shape
    weights = _Weights(layer_ref, w_hbm, w_buf, w_sems, steps)

    def read(step, side):
        device = ring_ref[side, jnp.where(step == steps - 1, 0, step + 1)]
        slot, (start, count) = rem(step, 2), _half(side, rows)
        source = x_hbm.at[pl.ds(pl.multiple_of(device * rows + start, SUBLANES), count)]
        return pltpu.make_async_copy(source, x_buf.at[slot, pl.ds(start, count)], x_sems.at[slot])

    def send(step, block, side):
        here, there, at = rem(step, 2), rem(step + 1, 2), pl.ds(*_half(side, rows))
        return pltpu.make_async_remote_copy(
            sums.at[here, block, at],
            sums.at[there, block, at],
            send_sems.at[side, block],
            recv_sems.at[there, side, block],
            device_id={axis: ring_ref[1 - side, 1]},
            device_id_type=pl.DeviceIdType.MESH,
        )

    def store(block):
        target = out_hbm.at[:, pl.ds(pl.multiple_of(block * columns, LANES), columns)]
        return pltpu.make_async_copy(sums.at[(steps - 1) % 2, block], target, out_sem)

    for side in range(2):
        read(0, side).start()
    weights.begin()
    _meet(ring_ref, axis)

    def take_step(step, _):
        for side in range(2):
            read(step, side).wait()
            pl.when(step < steps - 1)(lambda side=side: read(step + 1, side).start())

        def take_block(block, _):
            w, slot = weights.of(step, block), rem(step, 2)
            for side in range(2):

                @pl.when(step > 0)
                def _(side=side):
                    send(step - 1, block, side).wait_send()

                @pl.when((step > 0) & (step < steps - 1))
                def _(side=side):
                    _signal(free_sems.at[side], ring_ref[side, 1], axis)

                @pl.when(step > 0)
                def _(side=side):
                    send(step - 1, block, side).wait_recv()

            def multiply(tile, _):
                these = pl.ds(pl.multiple_of(tile * height, SUBLANES), height)
                y = _product(x_buf[slot, these], w[...])
                before = sums[slot, block, these].astype(jnp.float32)  # none in the first step
                sums[slot, block, these] = jnp.where(step > 0, y + before, y).astype(sums.dtype)

            lax.fori_loop(0, rows // height, multiply, None)
            for side in range(2):

                @pl.when((step > 0) & (step < steps - 1))
                def _(side=side):
                    pl.semaphore_wait(free_sems.at[side], 1)

                @pl.when(step < steps - 1)
                def _(side=side):
                    send(step, block, side).start()

            pl.when(step == steps - 1)(lambda: store(block).start())
            weights.done(step, block)

        lax.fori_loop(0, weights.count, take_block, None)

    lax.fori_loop(0, steps, take_step, None)
    lax.fori_loop(0, weights.count, lambda block, _: store(block).wait(), None)
