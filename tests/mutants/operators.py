"""What a damage is, as rewriting of one node of a syntax tree.

Every function below takes a node and the `Place` it stands in, and yields what it may become.
Operators know nothing of the product: no list of lines, no preferred constants. What no test could
ever notice is not generated at all: texts of errors and of logs, `__str__` and `__repr__`,
annotations, decorators, `strict=` of zip, what only type checkers read.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Display = ast.List | ast.Set | ast.Tuple
Node = ast.expr | ast.stmt
Rule = Callable[[Any, "Place"], Iterator["Change"]]

RELAXED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITE = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# Both operands of these can stand alone; of the rest only the left one can.
TERMS = (ast.Add, ast.Mult, ast.BitOr, ast.BitAnd)
RENAMED = {
    "min": ("minmax", "max"),
    "max": ("minmax", "min"),
    "minimum": ("minmax", "maximum"),
    "maximum": ("minmax", "minimum"),
    "amin": ("minmax", "amax"),
    "amax": ("minmax", "amin"),
    "ceil": ("rounding", "floor"),
    "floor": ("rounding", "ceil"),
    "any": ("minmax", "all"),
    "all": ("minmax", "any"),
    "sum": ("minmax", "max"),
}
KEYWORD_CALLS = {"dict", "replace"}
ALIAS = re.compile(r"_?[A-Z][a-z]\w*")  # of a type, which no run reads: constants are upper case
KEY_WORDS = re.compile(r"key|digest|fingerprint|identity|hash|parts|signature", re.IGNORECASE)
LOGGED = re.compile(r"(LOG|logs|logging|warnings)\.")
ERROR_CALL = re.compile(r"(Error|Warning|Exception|Diagnostic)$")


@dataclass(frozen=True)
class Place:
    """Where a node stands: the symbol that holds it, and the nodes around it, outermost first."""

    symbol: str
    parents: tuple[ast.AST, ...]

    @property
    def parent(self) -> ast.AST:
        return self.parents[-1]

    @property
    def is_of_key(self) -> bool:
        """Whether the symbol, by its name, makes a key or a digest."""
        return bool(KEY_WORDS.search(self.symbol))


@dataclass(frozen=True)
class Change:
    """`text` comes for `node`; where only a part of it goes, `part` is its first and last node."""

    operator: str
    node: Node
    text: str
    part: tuple[ast.expr, ast.expr] | None = None


def changes(node: ast.AST, place: Place) -> Iterator[Change]:
    """Every damage of one node, of its children none."""
    for rule in RULES.get(type(node), ()):
        yield from rule(node, place)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The children that take part: no annotation, decorator, docstring or text of an error."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "format_spec", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_left_out(child):
                yield child


def is_left_out(node: ast.AST) -> bool:
    """What no run reads, and what only words an error or a log."""
    match node:
        case ast.Raise() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Call(func=func):
            return bool(ERROR_CALL.search(called(func)) or LOGGED.match(ast.unparse(func)))
        case ast.Expr(value=ast.Call() as call):
            return is_left_out(call)
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.keyword(arg="strict" | "repr") | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) if ALIAS.fullmatch(name):
            return True
    return False


def called(func: ast.AST) -> str:
    """The last name of what is called."""
    match func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _number(node: ast.Constant, place: Place) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield Change("boolean", node, repr(not node.value))
    elif isinstance(node.value, int | float):
        for value in other_numbers(node.value):
            yield Change("number", node, repr(value))


def other_numbers(value: float) -> Iterator[float]:
    """10 % more and less; of small integers one more and one less."""
    if isinstance(value, int):
        step = max(1, round(abs(value) / 10))
        yield from (value + step, value - step)
    else:
        yield from (value * 1.1, value * 0.9) if value else (0.1,)


def _compare(node: ast.Compare, place: Place) -> Iterator[Change]:
    for at, op in enumerate(node.ops):
        for name, table in (("relax", RELAXED), ("flip", OPPOSITE)):
            if other := table.get(type(op)):
                ops = [*node.ops[:at], other(), *node.ops[at + 1 :]]
                yield Change(name, node, _text(ast.Compare(node.left, ops, node.comparators)))


def _binary(node: ast.BinOp, place: Place) -> Iterator[Change]:
    if any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right)):
        return
    yield Change("term", node, _text(node.left))
    if isinstance(node.op, TERMS):
        yield Change("term", node, _text(node.right))
    if other := SWAPPED.get(type(node.op)):
        yield Change("operator", node, _text(ast.BinOp(node.left, other(), node.right)))
    if isinstance(node.op, ast.FloorDiv) and not _is_ceiling(place.parent, node):
        up = ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right)
        yield Change("rounding", node, _text(ast.UnaryOp(ast.USub(), up)))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_ceiling(outer: ast.AST, inner: ast.AST) -> bool:
    """Whether `outer` is -(-a // b) about `inner`."""
    match outer, inner:
        case (
            ast.UnaryOp(op=ast.USub()),
            ast.BinOp(left=ast.UnaryOp(op=ast.USub()), op=ast.FloorDiv()),
        ):
            return True
    return False


def _unary(node: ast.UnaryOp, place: Place) -> Iterator[Change]:
    if _is_ceiling(node, node.operand):
        assert isinstance(node.operand, ast.BinOp)
        assert isinstance(node.operand.left, ast.UnaryOp)
        inner = node.operand
        down = ast.BinOp(inner.left.operand, ast.FloorDiv(), inner.right)
        yield Change("rounding", node, _text(down))
    elif isinstance(node.op, ast.Not):
        yield Change("negate", node, _text(node.operand))
    elif not isinstance(node.operand, ast.Constant):
        yield Change("term", node, _text(node.operand))


def _boolean(node: ast.BoolOp, place: Place) -> Iterator[Change]:
    for at in range(len(node.values)):
        rest = [*node.values[:at], *node.values[at + 1 :]]
        yield Change("term", node, _text(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)))
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield Change("operator", node, _text(ast.BoolOp(other, node.values)))


