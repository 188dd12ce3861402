"""What every value of a reduction fusion is for: rows, packed operands, sums, what follows.

One iter dim, `row`, lies on the partitions. Iter dims that contractions and reductions run over or
produce are `inner`: they lie along the free dims. All others are `parallel`: loops of single
points. Sums over parallel points or rows are complete only behind those loops. A choice of `row`
that breaks a rule is refused with the rule; `rows_by_work` begins with that of least extra work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.compiler.codegen.domain import Domain, Numbers, Value
from shardwright.compiler.codegen.rows.algebra import columns_first
from shardwright.compiler.diagnostics import CompileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Values of a kernel by what they are for, each tuple in topological order."""

    row: int
    inner: frozenset[int]
    parallel: frozenset[int]
    rows: Numbers  # that span the row iter dim
    sums: Numbers  # contractions and reductions over it or over parallel iter dims
    late: Numbers  # that follow from sums
    shared: Numbers  # that span neither and are read elementwise
    packed: dict[int, tuple[int, int]]  # row contraction: (operand with `row`, the other)


def inner_of(roles: Roles, value: Value) -> int | None:
    """The one inner iter dim of a row value, None when it has none."""
    return next(iter(value.iter_dims & roles.inner), None)


class RefusedError(Exception):
    """What was tried does not work, and why."""


def rows_by_work(domain: Domain, roots: Iterable[int]) -> list[tuple[Domain, Numbers, Roles]]:
    """(domain whose sums add up columns first, `roots` in it, roles) for every row iter dim that
    works, the one first that leaves least work outside plain row arithmetic.

    Raises CompileError SW_CODEGEN_ROWS when no iter dim can be the row iter dim.
    """
    roots = tuple(roots)
    found: list[tuple[Domain, Numbers, Roles]] = []
    why: list[str] = []
    for iter_dim in sorted(domain.sizes, key=lambda a: (-domain.sizes[a], a)):
        inner = _inner_iter_dims(domain, domain.slice(roots), iter_dim)
        stepped, last = columns_first(domain, roots, iter_dim, inner)
        try:
            found.append((stepped, last, roles_for(stepped, last, iter_dim)))
        except RefusedError as refused:
            why.append(f"iteration dim {iter_dim}: {refused}")
    if not found:
        raise CompileError(
            "SW_CODEGEN_ROWS",
            f"kernel {domain.name} requires an iteration dim that can be tiled over all its"
            f" contractions, got none ({'; '.join(why)})",
            hint="lower the contractions to kernels of their own",
        )
    return sorted(found, key=lambda made: _extra_work(made[0], made[2]))


def _extra_work(domain: Domain, roles: Roles) -> tuple[int, int, int]:
    """Row iter dims shorter than the partitions last; then fewest sums and vectors read by rows."""
    short = int(domain.sizes[roles.row] < 64)
    return short, len(roles.sums) + len(roles.shared) + len(roles.packed), -domain.sizes[roles.row]


def roles_for(domain: Domain, roots: Iterable[int], row: int) -> Roles:
    """The roles of everything `roots` need when `row` is the row iter dim. Raises RefusedError."""
    return _Analysis(domain, tuple(domain.slice(roots)), row).roles()


