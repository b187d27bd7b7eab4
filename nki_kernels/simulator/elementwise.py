"""Vector, Scalar and GpSimd engines: elementwise instructions, reductions along the free axes, masks, copies."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from inferlib.nki_kernels.simulator import dtypes
from inferlib.nki_kernels.simulator.access import (
    SBUF,
    busy,
    choose,
    free_dims,
    free_size,
    no_gpsimd_psum,
    operand,
    read,
    read_raw,
    same_layout,
    scalar_operand,
    write,
    write_raw,
)
from inferlib.nki_kernels.simulator.machine import Core, Engine, current
from inferlib.nki_kernels.simulator.operators import OPERATORS, Operator
from inferlib.nki_kernels.simulator.rules import require
from inferlib.nki_kernels.simulator.tensor import MemoryRegion, NkiTensor

EQUAL, MAXIMUM = OPERATORS["equal"], OPERATORS["maximum"]
COMPARES = ("equal", "less", "less_equal", "greater", "greater_equal")


class reduce_cmd(Enum):
    """What an instruction does to its engine's reduction registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


def _operator(what: str, op: Any, kinds: tuple[str, ...]) -> Operator:
    legal = isinstance(op, Operator) and op.kind in kinds
    require(legal, "argument", f"{what}: {op!r} is no {' or '.join(kinds)} operator")
    return op


def _speed(dst: NkiTensor, *sources: NkiTensor, most: int = 4) -> int:
    """The Vector engine's performance mode for 16-bit data: elements a lane and cycle."""
    tensors = (dst, *sources)
    if any(t.dtype not in ("bfloat16", "float16") for t in tensors):
        return 1
    dense = all(not free_dims(t) or free_dims(t)[-1][0] == 1 for t in tensors)
    in_psum = sum(t.buffer is MemoryRegion.psum for t in tensors)
    if in_psum:
        return 2 if in_psum == 1 and dense and most > 2 else 1
    return min(most, 4 if dense else 2)


def tensor_copy(dst, src, engine=Engine.unknown, name=None):
    """dst = src on chip."""
    core, what = current(), "tensor_copy"
    operand(core, f"{what} src", src)
    operand(core, f"{what} dst", dst)
    same_layout(what, dst, src)
    chosen = choose(what, engine, (Engine.vector, Engine.scalar, Engine.gpsimd))
    no_gpsimd_psum(what, chosen, dst, src)
    if dst.dtype == src.dtype:
        write_raw(core, what, dst, np.ascontiguousarray(read_raw(core, what, src)))
    else:
        write(core, what, dst, read(core, what, src))
    busy(core, chosen, free_size(dst) / (_speed(dst, src) if chosen is Engine.vector else 1))


def memset(dst, value, engine=Engine.unknown, name=None):
    """Fill `dst` with a number of its own kind."""
    core, what = current(), "memset"
    operand(core, f"{what} dst", dst)
    chosen = choose(what, engine, (Engine.vector, Engine.gpsimd))
    no_gpsimd_psum(what, chosen, dst)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if dst.dtype in dtypes.PACKED:
        require(value == 0, "dtype", f"{what} of {dst} to {value}: packed types take 0")
        write_raw(core, what, dst, np.zeros(dst.shape, dtypes.storage_dtype(dst.dtype)))
    else:
        fits = whole if dst.dtype in dtypes.INTEGERS else isinstance(value, float)
        require(fits, "dtype", f"{what} of {dst} to {value!r}, which is of another kind")
        if whole and dst.dtype in dtypes.INTEGERS:
            write_raw(core, what, dst, np.full(dst.shape, value, dtypes.storage_dtype(dst.dtype)))
        else:
            write(core, what, dst, np.full(dst.shape, value, np.float32))
    busy(core, chosen, free_size(dst))


