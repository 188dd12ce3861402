"""What the house is held to, counted in its sources: who knows ops by name, who builds graphs and
rewrites them by hand, what lies at the roots, which imports hide in functions.

    python -m tests.support.house
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shardwright.compiler.ir.opdef import OPS
from tests.support.outside_driver import outside_driver
from tests.test_layers import PACKAGES, ROOT, imported_modules, source_files

KNOW_OPS = (
    "compiler/ir/",
    "compiler/frontend/rules/",
    "compiler/frontend/pytorch/operators/",  # ATen's names, some of which ours are alike
    "compiler/frontend/onnx/operators/",  # as are ONNX's
    "compiler/frontend/mxnet/operators/",  # and MXNet's
    "compiler/frontend/importer.py",
)
"""Where an op's name belongs: its definition, its text, its import."""
BUILD_GRAPHS = ("compiler/ir/", "compiler/frontend/")
NOT_ON_THE_ROAD = (
    *("shardwright.compiler.ir", "shardwright.compiler.frontend", "shardwright.compiler.rewriting"),
    "shardwright.orchestrator.models",
    "shardwright.sharding.partition.shardy_import",
    "shardwright.orchestrator.opt",
)
"""What makes graphs of something else, runs rewrites, or runs one on a text."""
Counts = dict[str, int]


def counted() -> tuple[Counts, dict[str, Counter[str]]]:
    """All counts, and who makes up those that have a file."""
    where: dict[str, Counter[str]] = {name: Counter() for name in FINDERS}
    trees = {file: ast.parse(file.read_text()) for file in source_files()}
    for file, tree in trees.items():
        path = file.relative_to(ROOT).as_posix()
        for name, (find, outside) in FINDERS.items():
            if not path.startswith(outside):
                where[name][path] += sum(1 for _ in find(tree))
    by_hand = outside_driver({_module(file): tree for file, tree in trees.items()}, NOT_ON_THE_ROAD)
    where["rewrites outside the driver"] = Counter(f"{module}:{name}" for module, name in by_hand)
    counts = {name: found.total() for name, found in where.items()}
    counts["modules that build a Graph"] = sum(1 for n in where["graphs built"].values() if n)
    for package in PACKAGES:
        files = [p for p in (ROOT / package).glob("*.py") if not p.name.startswith("__")]
        counts[f"files at the root of {package}"] = len(files)
    counts["imports in functions that close a circle"] = len(hidden_circles())
    return counts, where


def tables_of_ops(tree: ast.Module) -> Iterator[ast.AST]:
    """Collections at the top of a module that name two ops or more, and register no rules."""
    return (value for value in _collections(tree) if not _is_of_rules(value))


def rules_by_op(tree: ast.Module) -> Iterator[ast.AST]:
    """Tables at the top of a module with a function per op: what one stage does with each."""
    return filter(_is_of_rules, _collections(tree))


def _collections(tree: ast.Module) -> Iterator[ast.expr]:
    for statement in tree.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        exports = any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets)
        if not exports and len(list(_names(statement.value))) > 1:
            yield statement.value


def _is_of_rules(value: ast.expr) -> bool:
    """A dict whose values are functions: their names, written out, or made by other functions; or
    such a dict joined with another table.
    """
    if isinstance(value, ast.BinOp):
        return _is_of_rules(value.right)
    if not isinstance(value, ast.Dict):
        return False
    rules = [each for key, each in zip(value.keys, value.values, strict=True) if key]
    by_op = sum(any(_names(key)) for key in value.keys if key) > 1
    return all(_is_function(each) or (by_op and _makes_functions(each)) for each in rules)


def _is_function(value: ast.expr) -> bool:
    return isinstance(value, ast.Name | ast.Attribute | ast.Lambda)


