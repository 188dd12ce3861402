"""Custom calls the vendor's compiler knows by name: a table from target to ops of our IR.

Activations have one operand; markers and sharding hints pass their operands on; the rest is in
`vendor_calls.py`. Any other target is refused: no library is there to call. Names: error page
NCC_EHCA005.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compiler.dtypes import DType
from compiler.frontend.rules import vendor_calls as calls
from compiler.frontend.rules.bits import binary, convert
from compiler.frontend.rules.registry import imports, refuse
from compiler.frontend.rules.sort import approx_top_k
from compiler.ir.types import Value

if TYPE_CHECKING:
    from compiler.frontend.importer import Site

Function = Callable[["Site", Value], Value]
Composite = Callable[["Site"], Sequence[Value]]


def _erf(site: Site, x: Value) -> Value:
    return site.emit("erf", (x,)).result


def _gelu(site: Site, x: Value) -> Value:
    """x * (1 + erf(x / sqrt 2)) / 2."""
    return _gated(site, x, _erf(site, binary(site, "multiply", x, math.sqrt(0.5))))


def _gelu_tanh(site: Site, x: Value) -> Value:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2."""
    square = site.emit("multiply", (x, x)).result
    factor = binary(site, "add", binary(site, "multiply", square, 0.044715), 1.0)
    inner = site.emit("multiply", (x, factor)).result
    inner = binary(site, "multiply", inner, math.sqrt(2 / math.pi))
    return _gated(site, x, site.emit("tanh", (inner,)).result)


def _gated(site: Site, x: Value, gate: Value) -> Value:
    half = binary(site, "multiply", x, 0.5)
    return site.emit("multiply", (half, binary(site, "add", gate, 1.0))).result


def _silu(site: Site, x: Value) -> Value:
    return site.emit("multiply", (x, site.emit("logistic", (x,)).result)).result


ACTIVATIONS: dict[str, Function] = {
    "AwsNeuronErf": _erf,
    "AwsNeuronGelu": _gelu,
    "AwsNeuronGeluApprxTanh": _gelu_tanh,
    "AwsNeuronSilu": _silu,
}
_VENDOR = "AwsNeuron"
_DOCUMENTED = frozenset(
    _VENDOR + name
    for name in [
        "GeluBackward",
        "SiluBackward",
        "RmsNorm",
        "Softmax",
        "SoftmaxBackward",
        "CollectiveMatmul",
        "IntMatmult",
        "ArgMax",
        "ArgMin",
        "TopK",
        "DropoutMaskV1",
        "CustomNativeKernel",
        "CustomOp",
        "DevicePrint",
        "TransferWithStaticRing",
    ]
)
"""Listed by the error page, not offered here."""
PASSED_ON = frozenset(
    (
        "AwsNeuronLNCShardingConstraint",
        "AwsNeuronModuleMarkerEnd-Backward",
        "AwsNeuronModuleMarkerEnd-Forward",
        "AwsNeuronModuleMarkerStart-Backward",
        "AwsNeuronModuleMarkerStart-Forward",
        "NeuronBoundaryMarker-End",
        "NeuronBoundaryMarker-Start",
    )
)


COMPOSITES: dict[str, Composite] = {
    "AwsNeuronArgMax": calls.arg_max,
    "AwsNeuronArgMin": calls.arg_min,
    "AwsNeuronRmsNorm": calls.rms_norm,
    "AwsNeuronSoftmax": calls.softmax,
    "AwsNeuronTopK": calls.top_k,
    "ApproxTopK": approx_top_k,
}


@imports("stablehlo.custom_call")
def custom_call(site: Site) -> Sequence[Value]:
    """The ops a known target stands for; activations compute in fp32 and round once."""
    target = site.op.attributes["call_target_name"].value
    if target in COMPOSITES:
        return COMPOSITES[target](site)
    if target not in ACTIVATIONS and target not in PASSED_ON:
        hint = "replace it with ordinary operators"
        if target in ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"):
            hint = "use Shardy shardings (jax_use_shardy_partitioner, the default of JAX)"
        # Both codes have one page that does not say which stage raises which. Our reading: a name
        # made up in the vendor's own space fails verification, any other has no code.
        made_up = target.startswith(_VENDOR) and target not in _DOCUMENTED
        code = "NCC_EVRF015" if made_up else "NCC_EHCA005"
        refuse(code, f"custom call {target} is not supported", hint)
    results = [site.result_type(i) for i in range(len(site.op.results))]
    given = [v.type for v in site.operands]
    passed = target in PASSED_ON
    if results != given or not (passed or (len(given) == 1 and given[0].dtype.is_float)):
        shown = f"{', '.join(map(str, given))} -> {', '.join(map(str, results))}"
        refuse("NCC_EVRF064", f"custom call {target} requires results like its operands: {shown}")
    if passed:
        return site.operands
    wide = convert(site, site.operands[0], DType.F32)
    return (convert(site, ACTIVATIONS[target](site, wide), given[0].dtype),)