def tensor_tensor(dst, data1, data2, op, engine=Engine.unknown, name=None):
    """dst = data1 op data2."""
    core, what = current(), "tensor_tensor"
    _operator(what, op, ("arithmetic", "bitvec"))
    for side, tensor in (("data1", data1), ("data2", data2), ("dst", dst)):
        operand(core, f"{what} {side}", tensor)
    same_layout(what, dst, data1, data2)
    _not_both_psum(what, data1, data2)
    wide = all(t.dtype in ("int32", "uint32") for t in (dst, data1, data2))
    in_sbuf = all(t.buffer is MemoryRegion.sbuf for t in (dst, data1, data2))
    # 32-bit integers go to GpSimd unless told otherwise, which computes them exactly.
    first = (Engine.gpsimd, Engine.vector) if wide and in_sbuf else (Engine.vector, Engine.gpsimd)
    chosen = choose(what, engine, first)
    no_gpsimd_psum(what, chosen, dst, data1, data2)
    if op.kind == "bitvec":
        _integers(what, dst, data1, data2)
        write_raw(core, what, dst, op.apply(read_raw(core, what, data1), read_raw(core, what, data2)))
    elif wide and chosen is Engine.gpsimd:
        exact = op.apply(read_raw(core, what, data1).astype(np.int64), read_raw(core, what, data2).astype(np.int64))
        write_raw(core, what, dst, np.asarray(exact).astype(dtypes.storage_dtype(dst.dtype)))
    else:
        with np.errstate(all="ignore"):
            write(core, what, dst, op.apply(read(core, what, data1), read(core, what, data2)))
    speed = _speed(dst, data1, data2, most=2) if chosen is Engine.vector else 1
    busy(core, chosen, 2 * free_size(dst) / speed)


def _not_both_psum(what: str, one: NkiTensor, other: NkiTensor) -> None:
    both = one.buffer is MemoryRegion.psum and other.buffer is MemoryRegion.psum
    require(not both, "two-psum", f"{what} of {one} and {other}")


def _integers(what: str, *tensors: NkiTensor) -> None:
    alike = len({t.dtype for t in tensors}) == 1 and tensors[0].dtype in dtypes.INTEGERS
    require(alike, "dtype", f"{what} of bits: {', '.join(map(str, tensors))} must be of one integer dtype")


def _apply(core, what, op, data, value, reverse):
    return op.apply(value, data) if reverse else op.apply(data, value)


def tensor_scalar(
    dst,
    data,
    op0,
    operand0,
    reverse0=False,
    op1=None,
    operand1=None,
    reverse1=False,
    engine=Engine.unknown,
    name=None,
):
    """dst = (data op0 operand0) op1 operand1, operands being numbers or columns."""
    core, what = current(), "tensor_scalar"
    ops = [(op0, operand0, reverse0)] + ([] if op1 is None else [(op1, operand1, reverse1)])
    require(op1 is not None or operand1 is None, "argument", f"{what}: operand1 without op1")
    kinds = {_operator(what, op, ("arithmetic", "bitvec")).kind for op, _, _ in ops}
    require(len(kinds) == 1, "argument", f"{what}: bitvec and arithmetic operators together")
    operand(core, f"{what} data", data)
    operand(core, f"{what} dst", dst)
    same_layout(what, dst, data)
    bits = kinds == {"bitvec"}
    chosen = choose(what, engine, (Engine.vector,) if bits else (Engine.vector, Engine.gpsimd))
    no_gpsimd_psum(what, chosen, dst, data)
    if bits:
        _integers(what, dst, data)
        values = read_raw(core, what, data)
        for op, number, reverse in ops:
            limits = np.iinfo(values.dtype)
            fits = isinstance(number, int) and limits.min <= number <= limits.max
            require(fits, "dtype", f"{what} of bits with {number!r} on {data}")
            values = _apply(core, what, op, values, values.dtype.type(number), reverse)
        write_raw(core, what, dst, values)
    else:
        values = read(core, what, data)
        with np.errstate(all="ignore"):
            for op, number, reverse in ops:
                column = scalar_operand(core, f"{what} operand", number, data.shape[0])
                values = _apply(core, what, op, values, column, reverse).astype(np.float32)
        write(core, what, dst, values)
    busy(core, chosen, free_size(dst) / (_speed(dst, data) if chosen is Engine.vector else 1))


