"""Building kernel programs by hand and holding L0 (generated code) against L1 (whole arrays)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.codegen import generate
from shardwright.compiler.dtypes import DType
from shardwright.compiler.isa.kernel import Affine, KernelProgram, Node, Tensor, View
from shardwright.compiler.isa.limits import check_kernel, limits_for, walk
from shardwright.compiler.isa.program import Kernel
from shardwright.compiler.machine.target import Limits
from tests.support import l0, l1
from tests.support.kernel_checks import overlaps

F32, BF16, I32, U32, PRED = DType.F32, DType.BF16, DType.I32, DType.U32, DType.PRED
TARGET = "trn1n.32xlarge"


@dataclass
class Maker:
    """Collects tensors and nodes; iter dims are named by position."""

    iter_dims: tuple[int, ...]
    name: str = "case"
    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def tensor(
        self, iter_dims: Sequence[int], dtype: DType = F32, kind: str = "input", alias: int = -1
    ) -> int:
        shape = tuple(self.iter_dims[a] for a in iter_dims)
        self.tensors.append(Tensor(f"t{len(self.tensors)}", shape, dtype, kind, alias))
        return len(self.tensors) - 1

    def view(self, tensor: int, iter_dims: Sequence[int], offset: int = 0) -> View:
        """Dense row-major over `iter_dims`, in the order given."""
        strides = [0] * len(self.iter_dims)
        step = 1
        for a in reversed(iter_dims):
            strides[a] = step
            step *= self.iter_dims[a]
        return View(tensor, Affine(offset), tuple(strides))

    def node(
        self,
        op: str,
        *inputs: int,
        iter_dims: Sequence[int] | None = None,
        dtype: DType | None = None,
        **attrs,
    ) -> int:
        spanned = sorted(
            {a for i in inputs for a in self.nodes[i].iter_dims} if iter_dims is None else iter_dims
        )
        kind = dtype or self.nodes[inputs[0]].dtype
        self.nodes.append(Node(op, inputs, tuple(spanned), kind, attrs))
        return len(self.nodes) - 1

    def load(self, iter_dims: Sequence[int], dtype: DType = F32) -> int:
        tensor = self.tensor(iter_dims, dtype)
        return self.node(
            "load", iter_dims=iter_dims, dtype=dtype, view=self.view(tensor, iter_dims)
        )

    def const(self, value, dtype: DType = F32) -> int:
        return self.node("constant", iter_dims=(), dtype=dtype, value=value)

    def reduce(self, value: int, over: Sequence[int], kind: str = "add") -> int:
        rest = [a for a in self.nodes[value].iter_dims if a not in over]
        return self.node("reduce", value, iter_dims=rest, kind=kind, over=tuple(over))

    def contract(self, a: int, b: int, over: Sequence[int], dtype: DType | None = None) -> int:
        spanned = {*self.nodes[a].iter_dims, *self.nodes[b].iter_dims} - set(over)
        return self.node("contract", a, b, iter_dims=spanned, dtype=dtype, over=tuple(over))

    def store(
        self, value: int, iter_dims: Sequence[int], dtype: DType | None = None, tensor: int = -1
    ) -> int:
        kind = dtype or self.nodes[value].dtype
        if tensor < 0:
            tensor = self.tensor(iter_dims, kind, "output")
        return self.node(
            "store", value, iter_dims=iter_dims, dtype=kind, view=self.view(tensor, iter_dims)
        )

    def program(self) -> KernelProgram:
        return KernelProgram("compute", self.name, self.iter_dims, tuple(self.nodes))

    def kernel(self, target: str | Limits = TARGET) -> Kernel:
        return generate(self.program(), self.tensors, target, 0).kernel


def fill(tensor: Tensor, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = max(1, math.prod(tensor.shape))
    if tensor.kind == "output" and tensor.alias < 0:
        if tensor.dtype.is_float:
            return np.full(size, np.nan, np.float32).astype(tensor.dtype.numpy)
        return np.full(size, 1, tensor.dtype.numpy)
    if tensor.dtype is PRED:
        return rng.random(size) < 0.5
    if tensor.dtype.is_integer:
        return rng.integers(0, 100, size).astype(tensor.dtype.numpy)
    return rng.standard_normal(size).astype(np.float32).astype(tensor.dtype.numpy)


def arrays(
    tensors: Sequence[Tensor], seed: int, inputs: dict[int, np.ndarray] | None = None
) -> list[np.ndarray]:
    made: list[np.ndarray] = []
    for n, tensor in enumerate(tensors):
        if tensor.alias >= 0:
            made.append(made[tensor.alias])
        else:
            made.append((inputs or {}).get(n, fill(tensor, seed + n)).copy())
    return made


def distance(a: np.ndarray, b: np.ndarray) -> float:
    if a.dtype.kind in "bui":
        return float(np.count_nonzero(a != b))
    x, y = a.astype(np.float64), b.astype(np.float64)
    both = np.isnan(x) & np.isnan(y)
    if (np.isnan(x) != np.isnan(y)).any():
        return math.inf
    equal = both | (x == y)
    difference = np.where(equal, 0, x - y)
    return float(
        np.linalg.norm(difference) / max(np.linalg.norm(np.where(both | np.isinf(y), 0, y)), 1e-12)
    )


def check(
    m: Maker,
    bound: float = 1e-6,
    inputs: dict[int, np.ndarray] | None = None,
    seed: int = 0,
    target: str | Limits = TARGET,
) -> Kernel:
    """Generate, verify, run in L0 and L1, compare every output."""
    program, kernel = m.program(), m.kernel(target)
    assert not overlaps(kernel)
    assert not check_kernel(kernel, limits_for(target))
    got, want = arrays(m.tensors, seed, inputs), arrays(m.tensors, seed, inputs)
    l1.run_kernel(program, want, {})
    l0.run_kernel(kernel, got, {})
    for n, tensor in enumerate(m.tensors):
        error = distance(got[n], want[n])
        assert error <= bound, (m.name, tensor.name, error)
    return kernel


def count(kernel: Kernel) -> int:
    return sum(1 for _ in walk(kernel.body))
