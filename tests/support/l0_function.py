"""A lowered function run region by region in L0, each region held against L1 on the same memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from compiler.allocate import overlaps
from compiler.driver import generate_function
from compiler.ir.types import Graph
from compiler.isa.limits import check_region, limits_for
from compiler.isa.region import Tensor
from compiler.lower.function import Lowered, lower_function
from sim_cluster import l0, regions
from tests.support.region_reference import distance

TARGET = "trn1n.32xlarge"


def run_in_l0(graph: Graph, inputs: Sequence[np.ndarray], bound: float = 2e-6) -> list[np.ndarray]:
    """Outputs of `graph` computed by generated code; every tensor agrees with L1 within `bound`
    after every region (within a rounding for narrow floats).
    """
    lowered = lower_function(graph)
    function = generate_function(lowered, TARGET)
    fast, slow = _memory(lowered, inputs), _memory(lowered, inputs)
    for region in function.regions:
        assert not overlaps(region)
        assert not check_region(region, limits_for(TARGET))
        regions.run_region(region.program, fast, {})
        l0.run_region(region, slow, {})
        for tensor, want, have in zip(lowered.tensors, fast, slow, strict=True):
            error = distance(want, have)
            assert error <= max(bound, _rounding(tensor)), (region.program.name, tensor.name, error)
    outputs = [(slow[n], lowered.tensors[n].shape) for n in lowered.outputs]
    return [array.reshape(shape) for array, shape in outputs]


def _rounding(tensor: Tensor) -> float:
    narrow = tensor.dtype.is_float and tensor.dtype.bytes < 4
    return float(np.sqrt(2.0) * 2**-9) if narrow else 0.0


def _memory(lowered: Lowered, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Flat arrays per tensor; what nobody has written yet is NaN, or 1."""
    made: list[np.ndarray] = []
    for number, tensor in enumerate(lowered.tensors):
        if tensor.kind == "constant":
            made.append(np.frombuffer(tensor.data, tensor.dtype.numpy).copy())
        elif tensor.kind == "input":
            made.append(np.array(inputs[lowered.inputs.index(number)]).reshape(-1))
        else:
            filler = np.nan if tensor.dtype.is_float else 1
            made.append(np.full(math.prod(tensor.shape), filler).astype(tensor.dtype.numpy))
    return made
