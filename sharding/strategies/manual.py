"""The user's own shardings, respected and completed.

What the step says about its arguments, results and values inside (`with_sharding_constraint`,
`in_shardings`, `out_shardings`, sdy text) becomes a constraint; the partitioner completes the rest
by propagation. State that the user leaves open comes back where it came in. Nothing is predicted: a
collective is what the user's shardings ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import UNKNOWN_LOC, Diagnostic, Loc, ShardingError
from shardwright.compiler.frontend.roles import STATE_ROLES
from shardwright.compiler.frontend.shardings import ModuleShardings
from shardwright.compiler.ir.opdef import make_op
from shardwright.compiler.ir.ops import ManualRegionAttrs, ShardingConstraintAttrs
from shardwright.compiler.ir.rewrite import Level
from shardwright.compiler.ir.types import Graph, Op, Value
from shardwright.sharding.partition.mesh import Mesh
from shardwright.sharding.partition.partitioned import Slot
from shardwright.sharding.partition.spec import ShardingSpec
from shardwright.sharding.strategies import INPUT, OUTPUT, Recipe, ValueId

NAMED = 6  # open arguments that the finding lists by name (our choice)


@dataclass(frozen=True, slots=True)
class Given:
    """A sharding of the user's: what it says, where, and the line if there is one."""

    attrs: ShardingConstraintAttrs
    what: str
    loc: Loc = UNKNOWN_LOC

    @property
    def spec(self) -> ShardingSpec:
        """The axes per dim."""
        return ShardingSpec(self.attrs.spec)


def user_mesh(user: ModuleShardings | None) -> Mesh:
    """The mesh that a step's shardings name. Raises ShardingError unless there is exactly one."""
    meshes = user.meshes if user is not None else ()
    if not meshes:
        raise ShardingError(
            "SW_MANUAL_NONE",
            "strategy manual requires shardings in the step, got none",
            hint="constrain values with NamedSharding(AbstractMesh(...), P(...)), or choose another"
            " strategy",
        )
    if len(meshes) > 1:
        shown = " and ".join(str(Mesh(axes)) for axes in meshes)
        raise ShardingError(
            "SW_MANUAL_MESH",
            f"strategy manual requires one mesh in the step, got {shown}",
            hint="give every sharding the same mesh",
        )
    return Mesh(meshes[0])


def inputs_given(graph: Graph, user: ModuleShardings) -> list[Given | None]:
    """What the user says of each input: as an argument, else by the first constraint that reads it
    (which is how `jax.jit` writes `in_shardings` of a step that another jit calls).
    """
    first: dict[Value, Op] = {}
    for op in graph.ops:
        if isinstance(op.attrs, ShardingConstraintAttrs):
            first.setdefault(op.operands[0], op)
    pairs = zip(user.inputs, graph.inputs, strict=True)
    return [_given(attrs, "argument", first.get(value)) for attrs, value in pairs]


def _outputs_given(graph: Graph, user: ModuleShardings) -> list[Given | None]:
    """What the user says of each output: as a result, else by the constraint that makes it."""
    made = {op.result: op for op in graph.ops if isinstance(op.attrs, ShardingConstraintAttrs)}
    pairs = zip(user.outputs, graph.outputs, strict=True)
    return [_given(attrs, "result", made.get(value)) for attrs, value in pairs]


def _given(attrs: ShardingConstraintAttrs | None, what: str, op: Op | None) -> Given | None:
    if attrs is not None:
        return Given(attrs, what)
    return None if op is None else Given(op.attrs, "constraint", op.loc)


def data_ways(graph: Graph, inputs: Sequence[Slot], user: ModuleShardings) -> int:
    """Into how many parts the user's shardings cut the samples of a batch."""
    mesh, given = user_mesh(user), inputs_given(graph, user)
    found = [
        mesh.size(entry.attrs.spec[slot.batch_dim])
        for slot, entry in zip(inputs, given, strict=True)
        if slot.batch_dim is not None and entry is not None
    ]
    return max(found, default=1)


def manual(
    graph: Graph,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    mesh: Mesh,
    user: ModuleShardings | None,
) -> Recipe:
    """The recipe of a step whose user decided.

    Raises: ShardingError for a step without shardings, a `mesh` that is not theirs, dims that do
    not divide, or state that leaves the step elsewhere than it came in.
    """
    own = user_mesh(user)
    assert user is not None
    if own.axes != mesh.axes:
        raise ShardingError(
            "SW_MANUAL_MESH",
            f"strategy manual requires the mesh of the step's shardings, {own}, got {mesh}",
            hint="leave [mesh] empty, or build the step's mesh from the same axes",
        )
    step = _Manual(graph, inputs, outputs, mesh, inputs_given(graph, user))
    step.check()
    step.place(_outputs_given(graph, user))
    return step.recipe()


