"""`shard_map` as code of whole values: what every rank computes, computed side by side.

A part of a step that is written per rank means, on whole values, the same body under `vmap` over
the axes of its mesh, collectives included. So lowered, it is partitioned, cut and compiled like the
rest of the step, over whatever mesh the strategy has; a value that a rank holds alone becomes a
slice of a stacked one, with the user's axes as its sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

Axes = tuple[str, ...]


def lowering_rules() -> tuple[tuple[Any, Callable[..., Any]], ...]:
    """(primitive, lowering) to override jax's with."""
    from jax._src.shard_map import shard_map_p

    return ((shard_map_p, _lowered),)


def _lowered(context: Any, *operands: Any, **params: Any) -> Any:
    from jax.interpreters import mlir

    whole = mlir.lower_fun(partial(whole_values, **params), multiple_results=True)
    return whole(context, *operands)


def whole_values(
    *arrays: Any,
    jaxpr: Any,
    mesh: Any,
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    newly_manual_axes: frozenset[str],
    **_: Any,
) -> list[Any]:
    """The results of a `shard_map` of whole `arrays`."""
    import jax
    from jax._src import config

    sizes = {a: n for a, n in mesh.shape.items() if a in newly_manual_axes}
    reads = [
        _dims(spec, var.aval.ndim, sizes) for spec, var in zip(in_specs, jaxpr.invars, strict=True)
    ]
    stacked = [_split(x, dims, sizes, mesh) for x, dims in zip(arrays, reads, strict=True)]

    body = partial(_evaluated, jaxpr, (), mesh)
    for axis in reversed(sizes):
        inside = tuple(0 if axis in sum(dims, ()) else None for dims in reads)
        body = jax.vmap(body, inside, 0, axis_name=axis, axis_size=sizes[axis], spmd_axis_name=axis)
    with config._check_vma(False):
        results = body(*stacked)
    return [
        _joined(x, _dims(spec, var.aval.ndim, sizes), sizes, mesh)
        for x, spec, var in zip(results, out_specs, jaxpr.outvars, strict=True)
    ]