def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    """dst = (data op0 operand0) op1 operand1, operand0 a number or column, operand1 a tile."""
    core, what = current(), "scalar_tensor_tensor"
    for op in (op0, op1):
        _operator(what, op, ("arithmetic",))
    for side, tensor in (("data", data), ("operand1", operand1), ("dst", dst)):
        operand(core, f"{what} {side}", tensor)
    same_layout(what, dst, data, operand1)
    _not_both_psum(what, data, operand1)
    column = scalar_operand(core, f"{what} operand0", operand0, data.shape[0])
    with np.errstate(all="ignore"):
        values = _apply(core, what, op0, read(core, what, data), column, reverse0)
        values = _apply(core, what, op1, values, read(core, what, operand1), reverse1)
    write(core, what, dst, values)
    busy(core, Engine.vector, 2 * free_size(dst))


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    """Reduce the trailing free axes `axis` of `data`, arithmetic in float32."""
    core, what = current(), "tensor_reduce"
    legal = _operator(what, op, ("arithmetic",)).reduction
    require(legal, "argument", f"{what} with {op!r}, which reduces nothing")
    operand(core, f"{what} data", data)
    operand(core, f"{what} dst", dst)
    axes = sorted([axis] if isinstance(axis, int) else axis)
    trailing = axes == list(range(data.ndim - len(axes), data.ndim)) and 0 not in axes
    require(trailing, "reduce-axis", f"{what} of axes {axes} of {data}")
    leading = data.shape[: axes[0]]
    fits = dst.shape[0] == data.shape[0] and dst.size == int(np.prod(leading))
    require(fits, "shape", f"{what} of axes {axes} of {data} into {dst}")
    values = read(core, what, data).reshape(*leading, -1)
    with np.errstate(all="ignore"):
        reduced = {"add": np.sum, "multiply": np.prod, "maximum": np.max, "minimum": np.min}[op.name](values, axis=-1)
    write(core, what, dst, -reduced if negate else reduced)
    busy(core, Engine.vector, free_size(data))


def activation(
    dst,
    op,
    data,
    bias=None,
    scale=1.0,
    reduce_op=None,
    reduce_res=None,
    reduce_cmd=reduce_cmd.idle,
    name=None,
):
    """dst = op(data * scale + bias) on the Scalar engine, optionally summed along the free dimension."""
    core, what = current(), "activation"
    _operator(what, op, ("activation",))
    operand(core, f"{what} data", data)
    operand(core, f"{what} dst", dst)
    same_layout(what, dst, data)
    factor = scalar_operand(core, f"{what} scale", scale, data.shape[0])
    shift = 0.0 if bias is None else scalar_operand(core, f"{what} bias", bias, data.shape[0])
    with np.errstate(all="ignore"):
        values = read(core, what, data) * factor + shift
        if op.valid is not None:
            size = np.abs(values) if op.signed else values
            inside = (size >= op.valid[0]) & (size <= op.valid[1])
            require(bool(inside.all()), "activation-range", f"{what} of {op!r} at {values[~inside].flat[:1]}")
        values = op.apply(values).astype(np.float32)
    write(core, what, dst, values)
    busy(core, Engine.scalar, free_size(dst))
    if reduce_cmd.name != "idle" or reduce_res is not None:
        require(reduce_op is not None and reduce_op.name == "add", "argument", f"{what}: reduce_op {reduce_op!r}")
        _accumulate(core, what, Engine.scalar, data, reduce_cmd, values.sum(axis=1), np.add, 0.0, reduce_res)


