"""The shape of the code: import levels, circles, the size of functions, and names that are retired."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
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
# The import order, lowest first, as ARCHITECTURE.md names it. The longest prefix of a module's name decides.
LEVELS = (
    ("configs", "sharding"),
    ("attention_values", "nki_kernels", "pallas_kernels"),
    ("ops",),
    ("models",),
    (
        *(
            "buckets",
            "chat",
            "config",
            "distributed",
            "links",
            "locks",
            "messages",
            "option_checks",
            "outputs",
            "platforms",
            "progress",
            "sampling",
            "speculation",
            "tables",
            "targets",
            "unrolling",
        ),
        *("programs.compilation_cache", "programs.counter", "programs.start_functions"),
    ),
    ("cache", "checkpoint", "hub", "placement", "texts", "tokenizer"),
    ("conversion", "draft_files", "exporting", "model_files", "programs"),
    ("engine", "planning"),
    ("inspection",),
    ("aot",),
    ("tuning",),
    ("async_llm", "calibration", "deploy", "distillation", "doctor", "evaluation", "finetuning", "llm"),
    ("bench", "serving"),
    ("cli", "cluster"),
    ("__main__",),
)
LEVEL_OF = {f"inferlib.{name}": level for level, names in enumerate(LEVELS) for name in names}
VALUES = "inferlib.attention_values"
KERNELS, OPS = LEVEL_OF["inferlib.pallas_kernels"], LEVEL_OF["inferlib.ops"]
KERNEL_LIBRARIES = {"einops", "jax", "jaxlib", "ml_dtypes", "nki", "numpy"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
WANTED = (ast.Import, ast.ImportFrom, ast.Name, ast.arg, ast.Module, ast.ClassDef, *Function.__args__)
MOST_LINES, MOST_PARAMETERS = 60, 8
RETIRED = frozenset({"boxes", "few", "found", "given", "held", "kept", "own", "placed", "plain"})


def find_modules() -> dict[str, Path]:
    modules = {}
    for prefix, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            modules[".".join([prefix, *parts])] = path
    return modules


MODULES = find_modules()


def level_of(module: str) -> int:
    """The level of a module. `inferlib` itself gives users LLM, and so is above everything but the command line."""
    if module == "inferlib":
        return LEVEL_OF["inferlib.llm"]
    prefixes = [name for name in LEVEL_OF if module == name or module.startswith(name + ".")]
    assert prefixes, f"{module} stands on no level: name it in LEVELS and in ARCHITECTURE.md"
    return LEVEL_OF[max(prefixes, key=len)]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a file that any test looks at, in the order of `ast.walk`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, WANTED))


@cache
def imports(module: str) -> frozenset[str]:
    """Modules that a module imports anywhere: in functions and for type checkers too."""
    names = set()
    for node in nodes(MODULES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the level"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in members}
    return frozenset(names)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_level_and_below(module):
    level = level_of(module)
    for name in imports(module):
        if name.split(".")[0] == "inferlib":
            assert name in MODULES, f"{module} imports {name}, which does not exist"
            assert level_of(name) <= level, f"{module} (level {level}) imports {name} (level {level_of(name)})"
        elif level in (KERNELS, OPS):
            library = name.split(".")[0]
            assert library in KERNEL_LIBRARIES | set(sys.stdlib_module_names), f"{module} imports {library}"


def test_models_say_nothing_about_platforms():
    """Ops choose kernels. A comment that names a platform says that a model knows one."""
    word = re.compile(r"\b(xla:)?(cuda|gpus?|neuron|nki|nvidia|pallas|tpus?|trainium)\b|pallas_|_[gt]pu", re.IGNORECASE)
    for module, path in MODULES.items():
        if module.startswith("inferlib.models"):
            assert word.findall(path.read_text(encoding="utf-8")) == [], f"{module} names a platform"
            assert not any(level_of(name) == KERNELS for name in imports(module) & (MODULES.keys() - {VALUES})), module


def test_lowest_levels_stand_alone():
    for module in MODULES:
        ours = {name for name in imports(module) if name.split(".")[0] == "inferlib"}
        folder = ".".join(module.split(".")[:2])
        if level_of(module) <= KERNELS:
            allowed = (folder,) if level_of(module) == 0 else (folder, "inferlib.attention_values", "inferlib.sharding")
            assert all(name.startswith(allowed) for name in ours), f"{module} imports {ours}"


def test_nothing_imports_in_a_circle():
    circles = find_circles({module: imports(module) & MODULES.keys() for module in MODULES})
    assert sorted(map(sorted, circles)) == []


def find_circles(graph: Mapping[str, frozenset[str]]) -> Iterator[frozenset[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components)."""
    index, lowest, stack = {}, {}, []

    def visit(module: str) -> Iterator[frozenset[str]]:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in graph[module] - {module}:
            if other not in index:
                yield from visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], index[other])
        if lowest[module] == index[module]:
            group = frozenset(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(group) > 1:
                yield group

    for module in graph:
        if module not in index:
            yield from visit(module)


@pytest.mark.parametrize("name", sorted(set(FOLDERS) - {"inferlib"}))
def test_a_relative_link_makes_a_top_level_folder_a_package(name):
    link = ROOT / name.replace(".", "/")
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == FOLDERS[name]


def test_importing_the_package_imports_no_jax():
    code = "import sys, inferlib; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- functions and names

SOURCES = [*MODULES.values(), *sorted((ROOT / "benchmarks").rglob("*.py"))]


def functions(path: Path) -> Iterator[Function]:
    """The functions of a file, but for the bodies of kernels."""
    kernels = {"pallas_kernels", "nki_kernels"} & set(path.relative_to(ROOT).parts)
    for node in nodes(path):
        if isinstance(node, Function) and not (kernels and node.name.endswith("kernel")):
            yield node


def parameters(function: Function) -> int:
    """The number of parameters, not counting self."""
    args = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(args) - bool(args and args[0].arg in ("self", "cls"))


def none_of(sites: Iterator[tuple[Path, str]]) -> None:
    texts = [f"{path.relative_to(ROOT)}: {what}" for path, what in sites]
    assert not texts, "\n".join(texts)


def test_functions_stay_short():
    lines = ((path, f, f.end_lineno - f.lineno + 1) for path in SOURCES for f in functions(path))
    none_of((path, f"{f.name} has {count} lines") for path, f, count in lines if count > MOST_LINES)


def test_functions_take_few_parameters():
    """The simulator of NKI has the vendor's signatures."""
    sources = (path for path in SOURCES if path.parent.name != "simulator")
    counts = ((path, f, parameters(f)) for path in sources for f in functions(path))
    none_of((path, f"{f.name} has {count} parameters") for path, f, count in counts if count > MOST_PARAMETERS)


def retired(path: Path) -> Iterator[str]:
    """Definitions with a name that says nothing: variables, arguments, functions, classes."""
    for node in nodes(path):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (*Function.__args__, ast.ClassDef)):
            name = node.name
        words = {name.strip("_")} if name.startswith("test_") else set(name.lower().split("_"))
        if words & RETIRED:
            yield f"{name} in line {node.lineno}"


def test_retired_names_are_not_defined():
    """Nor as a word of a name; a test's name is a sentence."""
    others = sorted(path for folder in ("tests", ".ci") for path in (ROOT / folder).rglob("*.py"))
    none_of((path, what) for path in [*SOURCES, *others] for what in retired(path))


# Words by which a docstring would begin in the middle of a sentence, such as "Of the row, behind them."
FRAGMENTS = ("Of ", "That ", "The same", "Those ")


def fragments(path: Path) -> Iterator[str]:
    """The docstrings of a file that begin in the middle of a sentence."""
    for node in nodes(path):
        if isinstance(node, (*Function.__args__, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node) or ""
            if text.startswith(FRAGMENTS):
                yield f"{text.splitlines()[0]!r} of {getattr(node, 'name', 'the module')}"


def test_docstrings_begin_with_a_subject():
    none_of((path, what) for path in SOURCES for what in fragments(path))
