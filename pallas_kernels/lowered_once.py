"""Lower a kernel once for all programs that have it.

To trace and lower a kernel takes Python 0.1 to 0.3 seconds, of Mosaic for GPUs more than a second, in which no other
program is traced. Many programs of a set have the same kernels: with and without decode rows, or of one step and of
several. What `jax.export` makes of a kernel is called instead. XLA compiles equal kernels once, too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh

from inferlib.pallas_kernels import lowered_files

# The names of Mosaic's and Triton's kernels in programs. JAX asks to be told of calls that other versions may not know.
_NAMES = "mosaic_gpu", "mosaic_gpu_v2", "__gpu$xla.gpu.triton", "triton_kernel_call_ffi"
_CALLS = [export.DisabledSafetyCheck.custom_call(name) for name in _NAMES]
# The thread of each program is within its trace, and may be within a mesh: this one is in neither. As it is alone, it
# lowers nothing twice.
_thread = ThreadPoolExecutor(1, "inferlib-kernels")


def call_lowered(function: Callable, static: tuple, *arrays: Any, interpret: bool = False) -> Any:
    """`function(*static, *arrays)` of one GPU, lowered for CUDA when it is called with arrays of these shapes first.

    static: what hashes. arrays: also trees of arrays. interpret: the function takes this as well, and is part of the
    program. It is part of it as well where neither the program's mesh nor JAX has an NVIDIA GPU: the program may be for
    a CPU. Raises what tracing and lowering raise.
    """
    if interpret:
        return function(*static, *arrays, interpret=True)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if not (device or jax.devices()[0]).device_kind.startswith("NVIDIA"):
        return function(*static, *arrays)
    leaves, tree = jax.tree.flatten(arrays)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return _thread.submit(_exported, function, static, tree, shapes, device).result().call(*leaves)


@cache
def _exported(function: Callable, static: tuple, tree: Any, shapes: tuple, device: Any) -> export.Exported:
    """device: the one that the program's mesh names, or None."""
    path = lowered_files.path_of(function, static, tree, shapes, device)
    if path is not None and (lowered := lowered_files.read(path)) is not None:
        return lowered
    jitted = jax.jit(lambda *leaves: function(*static, *tree.unflatten(leaves)))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = export.export(jitted, platforms=("cuda",), disabled_checks=_CALLS)(*shapes)
    if path is not None:
        lowered_files.write(path, lowered)
    return lowered
