"""Which kernels a program calls, how they lower, and the cases that look for races."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest
from jax.experimental.pallas import triton
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from inferlib.ops.by_platform import traced_for


def copies_of(
    names: Iterable[str], early: Iterable[str], further: Iterable[tuple[str, str]] = ()
) -> pytest.MarkDecorator:
    """Parametrise `name` and `mode` for a search for races in a TPU kernel; pairs in `further` are release.

    The copies of every case happen only when they are waited for ("on_wait"), those of the cases in `early` also as
    soon as they are started ("eager"). Either mode detects races; a race spoils other values in each.
    """
    pairs = [*((name, "on_wait") for name in names), *((name, "eager") for name in early)]
    return pytest.mark.parametrize(("name", "mode"), with_further(pairs, further))


def with_further(cases: Iterable[tuple], further: Iterable[tuple]) -> list[Any]:
    """The cases; those in `further`, each of which is one of them, are release."""
    cases, further = list(cases), set(further)
    unknown = further - set(cases)
    assert not unknown, unknown
    return [pytest.param(*case, marks=pytest.mark.release) if case in further else case for case in cases]


def on_backends(
    names: Iterable[str],
    backends: Iterable[str],
    raced: Iterable[str] = (),
    further: Iterable[tuple[str, str]] = (),
) -> pytest.MarkDecorator:
    """Parametrise `name` and `backend`, the cases in `raced` without "tpu"; pairs in `further` are release.

    A search for races runs the same kernel on the same case, more strictly interpreted, and compares its results too.
    """
    raced = {(name, "tpu") for name in raced}
    pairs = [pair for pair in itertools.product(names, backends) if pair not in raced]
    return pytest.mark.parametrize(("name", "backend"), with_further(pairs, further))


def kernels_in(function: Callable, *args, of_gpus: bool = True) -> set[str]:
    """Names of the Pallas kernels that `function` calls, also in loops, in branches and for other platforms."""
    with traced_for(None):
        names, jaxprs = set(), [jax.make_jaxpr(function)(*args).jaxpr]
    while jaxprs:
        for equation in jaxprs.pop().eqns:
            if equation.primitive.name == "pallas_call":
                if of_gpus or not isinstance(equation.params["compiler_params"], triton.CompilerParams):
                    names.add(equation.params["name"])
            else:
                jaxprs += jaxprs_in_params(equation.params)
    return names


def lowered_for_cuda(function: Callable, *args) -> str:
    """The StableHLO of `function` for NVIDIA GPUs, of whose forms alone it is traced; Pallas raises here what it cannot
    lower.

    No GPU is needed, but jax 0.12 needs the name of one.
    """
    known = inspect.signature(AbstractDevice).parameters
    device = dict(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    device = AbstractDevice(**{name: value for name, value in device.items() if name in known})
    targets = ("__gpu$xla.gpu.triton", "LayoutConstraint")
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    with traced_for("cuda"), use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()