def _accumulate(core: Core, what, engine, data, command, new, combine, identity, result) -> None:
    """Drive the reduction registers of `engine` for the lanes of `data`."""
    lanes = slice(data.offset // data.row, data.offset // data.row + data.shape[0])
    registers = core.registers[engine][lanes]
    require(command.name in ("reset", "reduce", "reset_reduce"), "subset", f"{what} with reduce_cmd {command}")
    if command.name != "reduce":
        registers[:] = identity
    require(not np.isnan(registers).any(), "reduce-registers", f"{what} accumulates onto registers nobody reset")
    if command.name != "reset":
        registers[:] = combine(registers, new)
    if result is not None:
        operand(core, f"{what} reduce_res", result)
        require(result.shape[0] == len(registers) and free_size(result) == 1, "shape", f"{what} reduce_res {result}")
        write(core, what, result, registers.copy())
        registers[:] = np.nan
        busy(core, engine, 0)


def range_select(
    dst,
    on_true_tile,
    comp_op0,
    comp_op1,
    bound0,
    bound1,
    reduce_cmd=reduce_cmd.reset_reduce,
    reduce_res=None,
    reduce_op=MAXIMUM,
    range_start=0,
    on_false_value=dtypes.FP32_MIN,
    name=None,
):
    """Keep the elements whose index + range_start compares true with both bounds of their partition."""
    core, what = current(), "range_select"
    for op in (comp_op0, comp_op1):
        require(_operator(what, op, ("arithmetic",)).name in COMPARES, "argument", f"{what} compares with {op!r}")
    require(reduce_op is MAXIMUM, "argument", f"{what} reduces with {reduce_op!r}")
    require(on_false_value == dtypes.FP32_MIN, "fill-value", f"{what} fills with {on_false_value}")
    operand(core, f"{what} on_true_tile", on_true_tile, kinds=dtypes.FLOATS)
    operand(core, f"{what} dst", dst)
    same_layout(what, dst, on_true_tile)
    size = free_size(dst)
    require(range_start >= 0 and range_start + size < 2**24, "exact-index", f"{what} from {range_start}")
    index = (range_start + np.arange(size)).astype(np.float32)[None]
    columns = [scalar_operand(core, f"{what} bound", b, dst.shape[0]) for b in (bound0, bound1)]
    require(all(np.ndim(c) for c in columns), "argument", f"{what}: bounds are columns, not numbers")
    keep = (comp_op0.apply(index, columns[0]) != 0) & (comp_op1.apply(index, columns[1]) != 0)
    values = np.where(keep, read(core, what, on_true_tile), np.float32(dtypes.FP32_MIN))
    write(core, what, dst, values)
    busy(core, Engine.vector, size)
    floor = np.float32(-np.inf)
    _accumulate(core, what, Engine.vector, dst, reduce_cmd, values.max(axis=1), np.maximum, floor, reduce_res)


def select_reduce(
    dst,
    predicate,
    on_true,
    on_false,
    reduce_res=None,
    reduce_cmd=reduce_cmd.idle,
    reduce_op=MAXIMUM,
    reverse_pred=False,
    name=None,
):
    """dst = on_true where predicate else on_false, a number or a column."""
    core, what = current(), "select_reduce"
    selects_only = reduce_res is None and reduce_cmd.name == "idle" and reduce_op is MAXIMUM and not reverse_pred
    require(selects_only, "subset", f"{what} with a reduction or a reversed predicate")
    operand(core, f"{what} predicate", predicate, kinds=("int8", "uint8", "int16", "uint16"))
    operand(core, f"{what} on_true", on_true, kinds=dtypes.FLOATS)
    operand(core, f"{what} dst", dst)
    same = dst.shape == predicate.shape == on_true.shape
    require(same, "shape", f"{what} of {predicate} and {on_true} into {dst}")
    _not_both_psum(what, predicate, on_true)
    other = scalar_operand(core, f"{what} on_false", on_false, dst.shape[0])
    write(core, what, dst, np.where(read_raw(core, what, predicate) != 0, read(core, what, on_true), other))
    # The registers may change even so.
    core.registers[Engine.vector][:] = np.nan
    busy(core, Engine.vector, 2 * free_size(dst))


def reciprocal(dst, data, name=None):
    """dst = 1 / data on the Vector engine."""
    core, what = current(), "reciprocal"
    operand(core, f"{what} data", data)
    operand(core, f"{what} dst", dst)
    same_layout(what, dst, data)
    with np.errstate(all="ignore"):
        write(core, what, dst, 1 / read(core, what, data))
    busy(core, Engine.vector, 8 * free_size(dst))


def _affine(what: str, dst: NkiTensor, pattern, offset: int, channel_multiplier: int) -> np.ndarray:
    require(1 <= len(pattern) <= 4, "argument", f"{what} with the pattern {pattern}")
    values = np.array([offset], np.int64)
    for step, n in pattern:
        values = (values[:, None] + step * np.arange(n)).reshape(-1)
    require(values.size == free_size(dst), "element-count", f"{what} of {values.size} values into {dst}")
    return values[None] + channel_multiplier * np.arange(dst.shape[0])[:, None]


def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    """dst[p, i] = offset + p * channel_multiplier + the i-th value of a nested [step, count] pattern."""
    core, what = current(), "iota"
    operand(core, f"{what} dst", dst, SBUF)
    values = _affine(what, dst, pattern, offset, channel_multiplier)
    if dst.dtype == "float32":
        require(int(np.abs(values).max()) <= 2**24, "exact-index", f"{what} up to {np.abs(values).max()} in float32")
    if dst.dtype in ("int32", "uint32"):
        write_raw(core, what, dst, values.astype(dtypes.storage_dtype(dst.dtype)))
    else:
        write(core, what, dst, values.astype(np.float32))
    busy(core, Engine.gpsimd, free_size(dst))


def affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=EQUAL, offset=0, name=None):
    """dst = on_true_tile where the affine value of `iota` compares true with 0, else on_false_value."""
    core, what = current(), "affine_select"
    require(_operator(what, cmp_op, ("arithmetic",)).name in COMPARES, "argument", f"{what} compares with {cmp_op!r}")
    operand(core, f"{what} on_true_tile", on_true_tile, SBUF)
    operand(core, f"{what} dst", dst, SBUF)
    same_layout(what, dst, on_true_tile)
    require(isinstance(on_false_value, float), "float32-operand", f"{what} with on_false_value {on_false_value!r}")
    keep = cmp_op.apply(_affine(what, dst, pattern, offset, channel_multiplier), 0) != 0
    write(core, what, dst, np.where(keep, read(core, what, on_true_tile), np.float32(on_false_value)))
    busy(core, Engine.gpsimd, free_size(dst))


