"""What a user's code has said about distribution so far: terms with the modules they are about.

Modules are objects until the model is there; then `Recording.distribution` names them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.locations import LocationReader
from shardwright.compiler.frontend.pytorch.distribution import (
    Axis,
    Checkpointed,
    Cut,
    Distribution,
    Other,
    Parallel,
    Pipeline,
    Precision,
    Recompute,
    Replicated,
    Style,
    Unit,
    split_weights,
)
from shardwright.compiler.frontend.pytorch.recomputing import layer_lists
from shardwright.compiler.frontend.pytorch.recorded_mesh import RecordedGroup, RecordedMesh

_OUTSIDE = "<outside>"


@dataclass(slots=True)
class _Call:
    """A term that was recorded about some modules; their paths are known when the model is."""

    term: Any
    modules: tuple[Any, ...]


@dataclass(slots=True)
class Recording:
    """What the user's code has said so far. `world_size` is what `get_world_size` answers until a
    mesh is made."""

    world_size: int
    locations: LocationReader
    meshes: list[RecordedMesh] = field(default_factory=list)
    units: list[_Call] = field(default_factory=list)
    parallel: list[_Call] = field(default_factory=list)
    checkpointed: list[_Call] = field(default_factory=list)
    replicated: list[_Call] = field(default_factory=list)
    others: list[Other] = field(default_factory=list)
    pipeline: Pipeline | None = None
    cuts: list[tuple[Any, Cut]] = field(default_factory=list)
    held: dict[int, _Call] = field(default_factory=dict)
    """The unit of a parameter, by its identity."""
    marked: list[tuple[Any, str]] = field(default_factory=list)
    """Attributes that modules were lent."""

    def here(self) -> Loc:
        """The line of the user's that is at work."""
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return self.locations.innermost(frames)

    @property
    def ranks(self) -> int:
        """Ranks of the mesh, or those that were asked for."""
        return self._mesh().size() if self.meshes else self.world_size

    def other(self, term: str, value: object = "") -> None:
        """Note a term without a place of its own, once per line."""
        told = Other(term=term, value="" if value is None else str(value), loc=self.here())
        if told not in self.others:
            self.others.append(told)

    def lend(self, module: Any, name: str, value: Any) -> None:
        """Give a module an attribute until the reading ends."""
        object.__setattr__(module, name, value)
        self.marked.append((module, name))

    def close(self) -> None:
        """Take back what modules were lent."""
        for module, name in self.marked:
            module.__dict__.pop(name, None)
        self.marked.clear()

    def add_unit(self, modules: Sequence[Any], unit: Unit) -> None:
        """A call of `fully_shard`, which holds the parameters that no call before it has. Raises
        UsageError (SW_TORCH_UNITS)."""
        call = _Call(unit, tuple(modules))
        for module in modules:
            for before in self.units:
                if any(module is one for one in before.modules):
                    raise _units("a module to be a unit once", "it again", unit.loc, before)
                if any(module is inner for one in before.modules for inner in one.modules()):
                    required = "units from the inside out"
                    raise _units(required, "a module behind the one around it", unit.loc, before)
        for module in modules:
            for parameter in module.parameters():
                self.held.setdefault(id(parameter), call)
        self.units.append(call)

    def distribution(self, model: Any) -> Distribution:
        """All that was said, by the paths of the modules in `model`. Raises UsageError
        (SW_TORCH_UNITS) for a module that is no part of it, or both FSDP and DDP."""
        paths = {id(module): name for name, module in model.named_modules()}
        names = {id(p): name for name, p in model.named_parameters()}
        if self.units and self.replicated:
            first = self.replicated[0].term.loc
            raise _units("either DDP or FSDP over one model", "both", first, self.units[0])

        def placed(calls: Sequence[_Call], what: str) -> Iterator[tuple[Any, tuple[str, ...]]]:
            for call in calls:
                found = tuple(paths.get(id(m), _OUTSIDE) for m in call.modules)
                if _OUTSIDE in found:
                    kind = type(call.modules[found.index(_OUTSIDE)]).__name__
                    raise UsageError(
                        "SW_TORCH_UNITS",
                        f"{what} requires a module of the model, got a {kind} that is none",
                        call.term.loc,
                        "return the model that was distributed",
                    )
                yield call, found

        units = tuple(
            replace(
                call.term,
                modules=found,
                parameters=tuple(n for p, n in names.items() if self.held.get(p) is call),
            )
            for call, found in placed(self.units, "fully_shard")
        )
        pipeline = self.pipeline
        if pipeline is not None:
            cuts = [replace(c, module=_below(paths.get(id(m), ""), c.module)) for m, c in self.cuts]
            pipeline = replace(pipeline, cuts=tuple(cuts))
        mesh = self._mesh() if self.meshes else None
        return Distribution(
            axes=mesh.base if mesh else self._world(units),
            units=units,
            parallel=tuple(
                replace(call.term, module=found[0])
                for call, found in placed(self.parallel, "parallelize_module")
            ),
            checkpointed=tuple(
                replace(call.term, module=found[0])
                for call, found in placed(self.checkpointed, "checkpoint_wrapper")
            ),
            pipeline=pipeline,
            replicated=tuple(
                replace(call.term, module=found[0])
                for call, found in placed(self.replicated, "DistributedDataParallel")
            ),
            others=tuple(self.others),
            lists=tuple(layer_lists(model).items()),
            modules=tuple(name for name, _ in model.named_modules() if name),
            mesh_loc=mesh.loc if mesh else self._first_loc(),
        )

    def recomputed(self, model: Any) -> dict[str, Recompute]:
        """Paths of the modules of `model` that are checkpointed."""
        paths = {id(module): name for name, module in model.named_modules()}
        calls = ((paths.get(id(call.modules[0])), call.term.keeps) for call in self.checkpointed)
        return {path: keeps for path, keeps in calls if path}

    def terms(self) -> list[Loc]:
        """Lines of what shards, copies, splits or cuts the model, in no order."""
        calls = (*self.units, *self.replicated, *self.parallel)
        cuts = [cut for _, cut in self.cuts]
        return [call.term.loc for call in calls] + [cut.loc for cut in cuts]

    def _world(self, units: Sequence[Unit]) -> tuple[Axis, ...]:
        """Without a mesh all ranks are one dim."""
        if not units and not self.replicated:
            return ()
        return (Axis(name="dp_shard" if units else "dp_replicate", size=self.world_size),)

    def _first_loc(self) -> Loc:
        calls = (*self.units, *self.replicated)
        found: Loc = calls[0].term.loc if calls else Loc()
        return found

    def _mesh(self) -> RecordedMesh:
        """The mesh that most terms name dims of, then that with most dims, the first of those."""
        calls = [call.term for call in (*self.units, *self.parallel, *self.replicated)]
        named = {axis for one in calls for axis in (*one.axes, *getattr(one, "replicas", ()))}
        named |= {*(self.pipeline.axes if self.pipeline else ())}

        def fit(mesh: RecordedMesh) -> tuple[int, int]:
            return len(named & {*mesh.axes}), mesh.ndim

        return max(self.meshes, key=fit)

    def axes_of(self, mesh: Any, default: str = "dp_shard") -> tuple[str, ...]:
        """The axes of a mesh that a call was given; all ranks where it was given none."""
        if isinstance(mesh, RecordedMesh):
            return mesh.axes
        return self._mesh().axes if self.meshes else (default,)


