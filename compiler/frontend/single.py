"""A step without its shardings and callbacks, compiled for one device: the reference of a run.

The user's mesh has more devices than this machine, and the reference is to be unsharded anyway. So
the lowered module loses its shardings, which never change a value, and XLA compiles what is left.
Callbacks that return nothing go too: a run prints what it prints, and nothing else.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from shardwright.compiler.frontend.callbacks import erase_callbacks
from shardwright.compiler.frontend.manual_regions import lowering_rules
from shardwright.compiler.frontend.mlir import all_ops


def single_device(jitted: Any, device: Any) -> Callable[..., Any]:
    """`jitted` on one device: unchanged when it has neither."""
    programs: dict[Any, Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        import jax
        from jax.interpreters import mlir

        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args))
        if shapes not in programs:
            traced = jitted.trace(*args)
            rules = mlir.LoweringParameters(override_lowering_rules=lowering_rules())
            lowered = traced.lower(lowering_platforms=("cpu",), _private_parameters=rules)
            module = lowered.compiler_ir("stablehlo")
            programs[shapes] = _without_shardings(module, traced, device) or jitted
        with jax.default_device(device):
            return programs[shapes](*args)

    return run


def _without_shardings(module: Any, traced: Any, device: Any) -> Callable[..., Any] | None:
    """The program of `module` without its shardings and callbacks; None when it has none."""
    from jaxlib.mlir import ir

    with module.context:
        has_callbacks = erase_callbacks(module)
        ops = all_ops(module)
        found = [op for op in ops if op.name in ("sdy.mesh", "sdy.sharding_constraint")]
        if not found and not has_callbacks:
            return None
        for op in found:
            for result in op.results:
                result.replace_all_uses_with(op.operands[0])
            op.erase()
        for view in module.body.operations:
            _forget(view.operation)
        code = io.BytesIO()
        module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(
            ir.IntegerType.get_signless(32), 1
        )
        module.operation.write_bytecode(code)
    return _loaded(code.getvalue(), traced, device)


def _forget(function: Any) -> None:
    """Drop the shardings of arguments and results."""
    from jaxlib.mlir import ir

    for key in ("arg_attrs", "res_attrs"):
        if key in function.attributes:
            rows = [
                ir.DictAttr.get({a.name: a.attr for a in row if a.name != "sdy.sharding"})
                for row in function.attributes[key]
            ]
            function.attributes[key] = ir.ArrayAttr.get(rows)


def _loaded(code: bytes, traced: Any, device: Any) -> Callable[..., Any]:
    """A callable of the step's own pytrees."""
    import jax
    from jax._src.lib import xla_client
    from jaxlib import _jax

    devices = _jax.DeviceList((device,))
    program = device.client.compile_and_load(code, devices, xla_client.CompileOptions())
    structure = jax.tree.structure(traced.out_info)

    def run(*args: Any) -> Any:
        placed = [jax.device_put(leaf, device) for leaf in jax.tree.leaves(args)]
        results = program.execute_sharded(placed).disassemble_into_single_device_arrays()
        return structure.unflatten([part for (part,) in results])

    return run