def _call(node: ast.Call, place: Place) -> Iterator[Change]:
    name = called(node.func)
    if name in RENAMED:
        operator, other = RENAMED[name]
        yield Change(operator, node.func, _renamed(node.func, other))
    if name == "abs" and len(node.args) == 1:
        yield Change("term", node, _text(node.args[0]))
    if name == "range":
        yield from _range(node)
    if name in KEYWORD_CALLS or (place.is_of_key and node.keywords):
        for at in range(len(node.keywords)):
            rest = [*node.keywords[:at], *node.keywords[at + 1 :]]
            yield Change("element", node, _text(ast.Call(node.func, node.args, rest)))


def _renamed(func: ast.expr, name: str) -> str:
    if isinstance(func, ast.Attribute):
        return ast.unparse(ast.Attribute(func.value, name, ast.Load()))
    return name


def _range(node: ast.Call) -> Iterator[Change]:
    stop = node.args[min(1, len(node.args) - 1)] if node.args else None
    if isinstance(stop, ast.Constant | ast.Starred) or stop is None:
        return
    yield from _off_by_one(stop)


def _off_by_one(node: ast.expr) -> Iterator[Change]:
    for op in (ast.Add(), ast.Sub()):
        yield Change("bound", node, _text(ast.BinOp(node, op, ast.Constant(1))))


def _slice(node: ast.Slice, place: Place) -> Iterator[Change]:
    for bound in (node.lower, node.upper):
        if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
            yield from _off_by_one(bound)


def _condition(node: ast.If | ast.While | ast.IfExp, place: Place) -> Iterator[Change]:
    """The other way round; a comparison is turned round by `flip`, a `not` by itself."""
    plain = isinstance(node.test, ast.Compare) and len(node.test.ops) == 1
    if not plain and not _is_not(node.test):
        yield Change("negate", node.test, _text(ast.UnaryOp(ast.Not(), node.test)))
    if isinstance(node, ast.IfExp):
        yield Change("branch", node, _text(node.body))
        yield Change("branch", node, _text(node.orelse))
    if isinstance(node, ast.If) and refuses(node):
        yield Change("check", node.test, "False")


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def refuses(node: ast.If) -> bool:
    """Whether an `if` without `else` ends in an error: raised, returned, yielded or put down."""
    last = node.body[-1]
    if node.orelse:
        return False
    match last:
        case ast.Raise():
            return True
        case ast.Return(value=ast.Call(func=func)) | ast.Expr(value=ast.Yield(ast.Call(func=func))):
            return bool(ERROR_CALL.search(called(func))) or called(func).startswith("refus")
        case ast.Expr(value=ast.Call(func=func)):
            return True
    return False


def _comprehension(node: ast.comprehension, place: Place) -> Iterator[Change]:
    for test in node.ifs:
        yield Change("check", test, "True")