@dataclass(slots=True)
class _Manual:
    """What has been read of a step so far."""

    graph: Graph
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    mesh: Mesh
    given: list[Given | None]
    specs: dict[ValueId, ShardingSpec] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    tied: list[tuple[int, int]] = field(default_factory=list)

    def check(self) -> None:
        """Refuse shardings whose axes do not divide their dim."""
        for op in self.graph.walk():
            if isinstance(op.attrs, ShardingConstraintAttrs):
                self._check_dims("a constraint", op.attrs, op.operands[0], op.loc)
        for slot, value, entry in zip(self.inputs, self.graph.inputs, self.given, strict=True):
            if entry is not None:
                self._check_dims(slot.name, entry.attrs, value, entry.loc)

    def _check_dims(
        self, what: str, attrs: ShardingConstraintAttrs, value: Value, loc: Loc
    ) -> None:
        for dim, axes in enumerate(attrs.spec):
            size, ways = value.type.shape[dim], self.mesh.size(axes)
            if size % ways:
                shown = " * ".join(f"{a}={self.mesh.sizes[a]}" for a in axes)
                raise ShardingError(
                    "SW_MANUAL_DIVIDE",
                    f"{what} of {value.type} requires dim {dim} to be a multiple of {ways}"
                    f" ({shown}), got {size}",
                    loc if loc.line else None,
                    f"pad the dim to {-(-size // ways) * ways}, or shard another dim",
                )

    def place(self, results: list[Given | None]) -> None:
        """Constrain what is closed; state lives in one place before and after the step."""
        numbers = {slot.name: j for j, slot in enumerate(self.outputs) if slot.role in STATE_ROLES}
        for j, entry in enumerate(results):
            if entry is not None and not entry.attrs.open_dims:
                self.specs[OUTPUT, j] = entry.spec
        for i, (slot, entry) in enumerate(zip(self.inputs, self.given, strict=True)):
            if entry is not None and not entry.attrs.open_dims:
                self._constrain(i, slot.name, entry)
            if slot.role in STATE_ROLES and slot.name in numbers:
                j = numbers[slot.name]
                self._join(i, j, slot.name, results[j])

    def _constrain(self, number: int, name: str, entry: Given) -> None:
        self.specs[INPUT, number] = entry.spec
        at = f" at {entry.loc.file}:{entry.loc.line}" if entry.loc.line else ""
        self.reasons[name] = f"{entry.spec}: user, {entry.what}{at}"

    def _join(self, i: int, j: int, name: str, result: Given | None) -> None:
        """One layout for input `i` and output `j`, which is the input of the next step."""
        before, after = self.specs.get((INPUT, i)), self.specs.get((OUTPUT, j))
        if before is not None and after is not None and before != after:
            raise ShardingError(
                "SW_MANUAL_STATE",
                f"{name} requires one sharding before and after the step, got {before} and {after}",
                result.loc if result is not None and result.loc.line else None,
                "the result of a step is the argument of the next: give both the same sharding",
            )
        if before is not None:
            self.specs[OUTPUT, j] = before
        elif after is not None and result is not None:
            self._constrain(i, name, result)
        else:
            self.tied.append((i, j))

    def recipe(self) -> Recipe:
        """The recipe; arguments that are open in some dims get their sharding as a constraint."""
        opened = [slot.name for slot in self.inputs if slot.name not in self.reasons]
        graph = self._with_open_arguments()
        return Recipe(
            graph=graph,
            mesh=self.mesh,
            specs=self.specs | dict(_of_regions(graph)),
            reasons=self.reasons,
            predicted=None,
            tied=tuple(self.tied),
            findings=tuple(_completed(opened, len(self.inputs))),
        )

    def _with_open_arguments(self) -> Graph:
        level = Level()
        for value, entry in zip(self.graph.inputs, self.given, strict=True):
            if entry is not None and entry.what == "argument" and entry.attrs.open_dims:
                op = make_op("sharding_constraint", (value,), entry.attrs)
                level.ops.append(op)
                level.replace((value,), op.results)
        level.ops += map(level.update, self.graph.ops)
        return level.finish(self.graph)


def _of_regions(graph: Graph) -> Iterator[tuple[ValueId, ShardingSpec]]:
    """The results of code of one rank, which are laid out as it says."""
    for ordinal, op in enumerate(graph.walk()):
        if isinstance(op.attrs, ManualRegionAttrs):
            for number, dims in enumerate(op.attrs.specs):
                yield (ordinal, number), ShardingSpec(dims)


def _completed(opened: Sequence[str], total: int) -> Iterator[Diagnostic]:
    """The note about arguments that propagation places."""
    if opened:
        more = f" and {len(opened) - NAMED} more" if len(opened) > NAMED else ""
        yield Diagnostic(
            "SW_MANUAL_OPEN",
            f"{len(opened)} of {total} arguments are open and placed by propagation: "
            f"{', '.join(opened[:NAMED])}{more}",
            hint="`--explain sharding` lists all of them",
            severity="note",
        )
