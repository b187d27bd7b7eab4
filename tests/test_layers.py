"""The floors: a module imports only from its own floor and those below, and nothing imports in a circle."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "inferlib": ROOT / "inferlib",
    "inferlib.configs": ROOT / "configs",
    "inferlib.models": ROOT / "models",
    "inferlib.nki_kernels": ROOT / "nki_kernels",
    "inferlib.pallas_kernels": ROOT / "pallas_kernels",
    "inferlib.sharding": ROOT / "sharding",
}
# The longest prefix counts. What is left under `inferlib` is floor 4; the name `inferlib` itself gives LLM.
FLOORS = {
    "inferlib.configs": 0,
    "inferlib.sharding": 0,
    "inferlib.nki_kernels": 1,
    "inferlib.pallas_kernels": 1,
    "inferlib.ops": 2,
    "inferlib.models": 3,
    "inferlib.llm": 5,
    "inferlib.cli": 5,
}
KERNEL_LIBRARIES = {"einops", "jax", "jaxlib", "ml_dtypes", "nki", "numpy"}


def find_modules() -> dict[str, Path]:
    found = {}
    for prefix, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join([prefix, *parts])] = path
    return found


MODULES = find_modules()


def floor(module: str) -> int:
    if module == "inferlib":
        return 5
    prefixes = [p for p in FLOORS if module == p or module.startswith(p + ".")]
    return FLOORS[max(prefixes, key=len)] if prefixes else 4


def imports(node: ast.AST, *, at_start: bool = False) -> set[str]:
    """Modules imported anywhere under `node`; at_start: only those that importing the module imports."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports hide the floor"
            names = {f"{child.module}.{alias.name}" for alias in child.names}
            found |= {name if name in MODULES else child.module for name in names}
        elif not (at_start and (isinstance(child, ast.FunctionDef) or _typing_only(child))):
            found |= imports(child, at_start=at_start)
    return found


def _typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_floor_and_below(module):
    for name in imports(parse(module)):
        if name.split(".")[0] == "inferlib":
            assert name in MODULES, f"{module} imports {name}, which does not exist"
            assert floor(name) <= floor(module), f"{module} (floor {floor(module)}) imports {name} ({floor(name)})"
        elif floor(module) in (1, 2):
            library = name.split(".")[0]
            assert library in KERNEL_LIBRARIES | set(sys.stdlib_module_names), f"{module} imports {library}"


def test_lowest_floors_stand_alone():
    for module in MODULES:
        ours = {name for name in imports(parse(module)) if name.split(".")[0] == "inferlib"}
        folder = ".".join(module.split(".")[:2])
        if floor(module) <= 1:
            allowed = (folder,) if floor(module) == 0 else (folder, "inferlib.sharding")
            assert all(name.startswith(allowed) for name in ours), f"{module} imports {ours}"


def test_nothing_imports_in_a_circle():
    graph = {module: imports(parse(module), at_start=True) & MODULES.keys() - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(set(FOLDERS) - {"inferlib"}))
def test_a_relative_link_makes_a_top_level_folder_a_package(name):
    link = ROOT / name.replace(".", "/")
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == FOLDERS[name]


def test_importing_the_package_imports_no_jax():
    code = "import sys, inferlib; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_stay_short():
    for module, path in MODULES.items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 500, f"{module} has {lines} lines: split it"