def _units(required: str, got: str, loc: Loc, before: _Call) -> UsageError:
    return UsageError(
        "SW_TORCH_UNITS",
        f"fully_shard requires {required}, got {got} ({before.term.loc})",
        loc,
        "call it once for every block, then for the model",
    )


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def dtype_name(dtype: Any) -> str:
    """A type of torch's by name, "" for none."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def precision_of(policy: Any) -> Precision:
    """MixedPrecisionPolicy, or MixedPrecision of FSDP1, which has no type of outputs."""
    if policy is None:
        return Precision()
    return Precision(
        param_dtype=dtype_name(getattr(policy, "param_dtype", None)),
        reduce_dtype=dtype_name(getattr(policy, "reduce_dtype", None)),
        output_dtype=dtype_name(getattr(policy, "output_dtype", None)),
    )


def record_unit(
    recording: Recording,
    modules: Sequence[Any],
    *,
    mesh: Any = None,
    reshard: bool | int | None = None,
    policy: Any = None,
    offload: str = "",
) -> None:
    """A unit of FSDP, of either version."""
    replicas, axes = _data_axes(recording, mesh)
    unit = Unit(
        modules=(),
        reshard=reshard,
        precision=precision_of(policy),
        axes=axes,
        replicas=replicas,
        offload=offload,
        loc=recording.here(),
    )
    recording.add_unit(modules, unit)


def _data_axes(recording: Recording, mesh: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes of copies, axes of shards) of a mesh that FSDP was given; of one dim all are shards.
    Raises UsageError (SW_TORCH_MESH)."""
    if not isinstance(mesh, RecordedMesh):
        return (), ()
    if mesh.ndim > 2:
        names = ", ".join(dim.name for dim in mesh.dims)
        raise UsageError(
            "SW_TORCH_MESH",
            f"fully_shard requires a mesh of one dim, or of copies and shards, got {names}",
            recording.here(),
            'give it the slice: mesh["dp_replicate", "dp_shard"]',
        )
    return (mesh.dims[0].axes, mesh.dims[1].axes) if mesh.ndim == 2 else ((), mesh.axes)


