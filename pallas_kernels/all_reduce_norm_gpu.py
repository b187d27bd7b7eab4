"""One-shot all-reduce over the NVIDIA GPUs of one process, fused with the residual sum and RMS norm that follow it.

Every device stores its rows into a mailbox of every device, waits until its local mailbox is full, and adds up the rows
in the order of the devices, so that all get the same bits. There are no flags and no fences: an empty mailbox holds a
word that no sender writes, a row has arrived when none of its words is that word, and its reader empties it again. Two
mailboxes take turns. Before a device fills one again, it has received rows from every other device, and each sent them
after emptying that mailbox. (The Lamport protocol of TensorRT-LLM's one-shot all-reduce; plain loads and stores over
NVLink, no multicast.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from inferlib.pallas_kernels.mailboxes import Mailboxes

# Measured on 4 H200 (jax 0.11.2, D 4096, between two matmuls of one program, on the device's time line, with gaps of
# 0.1 to 0.3 us on either side): 1 row 3.7-4.2 us, 16 rows 4.2-4.7 us; 64 rows with one warpgroup each 9.4 us. Opening
# the mailboxes costs two small collectives and an exchange of addresses by the host: once, not in every step.
MAX_TOKENS = 256  # a block waits for its row, so all blocks must be resident at once: two on each of 132 SMs
GROUP, VECTOR = 128, 8  # threads of a warpgroup; values that a thread loads at once (16 bytes)
LINE = GROUP * VECTOR  # values a warpgroup loads at once
EMPTY = np.int32(-0x7FFF8000)  # 0x80008000: two negative zeros, which are sent as positive ones
TRIES = 1 << 26  # reads of a mailbox that stays empty, most of a microsecond each, until the program is stopped
_inline: Any = plgpu.inline_mgpu  # its annotations have no place for the `ctx` that it passes


def fits(tokens: int, width: int, dtype) -> bool:
    """True if `all_reduce_norm` takes arrays [tokens, width] of this dtype."""
    return tokens <= MAX_TOKENS and width % LINE == 0 and dtype == jnp.bfloat16


def open_mailboxes(tokens: int, width: int, axis: str) -> Mailboxes:
    """Empty mailboxes for `all_reduce_norm` of [tokens, width]; inside `shard_map`, over the only axis of a mesh in
    the order of the devices' ids."""
    devices = lax.axis_size(axis)
    if (mesh := jax.sharding.get_abstract_mesh()).size != devices:
        raise ValueError(
            f"mailboxes need a mesh of one axis; {axis!r} spans {devices} of {mesh.size} devices {mesh.shape}"
        )
    empty = lax.bitcast_convert_type(jnp.full((2, devices, tokens, width // 2), EMPTY), jnp.bfloat16)
    # All devices empty their mailboxes before any may send. The barrier keeps XLA from folding the sum of a constant.
    empty = lax.optimization_barrier(empty.reshape(2, devices, tokens, width))
    met = lax.psum(empty[0, 0, 0, 0].astype(jnp.float32), axis)

    @_inline(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def write_addresses(ctx, rows, peers):
        values = [_address(ctx.to_remote(rows, _const(device))) for device in range(devices)]
        for k, value in enumerate([*values, arith.extui(_int(64), ctx.device_id())]):
            _ptx("st.global.b64 [$0], $1;", _pointer(_address(peers), 8 * k), value)

    rows = jax.new_ref(empty)
    out = jax.ShapeDtypeStruct((2 * (devices + 1),), jnp.int32)
    kernel = _launch(lambda rows, met, out: write_addresses(rows, out), "open_mailboxes", (1, 1), out)
    peers = kernel(rows, met.reshape(1))
    return Mailboxes(jax.freeze(rows), jnp.zeros((tokens,), jnp.int32), peers)


def all_reduce_norm(
    partial_sum: jax.Array, residual: jax.Array, weight: jax.Array, eps: float, mailboxes: Mailboxes
) -> tuple[jax.Array, jax.Array, Mailboxes]:
    """x = residual + the sum of all devices' `partial_sum`, and its RMS norm times weight.

    partial_sum, residual [T, D] bfloat16, T at most MAX_TOKENS, D a multiple of 1024; weight [D]. Sums are float32; x
    is rounded before it is normed. Returns x, the norm (both [T, D], the same bits on every device) and the mailboxes
    for the next call. Stops the program if the mailboxes were copied or a device's rows do not come within a minute.
    """
    tokens, width = partial_sum.shape
    if not fits(tokens, width, partial_sum.dtype):
        raise ValueError(
            f"all_reduce_norm takes at most {MAX_TOKENS} rows of bfloat16, their width a multiple of {LINE}; "
            f"{partial_sum.dtype}[{tokens}, {width}] needs lax.psum"
        )
    # The warpgroups of a row: four at most, and one if rows outnumber the SMs, so that all are resident.
    groups = 1 if tokens > MAX_TOKENS // 2 else max(n for n in (1, 2, 4) if width // LINE % n == 0)
    share = width // groups
    layout = plgpu.Layout.WG_STRIDED((share,), vec_size=VECTOR)
    add_up, total = _add_up(mailboxes.rows.shape[1:], share, layout), _total(groups, layout)

    def kernel(partial_sum, residual, weight, rows, calls, peers, x_out, y_out):
        row, here = lax.axis_index("row"), pl.ds(lax.axis_index("group") * share, share)
        before, scale = _load(residual.at[row, here], layout), _load(weight.at[here], layout)
        x = (add_up(partial_sum, rows, calls, peers) + before).astype(x_out.dtype)
        x_out[row, here] = x
        x = x.astype(jnp.float32)
        squares = pl.run_scoped(partial(total, x * x), plgpu.SMEM((groups * 4,), jnp.float32), collective_axes="group")
        y_out[row, here] = (x * lax.rsqrt(squares / width + eps) * scale).astype(y_out.dtype)

    rows, calls = jax.new_ref(mailboxes.rows), jax.new_ref(mailboxes.calls)
    out = jax.ShapeDtypeStruct(partial_sum.shape, partial_sum.dtype)
    run = _launch(kernel, "all_reduce_norm", (tokens, groups), (out, out))
    x, y = run(partial_sum, residual, weight, rows, calls, mailboxes.peers)
    return x, y, Mailboxes(jax.freeze(rows), jax.freeze(calls), mailboxes.peers)


def _launch(kernel, name, size, out) -> Any:
    mesh = plgpu.Mesh(grid=size[:1], grid_names=("row",), num_threads=size[1], thread_name="group")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return pl.kernel(kernel, out, mesh=mesh, compiler_params=params, name=name)


def _add_up(shape, share, layout):
    """The exchange of one block's row: a function of refs (partial sums, rows of the mailboxes, calls, peers) that
    returns the sum over devices, [share] float32."""
    devices, tokens, width = shape
    row_bytes, line_bytes, lines = 2 * width, 2 * LINE, share // LINE
    box_bytes = tokens * row_bytes  # bytes of one sender's box
    result = plgpu.ShapeDtypeStruct((share,), jnp.float32, layout=layout)

    @_inline(arg_types=(plgpu.RefType(),) * 4, return_type=result)
    def add_up(ctx, partial_sum, rows, calls, peers):
        i32, i64 = _int(32), _int(64)
        add, times = arith.addi, lambda value, factor: arith.muli(value, _const(factor, 64))
        equal = partial(arith.cmpi, arith.CmpIPredicate.eq)
        row, thread = (arith.index_cast(i64, f(gpu.Dimension.x)) for f in (gpu.block_id, gpu.thread_id))
        group, lane = (op(thread, _const(GROUP, 64)) for op in (arith.divui, arith.remui))
        here = add(times(row, row_bytes), add(times(group, 2 * share), times(lane, 2 * VECTOR)))  # bytes into [T, D]

        count = _pointer(add(_address(calls), times(row, 4)))
        [done] = _ptx("ld.global.b32 $0, [$1];", count, out=(i32,))
        known = _pointer(_address(peers))
        *bases, me = [_ptx(f"ld.global.b64 $0, [$1+{8 * k}];", known, out=(i64,))[0] for k in range(devices + 1)]
        known = bases[0]
        for device in range(1, devices):
            known = arith.select(equal(me, _const(device, 64)), bases[device], known)
        moved = arith.cmpi(arith.CmpIPredicate.ne, known, _address(rows))
        _ptx("@$0 trap;", moved)

        source, empty = _pointer(add(_address(partial_sum), here)), _const(int(EMPTY))
        sent = []
        for n in range(lines):
            line = _ptx(f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{n * line_bytes}];", source, out=(i32,) * 4)
            sent.append([arith.select(equal(word, empty), _const(0), word) for word in line])
        turn = add(here, times(arith.extui(i64, arith.andi(done, _const(1))), devices * box_bytes))
        for base in bases:
            there = _pointer(add(base, add(turn, times(me, box_bytes))))
            for n in range(lines):
                _ptx(f"st.relaxed.sys.global.v4.b32 [$0+{n * line_bytes}], {{$1, $2, $3, $4}};", there, *sent[n])

        box = _pointer(add(_address(rows), turn))
        offsets = [d * box_bytes + n * line_bytes for d in range(devices) for n in range(lines)]
        words = _wait_for_words(box, empty, offsets)
        for offset in offsets:
            _ptx(f"st.global.v4.b32 [$0+{offset}], {{$1, $1, $1, $1}};", box, empty)
        gpu.barrier()  # all warpgroups have read the count
        first = equal(thread, _const(0, 64))
        _ptx("@$2 st.global.b32 [$0], $1;", count, add(done, _const(1)), first)

        quad, eight = ir.VectorType.get((4,), i32), ir.VectorType.get((VECTOR,), ir.BF16Type.get())
        registers = np.empty((lines,), object)
        for n in range(lines):
            for device in range(devices):
                k = 4 * (device * lines + n)
                value = vector.bitcast(eight, vector.from_elements(quad, words[k : k + 4]))
                value = arith.extf(ir.VectorType.get((VECTOR,), ir.F32Type.get()), value)
                registers[n] = arith.addf(registers[n], value) if device else value
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return add_up


def _wait_for_words(box, empty, offsets):
    """Read 16 bytes at each offset of a mailbox until no word of 32 bits is `empty` -> the words."""
    count = 4 * len(offsets)
    ptx = "{ .reg .pred wait, late; .reg .u32 tries; mov.u32 tries, 0; AGAIN: "
    for k, offset in enumerate(offsets):
        line = ", ".join(f"${4 * k + word}" for word in range(4))
        ptx += f"ld.relaxed.sys.global.v4.b32 {{{line}}}, [${count}+{offset}]; "
    ptx += f"setp.eq.b32 wait, $0, ${count + 1}; "
    ptx += "".join(f"setp.eq.or.b32 wait, ${k}, ${count + 1}, wait; " for k in range(1, count))
    ptx += f"add.u32 tries, tries, 1; setp.gt.and.u32 late, tries, {TRIES}, wait; @late trap; @wait bra AGAIN; }}"
    return _ptx(ptx, box, empty, out=(_int(32),) * count)


def _load(ref, layout):
    """A warpgroup's part of a row, in float32."""
    result = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=layout)

    @_inline(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        return mgpu.FragmentedArray.load_strided(ref, vec_size=VECTOR)

    return load(ref).astype(jnp.float32)


def _total(groups, layout):
    """The sum over a block's warpgroups: a function (x [share] float32 of each, scratch [4 * groups]) -> scalar."""
    warps = 4 * groups
    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT)

    @_inline(arg_types=(layout, plgpu.RefType()), return_type=scalar)
    def total(ctx, x, scratch):
        f32, index = ir.F32Type.get(), ir.IndexType.get()
        registers = list(x.registers.flat)
        value = registers[0]
        for register in registers[1:]:
            value = arith.addf(value, register)
        value = vector.reduction(f32, vector.CombiningKind.ADD, value)
        for distance in (16, 8, 4, 2, 1):
            value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
        warp = arith.divui(gpu.thread_id(gpu.Dimension.x), arith.constant(index, 32))
        memref.store(value, scratch, [warp])  # all lanes store the same value
        gpu.barrier()
        value = memref.load(scratch, [arith.constant(index, 0)])
        for k in range(1, warps):
            value = arith.addf(value, memref.load(scratch, [arith.constant(index, k)]))
        return mgpu.FragmentedArray.splat(value, ())

    return total


def _int(bits):
    return ir.IntegerType.get_signless(bits)


def _const(value, bits=32):
    return arith.constant(_int(bits), value)


def _address(ref):
    return llvm.ptrtoint(_int(64), mgpu.utils.memref_ptr(ref))


def _pointer(address, offset=0):
    return llvm.inttoptr(llvm.PointerType.get(), arith.addi(address, _const(offset, 64)))


def _ptx(text, *args, out=()) -> list[Any]:
    """Inline assembly: operands $0... are the results (types `out`), then the arguments."""
    name = lambda type: {"i1": "b", "i32": "r"}.get(str(type), "l")  # noqa: E731
    # "&": a result may be written before an argument is read for the last time
    constraints = ",".join([*(f"=&{name(type)}" for type in out), *(name(arg.type) for arg in args)])
    kind = ir.Type.parse("!llvm.void") if not out else out[0] if len(out) == 1 else llvm.StructType.get_literal(out)
    asm: Any = llvm.inline_asm(kind, args, text, constraints, has_side_effects=True, asm_dialect=0, operand_attrs=[])
    return [asm] if len(out) == 1 else [llvm.extractvalue(type, asm, [k]) for k, type in enumerate(out)]
