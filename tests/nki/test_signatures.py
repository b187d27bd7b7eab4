"""The instructions that kernels use, with the parameters that the vendor documents (NKI 0.5 to 0.7), in order."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import nki.isa as nisa
import nki.language as nl
import pytest

import inferlib.nki_kernels

DOCUMENTED = {
    "activation": "dst op data bias=None scale=1.0 reduce_op=None reduce_res=None reduce_cmd=idle name=None",
    "affine_select": "dst pattern channel_multiplier on_true_tile on_false_value cmp_op=equal offset=0 name=None",
    "core_barrier": "data cores engine=gpsimd name=None",
    "dma_copy": "dst src priority=None oob_mode=error dge_mode=unknown engine=unknown name=None",
    "get_nc_version": "",
    "iota": "dst pattern offset=0 channel_multiplier=0 name=None",
    "max8": "dst src name=None",
    "memset": "dst value engine=unknown name=None",
    "nc_find_index8": "dst data vals name=None",
    "nc_matmul": "dst stationary moving is_stationary_onezero=False is_moving_onezero=False is_transpose=False"
    " accumulate=None tile_position=() tile_size=() perf_mode=none name=None",
    "nc_matmul_mx": "dst stationary moving stationary_scale moving_scale tile_position=None tile_size=None"
    " accumulate=None name=None",
    "nc_transpose": "dst data engine=unknown name=None",
    "quantize_mx": "dst src dst_scale name=None",
    "range_select": "dst on_true_tile comp_op0 comp_op1 bound0 bound1 reduce_cmd=reset_reduce reduce_res=None"
    " reduce_op=maximum range_start=0 on_false_value=-3.4028234663852886e+38 name=None",
    "reciprocal": "dst data name=None",
    "scalar_tensor_tensor": "dst data op0 operand0 op1 operand1 reverse0=False reverse1=False name=None",
    "select_reduce": "dst predicate on_true on_false reduce_res=None reduce_cmd=idle reduce_op=maximum"
    " reverse_pred=False name=None",
    "sendrecv": "src dst send_to_rank recv_from_rank pipe_id dma_engine=dma name=None",
    "tensor_copy": "dst src engine=unknown name=None",
    "tensor_reduce": "dst op data axis negate=False keepdims=False name=None",
    "tensor_scalar": "dst data op0 operand0 reverse0=False op1=None operand1=None reverse1=False engine=unknown"
    " name=None",
    "tensor_tensor": "dst data1 data2 op engine=unknown name=None",
}
LANGUAGE = {
    "ndarray": "shape dtype buffer=sbuf name= address=None",
    "num_programs": "axes=0",
    "program_id": "axis=0",
}
KERNELS = sorted(p for p in Path(inferlib.nki_kernels.__file__).parent.glob("*.py"))


def described(function) -> str:
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if default is inspect.Parameter.empty:
            parts.append(parameter.name)
        else:
            parts.append(f"{parameter.name}={getattr(default, 'name', default)}")
    return " ".join(parts)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_instruction_has_the_documented_parameters(name):
    assert described(getattr(nisa, name)) == DOCUMENTED[name]


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_function_of_the_language_has_the_documented_parameters(name):
    assert described(getattr(nl, name)) == LANGUAGE[name]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_use_only_these_and_pass_instructions_by_name(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "nisa":
            assert node.func.attr in DOCUMENTED
            assert not node.args, f"{path.name}:{node.lineno}: {node.func.attr} by position"
            known = {part.partition("=")[0] for part in DOCUMENTED[node.func.attr].split()}
            assert {k.arg for k in node.keywords} <= known
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "nl":
            assert node.func.attr in LANGUAGE
