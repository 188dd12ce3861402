"""What is served, in the process that runs it: a NEFF, a traced module of PyTorch, or a saved ONNX
model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwright.compiler.diagnostics import LoadError, UsageError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.machine.target import load_target
from shardwright.orchestrator.neff.neff_files import mesh_of, open_program
from shardwright.orchestrator.neff.neff_tools import inputs_of
from shardwright.orchestrator.saved.specs import Spec
from shardwright.orchestrator.triton.interface import Interface, TensorSpec

NEFF, TRACED, SAVED, WEIGHTS = "model.neff", "module.traced", "saved.onnx", "weights.npz"
"""Files of a version folder: one of the first three, and arguments that no request has."""


class Served(Protocol):
    """A file that is ready to run."""

    interface: Interface

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Results by name; arrays are of the shapes and types of the interface."""


def open_served(folder: Path, level: str) -> Served:
    """The file of a version folder. Raises LoadError for a damaged one, one of another release or
    machine, and for a folder without; UsageError for one that cannot be served."""
    if (folder / NEFF).exists():
        return ServedProgram(folder, level)
    is_traced = (folder / TRACED).exists()
    if not is_traced and not (folder / SAVED).exists():
        raise LoadError(
            "SW_TRITON_MODEL",
            f"{NEFF}, {TRACED} or {SAVED} in {folder.name} is required, got neither",
            hint="write the repository again with `shardwright triton`",
        )
    if level != "L1":
        raise UsageError(
            "SW_TRITON_CONFIG",
            f"parameter level requires L1 for a traced module or a saved model, got {level}",
            hint="serve its NEFF files one by one, or drop --level",
        )
    return ServedTraced(folder) if is_traced else ServedSaved(folder)


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.exists())).hexdigest()


class ServedProgram:
    """A NEFF on one core, or on all ranks of its mesh, with a first size of ranks then."""

    def __init__(self, folder: Path, level: str) -> None:
        from shardwright.sim_cluster.values.load_checks import check_loadable
        from shardwright.sim_cluster.values.run_single import Ranks

        opened = open_program(folder / NEFF)
        self.program, self.level = opened.program, level
        check_loadable(self.program, opened.meta, load_target(self.program.target))
        self.ranks = Ranks(*mesh_of(opened))
        weights = folder / WEIGHTS
        self.weights = inputs_of(self.program, [weights]) if weights.exists() else {}
        given = {*self.weights, *self.ranks.coordinates}
        shapes = {b.name: b for b in self.program.buffers}
        before = (self.ranks.count,) if self.ranks.mesh else ()

        def specs(names: tuple[str, ...]) -> tuple[TensorSpec, ...]:
            found = (shapes[name] for name in names)
            return tuple(TensorSpec(b.name, b.dtype, (*before, *b.shape)) for b in found)

        self.interface = Interface(
            specs(tuple(n for n in self.program.inputs if n not in given)),
            specs(self.program.outputs),
            _digest(folder / NEFF, weights),
            self.ranks.count,
        )

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Served. Raises SimulationError."""
        from shardwright.sim_cluster.values.run_single import run_single

        return run_single(self.program, {**self.weights, **arrays}, self.level, ranks=self.ranks)


class ServedTraced:
    """A traced module: its tensors by name, results as `out0`, `out1` and so on."""

    def __init__(self, folder: Path) -> None:
        from shardwright.compiler.frontend.pytorch.signature import Leaf
        from shardwright.orchestrator.traced.module import load

        self.module = load(folder / TRACED)
        signature = self.module.signature
        if signature.changed:
            raise UsageError(
                "SW_TRITON_MODEL",
                f"a module that changes nothing is required, {self.module.name} changes"
                f" {', '.join(name for _, name in signature.changed)}",
                hint="instances of a model would differ: return the value instead",
            )
        self.leaves = [each for each in signature.inputs if isinstance(each, Leaf)]
        named = [each for each in signature.outputs if isinstance(each, str)]
        self.results = {f"out{number}": name for number, name in enumerate(named)}
        known = self._known() if set(self.results.values()) <= set(self._known()) else self._tried()
        self.interface = Interface(
            tuple(map(_spec, self.leaves)),
            tuple(
                _spec(Leaf(out, known[name].shape, known[name].dtype))
                for out, name in self.results.items()
            ),
            _digest(folder / TRACED),
        )

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Served. Raises SimulationError, UsageError."""
        from shardwright.compiler.frontend.pytorch.types import bytes_of

        values = self._values(
            {leaf.name: leaf.tensor(_bytes(arrays, leaf)) for leaf in self.leaves}
        )
        found = {}
        for spec in self.interface.outputs:
            tensor = values[self.results[spec.name]]
            flat = np.frombuffer(bytes_of(tensor), spec.numpy)
            found[spec.name] = flat.reshape(tuple(tensor.shape))
        return found

    def _known(self) -> dict[str, Any]:
        """The leaves of values whose shapes stand in the file."""
        from shardwright.compiler.frontend.pytorch.signature import Leaf
        from shardwright.orchestrator.traced.parts import CompiledPart

        made = [p.outputs for p in self.module.parts if isinstance(p, CompiledPart)]
        leaves = [*self.leaves, *(leaf for outputs in made for leaf in outputs)]
        leaves += [Leaf.of(name, tensor) for name, tensor in self.module.tensors.items()]
        return {leaf.name: leaf for leaf in leaves}

    def _tried(self) -> dict[str, Any]:
        """The leaves of all values: what runs on the CPU says its shapes by running, on zeros and
        on ones. Sizes that differ depend on values, and are -1. Raises UsageError."""
        from shardwright.compiler.frontend.pytorch.signature import Leaf

        zeros = {leaf.name: leaf.tensor(bytes(leaf.num_bytes)) for leaf in self.leaves}
        ones = {name: (tensor == tensor).to(tensor.dtype) for name, tensor in zeros.items()}
        first, second = self._values(zeros), self._values(ones)
        found = {}
        for name in self.results.values():
            a, b = Leaf.of(name, first[name]), Leaf.of(name, second[name])
            if (len(a.shape), a.dtype) != (len(b.shape), b.dtype):
                raise UsageError(
                    "SW_TRITON_MODEL",
                    f"results of one type and number of sizes are required, got {a} and {b}",
                    hint="return a tensor whose form does not depend on values",
                )
            sizes = (m if m == n else -1 for m, n in zip(a.shape, b.shape, strict=True))
            found[name] = Leaf(name, tuple(sizes), a.dtype)
        return found

    def _values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        from shardwright.compiler.frontend.pytorch.types import without_gradients

        values: dict[str, Any] = {**self.module.tensors, **given}
        with without_gradients():
            for part in self.module.parts:
                values |= part.run(values)
        return values