def _makes_functions(value: ast.expr) -> bool:
    """A call, but of no class: their names begin with a capital letter."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name | ast.Attribute):
        return False
    made_by = value.func.id if isinstance(value.func, ast.Name) else value.func.attr
    return made_by.lstrip("_")[0].islower()


def tests_for_ops(tree: ast.Module) -> Iterator[ast.AST]:
    """Comparisons of something's `name` with the name of an op, or with some of them; each case of
    a `match` is one.
    """
    held = set(_holders_of_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            named = any(_is_name(side, held) for side in sides)
            if named and any(any(_names(side)) for side in sides):
                yield node
        elif isinstance(node, ast.Match) and _is_name(node.subject, held):
            yield from (case.pattern for case in node.cases if any(_names(case.pattern)))


def _holders_of_names(tree: ast.Module) -> Iterator[str]:
    """Variables that something's `name` is assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_name(node.value, set()):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.NamedExpr) and _is_name(node.value, set()):
            yield node.target.id


def _is_name(value: ast.expr, held: set[str]) -> bool:
    """`op.name`, a variable in `held`, or either of them under a condition."""
    match value:
        case ast.IfExp():
            return _is_name(value.body, held) or _is_name(value.orelse, held)
        case ast.NamedExpr():
            return _is_name(value.value, held)
        case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant("name"), *_]):
            return True
        case ast.Attribute():
            return value.attr == "name"
    return isinstance(value, ast.Name) and value.id in held


def graphs_built(tree: ast.Module) -> Iterator[ast.AST]:
    """Calls of `Graph`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Graph":
            yield node


def _names(node: ast.AST) -> Iterator[str]:
    """Names of ops among the strings of an expression."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value in OPS:
            yield inner.value


FINDERS = {
    "tables of op names": (tables_of_ops, KNOW_OPS),
    "tables of rules by op": (rules_by_op, KNOW_OPS),
    "tests for op names": (tests_for_ops, KNOW_OPS),
    "graphs built": (graphs_built, BUILD_GRAPHS),
}


def hidden_circles() -> list[tuple[str, str]]:
    """Imports inside of functions of a module that, at its top, imports who asks: (who, whom)."""
    top: dict[str, set[str]] = {}
    hidden: dict[str, set[str]] = {}
    for file in source_files():
        name = _module(file)
        body = [s for s in ast.parse(file.read_text()).body if not _is_for_types(s)]
        outer = ast.Module([s for s in body if not _is_definition(s)], [])
        every = {module for module, _ in imported_modules(ast.Module(body, []))}
        top[name] = {module for module, _ in imported_modules(outer)}
        hidden[name] = every - top[name]
    known = set(top)

    def modules(names: set[str]) -> set[str]:
        return {n if n in known else n.rpartition(".")[0] for n in names} & known

    reach = {name: modules(found) for name, found in top.items()}
    return [
        (name, target)
        for name, found in hidden.items()
        for target in sorted(modules(found))
        if name in _reached(target, reach)
    ]


def _reached(start: str, reach: dict[str, set[str]]) -> set[str]:
    found, todo = set[str](), [start]
    while todo:
        fresh = reach[todo.pop()] - found
        found |= fresh
        todo += fresh
    return found


def _is_definition(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _is_for_types(statement: ast.stmt) -> bool:
    """A block that only type checkers read."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("shardwright", *parts)).removesuffix(".__init__")


def size_of(package: str) -> tuple[int, int]:
    """Lines and tokens of a package, comments and blank lines among the lines alone."""
    lines = tokens = 0
    for file in (ROOT / package).rglob("*.py"):
        text = file.read_text()
        lines += text.count("\n")
        found = tokenize.generate_tokens(io.StringIO(text).readline)
        tokens += sum(1 for token in found if token.type not in _LAYOUT)
    return lines, tokens


_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def main() -> None:
    """Print all counts, and the files that make up most of each."""
    counts, where = counted()
    for name, count in counts.items():
        print(f"{name:42} {count:6}")
        for path, part in where.get(name, Counter()).most_common(5):
            print(f"    {path:50} {part:4}")
    for package in PACKAGES:
        lines, tokens = size_of(package)
        print(f"{package:42} {lines:6} lines {tokens:7} tokens")


if __name__ == "__main__":
    main()
