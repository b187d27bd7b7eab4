"""Programs for Trainium: lowered and linted on any machine, compiled where `neuronx-cc` is installed.

`neuronx-cc` takes an HLO proto and writes a NEFF, which Neuron's runtime loads. Its command line is documented at
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/neuronx-cc.html.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from inferlib.aot.neuron_lint import lint
from inferlib.inspection.hlo import Computation, Module
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet
from inferlib.targets import Target

HLO_SUFFIX = ".hlo.pb"
COMPILER = "neuronx-cc"


def compile_neuron(programs: ProgramSet, key: ProgramKey, path: Path, target: Target) -> dict[str, Any]:
    """Write a program's HLO proto to `path`, and a NEFF beside it if there is a compiler; return its facts.

    Raises ValueError if the program is too large for a core, breaks a rule of `neuron_lint`, or does not compile.
    """
    start = time.perf_counter()
    input_bytes = sum(prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(programs.inputs(key)))
    if input_bytes > (limit := target.hbm_bytes):
        raise ValueError(f"RESOURCE_EXHAUSTED: {input_bytes} bytes of weights, cache and state; a core has {limit}")
    computation = programs.lower(key, "neuron").compiler_ir("hlo")
    assert computation is not None
    module = Module(computation.get_hlo_module().to_string())
    if findings := lint(module):
        raise ValueError("\n".join([f"{target} cannot run this program:", *map(str, findings)]))
    path.write_bytes(small_ids(computation.as_serialized_hlo_module_proto()))
    lowered = time.perf_counter()
    compiler = shutil.which(COMPILER)
    if compiler:
        arguments = command(path.name, target)
        done = subprocess.run([compiler, *arguments[1:]], cwd=path.parent, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{shlex.join(arguments)} failed:\n{(done.stderr or done.stdout)[-4000:]}")
    return {
        "status": "compiled" if compiler else "lowered",
        "layouts": None,
        "device_kind": target.chip.name,
        "trace_seconds": lowered - start,
        "compile_seconds": time.perf_counter() - lowered if compiler else None,
        "instructions": sum(len(c.instructions) for c in module.computations.values()),
        "nki": nki_kernels(module),
    }


def nki_kernels(module: Module) -> dict[str, int]:
    """How often a program calls each NKI kernel, by name of the operation."""

    def count(computation: Computation) -> Counter[str]:
        names: Counter[str] = Counter()
        for i in computation.instructions.values():
            if i.op == "custom-call" and "AwsNeuron" in i.rest:
                name = re.search(r'\bop_name="[^"]*\bnki_(\w+)', i.rest)
                names.update([name[1]] if name else [])
            elif i.op == "call":
                names.update(count(module.computations[i.called("to_apply")]))
        return names

    return dict(count(module.entry))


def command(name: str, target: Target) -> list[str]:
    """The compiler's command for an HLO file. A device is a pair of cores (LNC 2); float32 stays float32."""
    stem = name.removesuffix(HLO_SUFFIX)
    options = {"framework": "XLA", "target": target.chip.name, "lnc": "2", "model-type": "transformer"}
    options |= {"auto-cast": "none", "output": f"{stem}.neff", "logfile": f"{stem}.log"}
    return [COMPILER, "compile", name, *(word for option, value in options.items() for word in (f"--{option}", value))]


def script(names: Iterable[str], target: Target) -> str:
    """A shell script that compiles the HLO files beside it."""
    head = ["#!/bin/sh", f"# Compiles each program for {target.chip.name}.", "set -eu", 'cd "$(dirname "$0")"']
    return "\n".join([*head, *(shlex.join(command(name, target)) for name in names)]) + "\n"


# ---- HLO protos


def _messages() -> type:
    """The part of HloModuleProto that numbers instructions and computations. All other fields pass through.

    Field numbers are those of xla/service/hlo.proto.
    """
    file = descriptor_pb2.FileDescriptorProto(name="inferlib/hlo_ids.proto", package="inferlib", syntax="proto3")
    integer, message = descriptor_pb2.FieldDescriptorProto.TYPE_INT64, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    fields = {
        "Instruction": {"id": 35, "operand_ids": 36, "control_predecessor_ids": 37, "called_computation_ids": 38},
        "Computation": {"instructions": 2, "id": 5, "root_id": 6},
        "Module": {"computations": 3, "id": 5, "entry_computation_id": 6},
    }
    for name, numbers in fields.items():
        described = file.message_type.add(name=name)
        for field, number in numbers.items():
            label = 3 if field.endswith("s") else 1  # repeated or optional
            kind = {"instructions": ".inferlib.Instruction", "computations": ".inferlib.Computation"}.get(field)
            described.field.add(
                name=field, number=number, label=label, type=message if kind else integer, type_name=kind
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inferlib.Module"))


_Module = _messages()


def small_ids(proto: bytes) -> bytes:
    """A copy of the module whose instructions and computations are numbered from 1.

    Recent XLA puts the computation's number into the upper half of an instruction's. The older XLA in Neuron's tools
    refuses numbers of more than 31 bits.
    """
    module = _Module.FromString(proto)
    computations = {c.id: number for number, c in enumerate(module.computations, 1)}
    every = [i for c in module.computations for i in c.instructions]
    numbers = {i.id: number for number, i in enumerate(every, 1)}
    for i in every:
        i.id = numbers[i.id]
        for ids, new in (
            (i.operand_ids, numbers),
            (i.control_predecessor_ids, numbers),
            (i.called_computation_ids, computations),
        ):
            ids[:] = [new[x] for x in ids]
    for computation in module.computations:
        computation.root_id, computation.id = numbers[computation.root_id], computations[computation.id]
    module.entry_computation_id = computations[module.entry_computation_id]
    return module.SerializeToString()
