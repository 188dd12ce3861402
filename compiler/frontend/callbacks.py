"""Callbacks from a step into Python on the host: `jax.debug.print`, `jax.pure_callback` and others.

No core runs Python. A callback that returns nothing changes no value, so it is left out, with a
warning; one whose results the step reads is refused (`rules/custom_call.py`).
"""

from __future__ import annotations

from typing import Any

from shardwright.compiler.diagnostics import Diagnostic
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.mlir import all_ops, call_target

CALLBACKS = frozenset(
    f"{prefix}_python_{place}_callback"
    for prefix in ("xla", "xla_ffi", "xla_ffi_partitioned")
    for place in ("cpu", "gpu")
)
"""Targets of the custom calls that JAX lowers callbacks to."""
DEVICE_PRINT = "AwsNeuronDevicePrint"
"""The vendor's call that prints operands while a device runs."""


def is_dropped(op: Any) -> bool:
    """Whether an MLIR op is a callback that returns nothing."""
    return not len(op.results) and call_target(op) in CALLBACKS


def dropped_callbacks(module: Any, locations: LocationReader) -> tuple[Diagnostic, ...]:
    """Warnings about callbacks and prints that are left out of `module`; its context must be
    entered."""
    return (*_left_out(module, locations), *_unprinted(module, locations))


def _unprinted(module: Any, locations: LocationReader) -> tuple[Diagnostic, ...]:
    """The warning about values that a device would print."""
    found = [op for op in all_ops(module) if call_target(op) == DEVICE_PRINT]
    if not found:
        return ()
    message = f"{DEVICE_PRINT} prints nothing: its operands are passed on as they are"
    hint = "return the value as an output to see it"
    place = locations.read(found[0].location)
    return (Diagnostic("SW_CALLBACK_DROPPED", message, place, hint, "warning"),)


def _left_out(module: Any, locations: LocationReader) -> tuple[Diagnostic, ...]:
    places = [locations.read(op.location) for op in all_ops(module) if is_dropped(op)]
    if not places:
        return ()
    count = "1 callback" if len(places) == 1 else f"{len(places)} callbacks"
    verb = "is" if len(places) == 1 else "are"
    return (
        Diagnostic(
            "SW_CALLBACK_DROPPED",
            f"{count} into Python (jax.debug.print, jax.debug.callback) {verb} left out: no core"
            " runs Python, and nothing of the step depends on it",
            next((loc for loc in places if loc.file), places[0]),
            "return the value as a metric to see it",
            "warning",
        ),
    )


def erase_callbacks(module: Any) -> bool:
    """Erase the callbacks that return nothing; whether there were any."""
    found = [op for op in all_ops(module) if is_dropped(op)]
    for op in found:
        op.erase()
    return bool(found)
