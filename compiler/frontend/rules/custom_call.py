"""Custom calls the vendor's compiler knows by name: a table from target to ops of our IR.

Activations have one operand; markers and hints pass their operands on; the rest is in
`vendor_calls.py`, `resize.py` and `gspmd.py`. Any other target is refused: no library is there to
call. Names: error page NCC_EHCA005.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.callbacks import CALLBACKS, DEVICE_PRINT
from shardwright.compiler.frontend.mlir import call_target
from shardwright.compiler.frontend.rules import gspmd, host, kernels, microscaling, resize
from shardwright.compiler.frontend.rules import vendor_calls as calls
from shardwright.compiler.frontend.rules.collective import ragged_all_to_all
from shardwright.compiler.frontend.rules.collective_matmul import COLLECTIVE_MATMUL
from shardwright.compiler.frontend.rules.process_groups import RAGGED
from shardwright.compiler.frontend.rules.registry import Maker, Rule, Site, Values, imports, refuse
from shardwright.compiler.frontend.rules.sort import approx_top_k
from shardwright.compiler.ir.types import Value

Function = Callable[[Maker, Value], Value]


def _erf(make: Maker, x: Value) -> Value:
    return make.op("erf", x)


def _gelu(make: Maker, x: Value) -> Value:
    """x * (1 + erf(x / sqrt 2)) / 2."""
    return _gated(make, x, _erf(make, make.with_number("multiply", x, math.sqrt(0.5))))


def _gelu_tanh(make: Maker, x: Value) -> Value:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2."""
    cubic = make.with_number("multiply", make.multiply(x, x), 0.044715)
    inner = make.multiply(x, make.with_number("add", cubic, 1.0))
    return _gated(make, x, make.op("tanh", make.with_number("multiply", inner, _SQRT_2_PI)))


def _gated(make: Maker, x: Value, gate: Value) -> Value:
    half = make.with_number("multiply", x, 0.5)
    return make.multiply(half, make.with_number("add", gate, 1.0))


def _gelu_slope(make: Maker, x: Value) -> Value:
    """The derivative of Gelu, (1 + erf(x / sqrt 2)) / 2 + x exp(-x^2 / 2) / sqrt(2 pi); the caller
    multiplies it by the gradient (torch-neuronx: `AwsNeuronGeluBackward` has one operand).
    """
    gate = _erf(make, make.with_number("multiply", x, math.sqrt(0.5)))
    gate = make.with_number("add", gate, 1.0)
    bell = make.op("exponential", make.with_number("multiply", make.multiply(x, x), -0.5))
    slope = make.with_number("multiply", bell, 1 / math.sqrt(2 * math.pi))
    moving = make.multiply(x, slope)
    return make.add(make.with_number("multiply", gate, 0.5), moving)


def _silu(make: Maker, x: Value) -> Value:
    return make.multiply(x, make.op("logistic", x))


_SQRT_2_PI = math.sqrt(2 / math.pi)
ACTIVATIONS: dict[str, Function] = {
    "AwsNeuronErf": _erf,
    "AwsNeuronGelu": _gelu,
    "AwsNeuronGeluApprxTanh": _gelu_tanh,
    "AwsNeuronGeluBackward": _gelu_slope,
    "AwsNeuronSilu": _silu,
}
_VENDOR = "AwsNeuron"
_NO_PUBLIC_FORM = f"{_VENDOR}DropoutMaskV1"
"""Listed by the error page; what it takes is written down nowhere public, and nothing known is like
it: a mask needs a shape, a rate and a state of a generator. It stays refused."""
PASSED_ON = frozenset(
    (
        DEVICE_PRINT,
        *("AwsNeuronLNCShardingConstraint", "AwsNeuronTransferWithStaticRing"),
        *("AwsNeuronModuleMarkerStart-Forward", "AwsNeuronModuleMarkerStart-Backward"),
        *("AwsNeuronModuleMarkerEnd-Forward", "AwsNeuronModuleMarkerEnd-Backward"),
        *("NeuronBoundaryMarker-Start", "NeuronBoundaryMarker-End"),
    )
)
COMPOSITES: dict[str, Rule] = {
    kernels.NATIVE_KERNEL: kernels.native_kernel,
    kernels.CUSTOM_OP: kernels.custom_op,
    "AwsNeuronIntMatmult": calls.int_matmult,
    "AwsNeuronSiluBackward": calls.silu_backward,
    "AwsNeuronArgMax": partial(calls.first_extreme, kind="max"),
    "AwsNeuronArgMin": partial(calls.first_extreme, kind="min"),
    "AwsNeuronRmsNorm": calls.rms_norm,
    "AwsNeuronSoftmax": calls.softmax,
    "AwsNeuronSoftmaxBackward": calls.softmax_backward,
    "AwsNeuronTopK": calls.top_k,
    "ApproxTopK": approx_top_k,
    RAGGED: ragged_all_to_all,
    "ResizeBilinear": resize.bilinear,
    "ResizeNearest": resize.nearest,
    "ResizeNearestGrad": resize.nearest_grad,
    host.ANNOTATION: host.placement,
    microscaling.QUANTIZE: microscaling.quantize,
    microscaling.SCALED_DOT: microscaling.scaled_dot,
    "SPMDFullToShardShape": gspmd.annotation,
    "SPMDShardToFullShape": gspmd.annotation,
    "Sharding": gspmd.annotation,
}


@imports("stablehlo.custom_call")
def custom_call(site: Site) -> Values:
    """The ops a known target stands for; activations compute in fp32 and round once."""
    target = call_target(site.op)
    if target in COMPOSITES:
        return COMPOSITES[target](site)
    if target in CALLBACKS:
        return _callback(site)
    if target == DEVICE_PRINT and not len(site.op.results):
        return ()
    if target not in ACTIVATIONS and target not in PASSED_ON:
        _refuse(target)
    results, given = site.result_types(), [v.type for v in site.operands]
    passed = target in PASSED_ON
    if results != given or not (passed or (len(given) == 1 and given[0].dtype.is_float)):
        shown = f"{', '.join(map(str, given))} -> {', '.join(map(str, results))}"
        refuse("NCC_EVRF064", f"custom call {target} requires results like its operands: {shown}")
    if passed:
        return site.operands
    make = site.make
    wide = make.convert(site.operands[0], DType.F32)
    return (make.convert(ACTIVATIONS[target](make, wide), given[0].dtype),)


def _callback(site: Site) -> Values:
    """Nothing, of a callback that returns nothing (`frontend/callbacks.py` tells)."""
    if len(site.op.results):
        refuse(
            "NCC_EHCA005",
            "a callback into Python whose results a step reads (jax.pure_callback, io_callback) is"
            " not supported: no core runs Python",
            "compute it with jax.numpy, or before the step, and give it in the batch",
        )
    return ()


def _refuse(target: str) -> NoReturn:
    """Both codes have one page that does not say which stage raises which. Our reading: a name made
    up in the vendor's own space fails verification, any other has no code.
    """
    hint = "replace it with ordinary operators"
    if target == COLLECTIVE_MATMUL:
        why = "requires matrices [m, k] and k x n, and rhs_contracting_dim, tp_degree, num_groups"
        refuse("NCC_EVRF064", f"custom call {target} {why}", "correct its backend_config or types")
    if target == _NO_PUBLIC_FORM:
        why = "is known to neuronx-cc, but what it takes is not public"
        refuse("NCC_EHCA005", f"custom call {target} {why}", hint)
    code = "NCC_EVRF015" if target.startswith(_VENDOR) else "NCC_EHCA005"
    refuse(code, f"custom call {target} is not supported", hint)