class ServedSaved:
    """A saved ONNX model: its inputs and results by name."""

    def __init__(self, folder: Path) -> None:
        from shardwright.compiler.frontend.onnx.beside import files_beside
        from shardwright.orchestrator.saved.onnx_model import load_onnx

        file = folder / SAVED
        self.model = load_onnx(file)
        self.interface = Interface(
            tuple(map(_saved_spec, self.model.inputs)),
            tuple(map(_saved_spec, self.model.outputs)),
            _digest(file, *files_beside(file.read_bytes(), folder)),
        )
        for spec in self.interface.inputs:
            if -1 in spec.shape:
                raise UsageError(
                    "SW_TRITON_MODEL",
                    f"{spec.name} requires sizes that are known, got {list(spec.shape)}",
                    hint="save the model with --input-shape",
                )

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Served. Raises SimulationError, UsageError."""
        return self.model(arrays)


def _saved_spec(spec: Spec) -> TensorSpec:
    """An input or a result of a saved model. Raises UsageError for one that Triton does not
    have."""
    if spec.dtype is None or spec.shape is None:
        raise UsageError(
            "SW_TRITON_MODEL",
            f"{spec.name} requires a tensor of numbers of known rank, got another value",
            hint="onnx.shape_inference.infer_shapes(model) adds ranks; leave texts out",
        )
    return TensorSpec(spec.name, DType.from_numpy(spec.dtype), spec.shape)


def _bytes(arrays: Mapping[str, np.ndarray], leaf: Any) -> bytes:
    return np.ascontiguousarray(arrays[leaf.name]).tobytes()


def _spec(leaf: Any) -> TensorSpec:
    """A tensor of torch's. Raises UsageError for a type that Triton does not have."""
    import ml_dtypes

    try:
        found = np.dtype(getattr(ml_dtypes, leaf.dtype, leaf.dtype))
        return TensorSpec(leaf.name, DType.from_numpy(found), leaf.shape)
    except (KeyError, TypeError):
        raise UsageError(
            "SW_TRITON_MODEL",
            f"{leaf.name} requires a type that Triton has, got {leaf.dtype}",
            hint="convert it in the module",
        ) from None
