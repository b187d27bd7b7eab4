"""The Python that kernels may use: what every NKI compiler since 0.5 takes, found without running anything."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from inferlib.nki_kernels.simulator.rules import RuleError

BUILTINS = {"range", "len", "min", "max", "abs", "int", "float", "isinstance", "print", "True", "False", "None"}
STATEMENTS = (
    ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For, ast.While, ast.If,
    ast.Assert, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.Module,
)  # fmt: skip
EXPRESSIONS = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.keyword, ast.Constant, ast.Attribute,
    ast.Subscript, ast.Name, ast.List, ast.Tuple, ast.Slice, ast.JoinedStr, ast.FormattedValue,
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
DEPRECATED = {"affine_range", "sequential_range", "static_range", "dynamic_range", "load", "store", "arange", "mgrid"}


def check(kernel: Callable) -> None:
    """Refuse a kernel, or a function it calls, that uses Python outside the subset."""
    seen: set[Callable] = set()
    pending = [kernel]
    while pending:
        function = pending.pop()
        if function not in seen:
            seen.add(function)
            pending += _check_one(function, decorated=function is kernel)


def _check_one(function: FunctionType, decorated: bool) -> list[FunctionType]:
    """Check one function; returns the functions of ours that it names."""
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    where = f"{function.__name__}, {inspect.getfile(function).rpartition('/')[2]}"
    _Checker(function, where).run(tree, decorated)
    names = {node.id for part in tree.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    known = (function.__globals__.get(name) for name in sorted(names))
    return [value for value in known if isinstance(value, FunctionType)]


class _Checker:
    def __init__(self, function: FunctionType, where: str):
        self.globals, self.where = function.__globals__, where
        self.first = function.__code__.co_firstlineno

    def refuse(self, node: ast.AST, why: str) -> None:
        line = self.first + getattr(node, "lineno", 1) - 1
        raise RuleError("language", f"{self.where}, line {line}: {why}")

    def run(self, tree: ast.FunctionDef, decorated: bool) -> None:
        if not decorated and tree.decorator_list:
            self.refuse(tree, "functions that a kernel calls are not decorated")
        arguments = tree.args
        if arguments.kwonlyargs or arguments.vararg or arguments.kwarg or arguments.posonlyargs:
            self.refuse(tree, "only plain parameters: no *, no **")
        local = {a.arg for a in arguments.args} | {
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        for statement in [*tree.body, *arguments.defaults]:
            for node in ast.walk(statement):
                self.node(node, local)

    def node(self, node: ast.AST, local: set[str]) -> None:
        if isinstance(node, ast.FunctionDef):
            self.refuse(node, "a function inside a function")
        if not isinstance(node, STATEMENTS + EXPRESSIONS):
            self.refuse(node, f"{type(node).__name__} is not in the subset")
        if isinstance(node, ast.Is | ast.IsNot | ast.In | ast.NotIn):
            self.refuse(node, "no `is` and no `in`")
        if isinstance(node, ast.Call) and any(isinstance(a, ast.Starred) or k is None for a, k in _passed(node)):
            self.refuse(node, "no * or ** in a call")
        if isinstance(node, ast.For | ast.While) and node.orelse:
            self.refuse(node, "a loop with else")
        if isinstance(node, ast.For) and not isinstance(node.target, ast.Name):
            self.refuse(node, "a loop over anything but one name")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in local | BUILTINS:
            self.outer(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self.globals.get(node.value.id)
            if (
                isinstance(module, ModuleType)
                and module.__name__.partition(".")[0] == "nki"
                and node.attr in DEPRECATED
            ):
                self.refuse(node, f"{node.attr} is deprecated or gone")

    def outer(self, node: ast.Name) -> None:
        """A name of the module: nki itself, a function of ours, or a constant."""
        if node.id not in self.globals:
            self.refuse(node, f"the name {node.id} is unknown")
        value = self.globals[node.id]
        legal = isinstance(value, FunctionType | int | float | str | tuple)
        if isinstance(value, ModuleType):
            legal = value.__name__.partition(".")[0] == "nki"
        if not legal:
            self.refuse(node, f"{node.id} is neither of nki, a function, nor a constant")


def _passed(call: ast.Call) -> list[tuple[ast.AST, str | None]]:
    return [*((a, "") for a in call.args), *((k.value, k.arg) for k in call.keywords)]
