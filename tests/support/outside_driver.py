"""Which graph rewrites the driver does not run, read from the sources.

What is declared as a `Rewrite` runs in the driver, and with it everything that its function refers
to. Anything else that rebuilds graphs, that is a function from a graph to a graph, or that calls
the function of a declared rewrite by hand is outside.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

Name = tuple[str, str]
"""A module and what it defines at its top."""
REBUILDS = "shardwright.compiler.ir.rewrite"
_DECLARES = "Rewrite"
_GRAPH = "Graph"


@dataclass(slots=True)
class Module:
    """A module: what it defines, and what stands for something of another module."""

    name: str
    tree: ast.Module
    imported: dict[str, Name] = field(default_factory=dict)
    defined: dict[str, ast.stmt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                own = {a.asname or a.name: (node.module or "", a.name) for a in node.names}
                self.imported |= own
        for statement in self.tree.body:
            for name in _defined_by(statement):
                self.defined[name] = statement

    def referred(self, node: ast.AST) -> Iterator[Name]:
        """What a piece of the module refers to; `module.name` where a module was imported."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                if inner.value.id in self.imported:
                    yield ".".join(self.imported[inner.value.id]), inner.attr
            elif isinstance(inner, ast.Name):
                if inner.id in self.imported:
                    yield self.imported[inner.id]
                elif inner.id in self.defined:
                    yield self.name, inner.id


def _defined_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def outside_driver(trees: Mapping[str, ast.Module], exempt: Iterable[str] = ()) -> list[Name]:
    """Definitions in `trees` (by module) that rewrite graphs and are run by no declared rewrite;
    modules whose names begin with one of `exempt` may.
    """
    modules = {name: Module(name, tree) for name, tree in trees.items()}
    declared = {
        name: set(module.referred(statement.value.args[1]))
        for module in modules.values()
        for name, statement in _all(module)
        if isinstance(statement, ast.Assign) and _is_declaration(statement.value)
    }
    functions = set().union(*declared.values())
    run = _reached(functions, modules)
    found = []
    for module in modules.values():
        if module.name.startswith(tuple(exempt)):
            continue
        for name, statement in _all(module):
            if name in run or name in declared:
                continue
            referred = {*module.referred(statement)}
            by_hand = referred & functions or any(origin == REBUILDS for origin, _ in referred)
            if by_hand or (_maps_graphs(statement) and not referred & declared.keys()):
                found.append(name)
    return found


def _all(module: Module) -> Iterator[tuple[Name, ast.stmt]]:
    return (((module.name, name), statement) for name, statement in module.defined.items())


def _is_declaration(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") == _DECLARES


def _reached(start: Iterable[Name], modules: Mapping[str, Module]) -> set[Name]:
    """Everything that definitions refer to, and what that refers to in turn."""
    found, todo = set[Name](), list(start)
    while todo:
        name = todo.pop()
        module = modules.get(name[0])
        if name in found or module is None or name[1] not in module.defined:
            continue
        found.add(name)
        todo += module.referred(module.defined[name[1]])
    return found


def _maps_graphs(statement: ast.stmt) -> bool:
    """A function, or a class with a method, that makes a graph of a graph."""
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            given = [a.annotation for a in node.args.args if a.arg != "self"]
            first = ast.unparse(given[0]) if given and given[0] else ""
            made = ast.unparse(node.returns).removeprefix("tuple[")
            if first == _GRAPH and made.split(" | ")[0].split(",")[0] == _GRAPH:
                return True
    return False