def _eights(what: str, data: NkiTensor, *eights: NkiTensor) -> None:
    require(8 <= free_size(data) <= 16384, "shape", f"{what} of {data}: 8 to 16384 elements a partition")
    fits = all(t.shape[0] == data.shape[0] and free_size(t) == 8 for t in eights)
    require(fits, "shape", f"{what} of {data} with {', '.join(map(str, eights))}")


def max8(dst, src, name=None):
    """dst [P, 8] = the greatest values of each partition, in descending order."""
    core, what = current(), "max8"
    operand(core, f"{what} src", src)
    operand(core, f"{what} dst", dst)
    _eights(what, src, dst)
    write(core, what, dst, -np.sort(-read(core, what, src), axis=1)[:, :8])
    busy(core, Engine.vector, free_size(src))


def nc_find_index8(dst, data, vals, name=None):
    """dst [P, 8] = where each of vals [P, 8] stands in data; equal values in turn, all ones for one that is absent."""
    core, what = current(), "nc_find_index8"
    operand(core, f"{what} data", data)
    operand(core, f"{what} vals", vals)
    operand(core, f"{what} dst", dst, kinds=("uint16", "uint32"))
    _eights(what, data, dst, vals)
    values, wanted = read(core, what, data), read(core, what, vals)
    kind = dtypes.storage_dtype(dst.dtype)
    indices = np.full(wanted.shape, np.iinfo(kind).max, kind)
    for p, row in enumerate(wanted):
        for i, value in enumerate(row):
            places = np.flatnonzero(values[p] == value)
            earlier = int((row[:i] == value).sum())
            if earlier < len(places):
                indices[p, i] = places[earlier]
    write_raw(core, what, dst, indices)
    busy(core, Engine.vector, free_size(data))
