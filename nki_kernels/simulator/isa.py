"""The part of nki.isa that kernels use, by name."""

from __future__ import annotations

from enum import Enum

from inferlib.nki_kernels.simulator import dma, elementwise, mx, tensor_engine
from inferlib.nki_kernels.simulator.machine import Engine, current

nc_version = Enum("nc_version", {"gen2": 2, "gen3": 3, "gen4": 4})


def get_nc_version() -> nc_version:
    """The generation that the kernel is compiled for."""
    return nc_version(current().generation.number)


INSTRUCTIONS = {
    "dma_copy": dma.dma_copy,
    "core_barrier": dma.core_barrier,
    "sendrecv": dma.sendrecv,
    "nc_matmul": tensor_engine.nc_matmul,
    "nc_matmul_mx": tensor_engine.nc_matmul_mx,
    "nc_transpose": tensor_engine.nc_transpose,
    "quantize_mx": mx.quantize_mx,
    "activation": elementwise.activation,
    "affine_select": elementwise.affine_select,
    "iota": elementwise.iota,
    "max8": elementwise.max8,
    "memset": elementwise.memset,
    "nc_find_index8": elementwise.nc_find_index8,
    "range_select": elementwise.range_select,
    "reciprocal": elementwise.reciprocal,
    "scalar_tensor_tensor": elementwise.scalar_tensor_tensor,
    "select_reduce": elementwise.select_reduce,
    "tensor_copy": elementwise.tensor_copy,
    "tensor_reduce": elementwise.tensor_reduce,
    "tensor_scalar": elementwise.tensor_scalar,
    "tensor_tensor": elementwise.tensor_tensor,
}
NAMES = {
    **INSTRUCTIONS,
    "engine": Engine,
    "reduce_cmd": elementwise.reduce_cmd,
    "oob_mode": dma.oob_mode,
    "dge_mode": dma.dge_mode,
    "dma_engine": dma.dma_engine,
    "matmul_perf_mode": tensor_engine.matmul_perf_mode,
    "nc_version": nc_version,
    "get_nc_version": get_nc_version,
}