def record_plan(recording: Recording, module: Any, mesh: Any, plan: Any) -> None:
    """A plan of `parallelize_module`: a style of the module, or styles by pattern. Raises
    UsageError (SW_TORCH_PLAN)."""
    axes = recording.axes_of(mesh, "tp")
    if len(axes) > 1 and isinstance(mesh, RecordedMesh) and mesh.ndim > 1:
        raise UsageError(
            "SW_TORCH_PLAN",
            f"parallelize_module requires a mesh of one dim, got {', '.join(axes)}",
            recording.here(),
            'give it the slice: mesh["tp"]',
        )
    plans: Mapping[str, Any] = plan if isinstance(plan, Mapping) else {"": plan}
    for pattern, style in plans.items():
        found = list(_named(module, pattern))
        if not found:
            recording.other("parallelize_module", f"{pattern!r} names no module")
        for one in found:
            if style is not None:
                _record_style(recording, one, style, axes)


def _named(module: Any, pattern: str) -> Iterator[Any]:
    """The modules below `module` that a pattern names, as PyTorch looks them up."""
    from fnmatch import fnmatch

    atom, _, rest = pattern.partition(".")
    if not atom:
        yield module
        return
    for name, child in module.named_children():
        if fnmatch(name, atom):
            yield from _named(child, rest)


def _record_style(recording: Recording, module: Any, style: Any, axes: tuple[str, ...]) -> None:
    names = [kind.__name__ for kind in type(style).__mro__]
    known = next((Style(name) for name in names if name in {*Style}), None)
    if known is None:
        recording.other("parallelize_module", f"{names[0]} of {type(module).__name__}")
        return
    weights = _split_weights(recording, module, known) if known.splits_weights else ()
    term = Parallel(
        module="",
        style=known,
        weights=weights,
        inputs=_layouts(style, "desired_input_layouts", "input_layouts"),
        outputs=_layouts(style, "desired_output_layouts", "output_layouts"),
        axes=axes,
        loc=recording.here(),
    )
    for before in recording.parallel:
        splits = before.term.style.splits_weights and known.splits_weights
        if before.modules[0] is module and splits and before.term.weights != weights:
            raise UsageError(
                "SW_TORCH_PLAN",
                f"a module requires one style for its weights, got {known} after"
                f" {before.term.style} ({before.term.loc})",
                term.loc,
                "keep the one that counts",
            )
    recording.parallel.append(_Call(term, (module,)))