def _evaluated(jaxpr: Any, constants: Sequence[Any], mesh: Any, *arguments: Any) -> list[Any]:
    """The results of a body. What only says over which axes a value varies goes."""
    from jax._src import core, source_info_util

    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):  # whose own value is of a rank's mesh
            return np.asarray(atom.val, atom.aval.dtype)
        return values[atom]

    for eqn in jaxpr.eqns:
        source = eqn.source_info
        stack = source_info_util.current_name_stack() + source.name_stack
        with source_info_util.user_context(source.traceback, name_stack=stack):
            results = _applied(eqn, mesh, [read(v) for v in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


_MARKS = frozenset(
    (
        *("pvary", "preduced", "reduced_vary_cast", "vary_unreduced_cast"),
        *("reshard", "sharding_constraint"),
    )
)
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
_INLINED |= dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr")


def _applied(eqn: Any, mesh: Any, inputs: list[Any]) -> Sequence[Any]:
    """The results of one equation of a body."""
    from jax._src import core
    from jax._src.lax import parallel

    name, params = eqn.primitive.name, eqn.params
    if name in _MARKS:
        return inputs
    if name in _INLINED:
        inner = params[_INLINED[name]]
        closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
        return _evaluated(closed.jaxpr, closed.consts, mesh, *inputs)
    if name == "shard_map":
        return whole_values(*inputs, **(params | {"mesh": mesh}))
    if name == "psum_invariant":
        return [parallel.psum(x, params["axes"]) for x in inputs]
    if name == "all_gather_invariant":
        return [
            parallel.all_gather(
                x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"]
            )
            for x in inputs
        ]
    if name == "ppermute":
        return [_pinned(_sent(_pinned(x, (), mesh), **params), (), mesh) for x in inputs]
    if name == "ragged_all_to_all":
        return [_exchanged_rows(mesh, params["axis_name"], *inputs)]
    params = {key: _retraced(value, mesh) for key, value in params.items()}
    moves = eqn.primitive in (parallel.all_to_all_p, parallel.reduce_scatter_p)
    inputs = [_pinned(x, (), mesh) for x in inputs] if moves else inputs
    results = eqn.primitive.bind(*inputs, **params)
    results = results if eqn.primitive.multiple_results else [results]
    return [_pinned(x, (), mesh) for x in results] if moves else results


def _sent(x: Any, axis_name: Any, perm: Sequence[tuple[int, int]]) -> Any:
    """What arrives over the pairs of `perm`; zeros where nothing does."""
    import jax.numpy as jnp
    from jax import lax

    count = lax.axis_size(axis_name)
    idle = (sorted(set(range(count)) - {pair[side] for pair in perm}) for side in (0, 1))
    every = (*perm, *zip(*idle, strict=True))
    moved = lax.ppermute(x, axis_name, every)
    if len(perm) == count:
        return moved
    receives = np.isin(np.arange(count), [target for _, target in perm])
    return jnp.where(jnp.asarray(receives)[lax.axis_index(axis_name)], moved, 0)


def _exchanged_rows(
    mesh: Any,
    axis_name: Any,
    rows: Any,
    output: Any,
    starts: Any,
    sizes: Any,
    places: Any,
    got: Any,
) -> Any:
    """A ragged_all_to_all as `rules/ragged.py` has it: an all_to_all of chunks as long as the
    buffers, with rows moved on both sides."""
    import jax.numpy as jnp
    from jax import lax

    def exchanged(x: Any) -> Any:
        sent = _pinned(x, (), mesh)
        return _pinned(lax.all_to_all(sent, axis_name, 0, 0, tiled=True), (), mesh)

    chunk, count = min(len(rows), len(output)), len(starts)
    if not chunk:
        return output
    numbers = starts[:, None] + jnp.arange(chunk)
    arrived = exchanged(jnp.take(rows, numbers, axis=0, mode="clip"))
    inside = jnp.arange(len(output))[:, None] - exchanged(places)
    is_of = (inside >= 0) & (inside < got)
    source = jnp.where(is_of, jnp.arange(count) * chunk + inside, 0).max(axis=1)
    flat = arrived.reshape(count * chunk, *rows.shape[1:])
    taken = jnp.take(flat, source, axis=0, mode="clip")
    covered = is_of.any(axis=1).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(covered, taken, output)


def _retraced(param: Any, mesh: Any) -> Any:
    """A parameter of an equation; bodies of loops and branches without their marks."""
    from jax._src import core
    from jax.sharding import NamedSharding

    if isinstance(param, NamedSharding):  # of the rank's part
        return None
    if type(param) is tuple:
        return tuple(_retraced(part, mesh) for part in param)
    if not isinstance(param, core.Jaxpr | core.ClosedJaxpr):
        return param
    inner, constants = (
        (param.jaxpr, param.consts) if isinstance(param, core.ClosedJaxpr) else (param, ())
    )
    closed = _traced(partial(_evaluated, inner, constants, mesh), [v.aval for v in inner.invars])
    return closed if isinstance(param, core.ClosedJaxpr) else closed.jaxpr


def _traced(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The closed jaxpr of a function of flat arguments."""
    import jax
    from jax._src import core

    plain = [
        core.ShapedArray(a.shape, a.dtype, a.weak_type) if isinstance(a, core.ShapedArray) else a
        for a in avals
    ]
    return jax.make_jaxpr(function)(*plain)


def _dims(spec: Any, rank: int, sizes: Mapping[str, int]) -> list[Axes]:
    """The axes of every dim, major to minor."""
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    dims = [tuple(a for a in entry if a in sizes) for entry in entries]
    return dims + [()] * (rank - len(dims))


def _split(x: Any, dims: Sequence[Axes], sizes: Mapping[str, int], mesh: Any) -> Any:
    """A whole value with a dim in front for each axis that splits it, in the order of the mesh."""
    used = sum(dims, ())
    shape: list[int] = []
    place: dict[str | int, int] = {}
    for d, axes in enumerate(dims):
        for axis in axes:
            place[axis] = len(shape)
            shape.append(sizes[axis])
        place[d] = len(shape)
        rest = x.shape[d]
        for axis in axes:
            rest //= sizes[axis]
        shape.append(rest)
    order = [place[a] for a in sizes if a in used] + [place[d] for d in range(len(dims))]
    return _pinned(x.reshape(shape).transpose(order), [a for a in sizes if a in used], mesh)


def _joined(x: Any, dims: Sequence[Axes], sizes: Mapping[str, int], mesh: Any) -> Any:
    """The whole value of one stacked over every axis."""
    used = sum(dims, ())
    x = x[tuple(slice(None) if a in used else 0 for a in sizes)]
    kept = [a for a in sizes if a in used]
    x = _pinned(x, kept, mesh)
    order: list[int] = []
    for d, axes in enumerate(dims):
        order += [kept.index(a) for a in axes]
        order.append(len(kept) + d)
    local = x.shape[len(kept) :]
    shape = list(local)
    for d, axes in enumerate(dims):
        for axis in axes:
            shape[d] *= sizes[axis]
    return x.transpose(order).reshape(shape)


def _pinned(x: Any, axes: Sequence[str], mesh: Any) -> Any:
    """`x` with its first dims over `axes`; the others are the partitioner's choice, also of a mesh
    whose axes are Explicit. Nothing is said over a mesh without axes, which is one core."""
    import jax
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

    if not mesh.shape:
        return x
    if AxisType.Auto not in mesh.axis_types:
        kinds = (AxisType.Auto,) * len(mesh.axis_names)
        mesh = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=kinds)
    rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes, *rest)))