class _Analysis:
    """One kernel, one row iter dim."""

    def __init__(self, domain: Domain, values: Numbers, row: int) -> None:
        self.domain, self.values, self.row = domain, values, row
        self.late: set[int] = set()
        self.packed: dict[int, tuple[int, int]] = {}
        self.sums: list[int] = []
        self.inner = _inner_iter_dims(domain, values, row)

    def roles(self) -> Roles:
        for n in self.values:
            self._visit(n, self.domain[n])
        rows = [n for n in self.values if self._is_row(n) and n not in self.late]
        require(bool(rows) and bool(self.packed), "no contraction keeps it")
        spanned = {a for n in rows for a in self.domain[n].iter_dims} - {self.row}
        parallel = spanned - self.inner
        roles = Roles(
            row=self.row,
            inner=self.inner,
            parallel=frozenset(parallel),
            rows=tuple(rows),
            sums=tuple(self.sums),
            late=tuple(n for n in self.values if n in self.late and n not in self.sums),
            shared=self._shared(rows),
            packed=self.packed,
        )
        self._check(roles)
        return roles

    def _is_row(self, number: int) -> bool:
        return self.row in self.domain[number].iter_dims

    def _visit(self, n: int, value: Value) -> None:
        late = [i for i in value.inputs if i in self.late]
        mixed = any(self._is_row(i) for i in value.inputs if i not in late)
        require(not (late and mixed), "a row depends on a sum")
        if value.op in ("contract", "reduce"):
            require(not late, f"a {value.op} follows a sum")
            self._fold(n, value)
        elif late:
            self.late.add(n)
        require(value.op not in ("load_indexed", "store_add_indexed"), "indexed accesses")

    def _fold(self, n: int, value: Value) -> None:
        """A sum over what is looped, or along a row."""
        if self.row in value.over or (self._is_row(n) and not value.over & self.inner):
            self._sum(n, value)
            return
        require(self._is_row(n), f"a {value.op} lies beside the rows")
        if value.op == "contract":
            self._row_contract(n, value)

    def _sum(self, n: int, value: Value) -> None:
        self.sums.append(n)
        self.late.add(n)
        require(value.dtype.is_float, "a sum over rows of integers")
        require(value.op == "contract" or value.attrs["kind"] == "add", "an extreme over rows")
        require(all(map(self._is_row, value.inputs)), "an operand of a sum lacks it")

    def _row_contract(self, n: int, value: Value) -> None:
        a, b = value.inputs
        require(self._is_row(a) != self._is_row(b), "both operands of a contraction span it")
        tall, other = (a, b) if self._is_row(a) else (b, a)
        made = {self.domain[m].op for m in self.domain.slice([other])}
        require(not made & {"contract", "reduce"}, "a packed tile is not arithmetic on loads")
        spans = [self.domain[m].iter_dims for m in (tall, other)]
        require(
            len(value.over) == 1 and value.over <= spans[0] & spans[1],
            "several summed iteration dims",
        )
        types = {self.domain[m].dtype for m in (tall, other)}
        require(all(t.is_float for t in types), "a contraction of integers")
        self.packed[n] = (tall, other)

    def _shared(self, rows: list[int]) -> Numbers:
        """Values without the row iter dim that rows read as they are, and what they need."""
        packed = {p for _, p in self.packed.values()}
        read = {
            i
            for n in rows
            for i in self.domain[n].inputs
            if not self._is_row(i) and not (n in self.packed and i in packed)
        }
        return tuple(self.domain.slice(read))

    def _check(self, roles: Roles) -> None:
        for n in (*roles.rows, *roles.shared):
            value = self.domain[n]
            require(len(value.iter_dims & roles.inner) <= 1, "a row with two inner iteration dims")
            require(not value.over & roles.parallel, "a fold over a parallel iteration dim")
        for n in roles.sums:
            value = self.domain[n]
            require(value.over - {self.row} <= roles.parallel, "a sum over rows and columns")
        for n in roles.late:
            born = self.domain[n].iter_dims - roles.inner - roles.parallel - {self.row}
            require(not born, "a born iteration dim")


def _inner_iter_dims(domain: Domain, values: Iterable[int], row: int) -> frozenset[int]:
    """Iter dims along the free dims: what contractions run over and packed tiles bring, and what
    reductions of rows run over unless it meets such a one in a value: then it has to be looped.
    """
    inner: set[int] = set()
    for value in (domain[n] for n in values):
        if value.op != "contract":
            continue
        a, b = (domain[i].iter_dims for i in value.inputs)
        if row in value.over:
            inner |= (a ^ b) - value.over
        elif row in value.iter_dims:
            inner |= value.over | (b - a if row in a else a - b)
    rows = [domain[n] for n in values if row in domain[n].iter_dims]
    beside = {a for value in rows if value.iter_dims & inner for a in value.iter_dims - inner}
    folded = {a for value in rows if value.op == "reduce" for a in value.over}
    return frozenset(inner | folded - beside)


def require(holds: bool, rule: str = "") -> None:
    """Raises RefusedError where a rule does not hold."""
    if not holds:
        raise RefusedError(rule)