def _statement(node: ast.Expr, place: Place) -> Iterator[Change]:
    """A call whose answer nobody takes does something: a check, an update of a digest, a count."""
    if isinstance(node.value, ast.Call):
        yield Change("call", node, "pass")


def _assertion(node: ast.Assert, place: Place) -> Iterator[Change]:
    if not _tells_types(node.test):
        yield Change("check", node, "pass")


def _tells_types(test: ast.expr) -> bool:
    """Whether a check is for mypy: of something else, the next line would fail."""
    if isinstance(test, ast.BoolOp):
        return all(map(_tells_types, test.values))
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


def _augmented(node: ast.AugAssign, place: Place) -> Iterator[Change]:
    if other := SWAPPED.get(type(node.op)):
        turned = ast.AugAssign(node.target, other(), node.value)
        yield Change("operator", node, ast.unparse(turned))
    yield Change("term", node, "pass")


def _display(node: Display, place: Place) -> Iterator[Change]:
    is_tuple = isinstance(node, ast.Tuple)
    if isinstance(getattr(node, "ctx", None), ast.Store) or len(node.elts) < 1 + is_tuple:
        return
    if is_tuple and not _may_be_shorter(place):
        return
    for at in range(len(node.elts)):
        rest = [*node.elts[:at], *node.elts[at + 1 :]]
        part = (node.elts[at], node.elts[at]) if len(rest) > 1 else None
        yield Change("element", node, _text(_empty_or(node, rest)), part)


def _may_be_shorter(place: Place) -> bool:
    """Whether nobody takes the tuple apart by its length, as far as its place says."""
    if isinstance(place.parent, ast.Return | ast.Assign | ast.AnnAssign):
        return place.is_of_key or not any(
            isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef) for p in place.parents
        )
    return not isinstance(place.parent, ast.Subscript | ast.Index | ast.FormattedValue)


def _empty_or(node: Display, rest: list[ast.expr]) -> ast.expr:
    if isinstance(node, ast.Set):
        return ast.Set(rest) if rest else ast.Call(ast.Name("set", ast.Load()), [], [])
    return type(node)(rest, ast.Load())


def _dict(node: ast.Dict, place: Place) -> Iterator[Change]:
    for at in range(len(node.keys)):
        keys = [*node.keys[:at], *node.keys[at + 1 :]]
        values = [*node.values[:at], *node.values[at + 1 :]]
        key, value = node.keys[at], node.values[at]
        part = (key, value) if key is not None else None
        yield Change("element", node, _text(ast.Dict(keys, values)), part)


def _joined(node: ast.JoinedStr, place: Place) -> Iterator[Change]:
    """A part of a text that is a key."""
    for at, part in enumerate(node.values):
        if place.is_of_key and isinstance(part, ast.FormattedValue) and len(node.values) > 1:
            rest = [*node.values[:at], *node.values[at + 1 :]]
            yield Change("element", node, _text(ast.JoinedStr(rest)))


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Constant | ast.JoinedStr) else f"({text})"


def substituted(outer: ast.AST, inner: ast.AST, text: str) -> ast.AST:
    """A copy of `outer` with the expression `text` where `inner` was."""

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if node is inner:
                return ast.parse(text, mode="eval").body
            return self.generic_visit(copy.copy(node))

        def generic_visit(self, node: ast.AST) -> ast.AST:
            for name, value in ast.iter_fields(node):
                if isinstance(value, list):
                    setattr(node, name, [self.visit(v) for v in value])
                elif isinstance(value, ast.AST):
                    setattr(node, name, self.visit(value))
            return node

    return Put().visit(outer)


RULES: dict[type[ast.AST], tuple[Rule, ...]] = {
    ast.Constant: (_number,),
    ast.Compare: (_compare,),
    ast.BinOp: (_binary,),
    ast.UnaryOp: (_unary,),
    ast.BoolOp: (_boolean,),
    ast.Call: (_call,),
    ast.Slice: (_slice,),
    ast.If: (_condition,),
    ast.While: (_condition,),
    ast.IfExp: (_condition,),
    ast.comprehension: (_comprehension,),
    ast.Expr: (_statement,),
    ast.Assert: (_assertion,),
    ast.AugAssign: (_augmented,),
    ast.List: (_display,),
    ast.Set: (_display,),
    ast.Tuple: (_display,),
    ast.Dict: (_dict,),
    ast.JoinedStr: (_joined,),
}