def _split_weights(recording: Recording, module: Any, style: Style) -> tuple[tuple[str, int], ...]:
    """Parameters of a module and their dim that a style spreads. Raises UsageError."""
    import torch

    kinds: dict[Any, str] = {torch.nn.Linear: "Linear", torch.nn.Embedding: "Embedding"}
    kind = next((name for of, name in kinds.items() if isinstance(module, of)), None)
    if kind is None:
        raise UsageError(
            "SW_TORCH_PLAN",
            f"{style} requires an nn.Linear or nn.Embedding, got a {type(module).__name__}",
            recording.here(),
            "name the layers inside of it",
        )
    has_bias = getattr(module, "bias", None) is not None
    return split_weights(style, kind, has_bias=has_bias)


def _layouts(style: Any, *names: str) -> str:
    """The first of some layouts that a style has, as text."""
    for name in names:
        found = getattr(style, name, None)
        if found is not None:
            several = found if isinstance(found, tuple) else (found,)
            return ", ".join(_layout(one) for one in several)
    return ""


def _layout(placement: Any) -> str:
    """ "Shard(1)", "Replicate()" whichever way a release prints it."""
    dim = getattr(placement, "dim", None)
    return f"Shard({dim})" if dim is not None else type(placement).__name__.replace("None", "")


def record_checkpoint(recording: Recording, module: Any, keeps: Recompute) -> None:
    """A module that is computed again, once."""
    for before in recording.checkpointed:
        if before.modules[0] is module and before.term.keeps is keeps:
            return
    term = Checkpointed(module="", keeps=keeps, loc=recording.here())
    recording.checkpointed.append(_Call(term, (module,)))


def record_replicas(
    recording: Recording, module: Any, mesh: Any, bucket_mb: object = None, policy: Any = None
) -> None:
    """Data parallelism with whole gradients."""
    axes = recording.axes_of(mesh, "dp_replicate")
    size = int(bucket_mb) if isinstance(bucket_mb, int | float) else 0
    term = Replicated(
        module="",
        axes=axes,
        bucket_mb=size,
        precision=precision_of(policy),
        loc=recording.here(),
    )
    recording.replicated.append(_Call(term, (module,)))


def record_split(recording: Recording, module: Any, spec: Mapping[str, Any]) -> None:
    """Cut points of a pipeline. Raises UsageError (SW_TORCH_SPLIT) for a name that is no module's,
    or a model that is cut already."""
    loc = recording.here()
    if recording.pipeline is not None and recording.pipeline.cuts:
        raise split_refused("one pipeline over the model", "a second", loc)
    names = {name for name, _ in module.named_modules()}
    cuts = []
    for name, point in spec.items():
        if name not in names:
            raise split_refused("names of modules in split_spec", repr(name), loc)
        cuts.append((module, Cut(module=name, is_behind=_is_end(point), loc=loc)))
    recording.cuts += cuts
    before = recording.pipeline or Pipeline()
    recording.pipeline = replace(before, cuts=tuple(cut for _, cut in cuts), loc=loc)


def _is_end(point: Any) -> bool:
    return getattr(point, "name", str(point)) == "END"


def record_schedule(recording: Recording, name: str, micro_batches: object, group: object) -> None:
    """How micro-batches go through the stages."""
    loc = recording.here()
    before = recording.pipeline or Pipeline(loc=loc)
    number = micro_batches if isinstance(micro_batches, int) else 0
    axes = group.axes if isinstance(group, RecordedGroup) else before.axes
    recording.pipeline = replace(before, schedule=name, micro_batches=number, axes=axes)


def split_refused(required: str, got: str, loc: Loc) -> UsageError:
    """The refusal of a pipeline."""
    return UsageError(
        "SW_TORCH_SPLIT",
        f"a pipeline requires {required}, got {got}",
        loc,
        'pipeline(model, mb_args, split_spec={"layers.8": SplitPoint.BEGINNING})',
    )
