"""A localized step cut by dataflow into `forward`, `backward` and `update`, tied together by named
buffers.

`forward` computes the loss and other metrics, `backward` the sums over samples the optimizer needs,
`update` the rest. With several micro-batches the first two repeat and add up in accumulators, fp32
unless told otherwise; `update` takes the mean and clears them. No name and no location is read:
what may be accumulated follows from `linearity`, where to cut from `gradients.py`, what is kept in
between from `residuals.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.diagnostics import Diagnostic, Loc, ShardingError
from shardwright.compiler.dtypes import DType
from shardwright.compiler.frontend.roles import STATE_ROLES
from shardwright.compiler.ir.build import Builder, subgraph
from shardwright.compiler.ir.opdef import OPS
from shardwright.compiler.ir.ops import AllGatherAttrs, ConvertAttrs
from shardwright.compiler.ir.types import Graph, Op, TensorType, Value, tensor_type
from shardwright.compiler.neff.schedule import Schedule
from shardwright.compiler.passes.placement import place_late
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.sharding.cut.gradients import (
    CutRefusedError,
    StepView,
    ancestors,
    depends_on,
    find_cut,
    upstream,
    with_reduced,
)
from shardwright.sharding.cut.residuals import choose_residuals
from shardwright.sharding.linearity import Kind, label_values
from shardwright.sharding.localize import Localized
from shardwright.sharding.localize.coordinates import coordinate_name, hoist_coordinates
from shardwright.sharding.partition.partitioned import PartitionedGraph, Slot
from shardwright.sharding.prepare.phantom_replica import (
    MIXED_SAMPLES,
    TRACED_SAMPLES,
    check_partial,
)

_TRAINED_ROLES = frozenset(("parameter", "optimizer"))


def split_step(
    local: Localized,
    *,
    num_microbatches: int = 1,
    reshard_after_forward: bool = True,
    reduce_last: bool = False,
    wide: bool,
    partial: frozenset[Value] | None = None,
) -> StepPlan:
    """The programs of a step, their buffers and their schedule.

    With `reduce_last` accumulators hold gradients in front of their reductions, where they can;
    without `wide` they have the type of the gradients, else fp32. `partial` are values that hold a
    part of a sum, of a step without its phantom replica (`phantom_replica.py`).
    Batch buffers describe one micro-batch. A step that cannot be cut is one program named `step`,
    with a finding in `metadata["findings"]`.
    Raises: ShardingError when it cannot be cut and `num_microbatches` is above 1, or when names
    collide.
    """
    if num_microbatches < 1:
        raise ShardingError(
            "SW_MICROBATCHES", f"num_microbatches requires 1 or more, got {num_microbatches}"
        )
    step = _Step.of(local)
    if not step.trains:
        if partial is not None:
            raise _parts_stay("it has no gradients")
        return step.whole(num_microbatches, [])
    try:
        return _Builder(
            step, num_microbatches, reshard_after_forward, reduce_last, wide, partial
        ).build()
    except CutRefusedError as refused:
        if partial is not None and num_microbatches == 1:
            raise _parts_stay(refused.reason, refused.loc) from refused
        return _uncut(step, num_microbatches, refused)


@dataclass(slots=True)
class _Step:
    """The local step with coordinates as inputs, its slots and its buffers so far."""

    view: StepView
    inputs: dict[Value, str]
    outputs: tuple[tuple[Slot, Value], ...]
    buffers: dict[str, BufferInfo]
    mesh: Mapping[str, int]

    @property
    def graph(self) -> Graph:
        """The local graph."""
        return self.view.graph

    @classmethod
    def of(cls, local: Localized) -> _Step:
        """Read the slots and label the values of a localized step."""
        source = local.source
        graph, coordinates = hoist_coordinates(local.graph)
        buffers: dict[str, BufferInfo] = {}
        names: dict[Value, str] = {}
        batch: dict[Value, int] = {}
        given = zip(source.inputs, source.graph.inputs, graph.inputs, strict=False)
        for slot, whole, value in given:
            _add(buffers, _leaf(slot, whole, value, source, "given"))
            names[value] = slot.name
            if slot.role == "batch" or (slot.role == "cache" and slot.batch_dim is not None):
                batch[whole] = slot.batch_dim or 0
        for axes, value in zip(coordinates, graph.inputs[len(source.inputs) :], strict=True):
            name = names[value] = coordinate_name(axes)
            # A scalar whose one entry of `axes` names those that it counts along.
            info = per_core(name, "coordinate", value.type, "given")
            _add(buffers, replace(info, axes=(axes,)))
        made = zip(source.outputs, source.graph.outputs, graph.outputs, strict=True)
        for slot, whole, value in made:
            if slot.name not in buffers or slot.role not in STATE_ROLES:
                _add(buffers, _leaf(slot, whole, value, source, "computed"))
        labels = label_values(source.graph, batch)
        view = StepView(
            graph,
            graph.producers(),
            with_reduced(graph, {local.values[v]: label for v, label in labels.items()}),
            depends_on(graph, [local.values[v] for v in batch]),
        )
        outputs = tuple(zip(source.outputs, graph.outputs, strict=True))
        return cls(view, names, outputs, buffers, dict(source.mesh.axes))

    @property
    def trains(self) -> bool:
        """Whether the step changes what is trained; else it has no gradients to be cut at."""
        inputs, rows = self.inputs, self.outputs
        return any(s.role in _TRAINED_ROLES and inputs.get(v) != s.name for s, v in rows)

    def whole(self, num_microbatches: int, findings: Sequence[Diagnostic]) -> StepPlan:
        """The step as one program."""
        changed = [(s.name, v) for s, v in self.outputs if self.inputs.get(v) != s.name]
        part = _Part("step", ancestors(self.graph, [v for _, v in changed]), changed)
        return self.plan([part], ((("step",), num_microbatches),), num_microbatches, findings)

    def plan(
        self,
        parts: Sequence[_Part],
        schedule: Schedule,
        num_microbatches: int,
        findings: Sequence[Diagnostic],
    ) -> StepPlan:
        """The step as programs of these parts."""
        return StepPlan(
            mesh=self.mesh,
            buffers=self.buffers,
            programs=tuple(part.finish(self.inputs) for part in parts),
            schedules=(schedule,),
            num_microbatches=num_microbatches,
            metadata={"findings": tuple(findings)},
        )


def _leaf(
    slot: Slot, whole: Value, value: Value, source: PartitionedGraph, initial: str
) -> BufferInfo:
    """The buffer of an input or output of the step; the global type is the user's."""
    shape = whole.type.shape if slot.shape is None else slot.shape
    return BufferInfo(
        name=slot.name,
        role=slot.role,
        local_type=value.type,
        global_type=tensor_type(shape, whole.type.dtype),
        axes=source.specs[whole].dims,
        initial=initial,
    )


def per_core(name: str, role: str, type: TensorType, initial: str = "computed") -> BufferInfo:
    """A buffer that exists per core only: nobody assembles it."""
    return BufferInfo(
        name=name,
        role=role,
        local_type=type,
        global_type=type,
        axes=((),) * type.rank,
        initial=initial,
    )


def _add(buffers: dict[str, BufferInfo], info: BufferInfo) -> None:
    """Add a buffer. Raises ShardingError when the name is taken."""
    if info.name in buffers:
        raise ShardingError(
            "SW_STAGES_NAME",
            f"buffers of a step require distinct names, got {info.name} twice",
            hint="rename the leaf of the state, batch or metrics",
        )
    buffers[info.name] = info


def _wide(type: TensorType) -> TensorType:
    """The type of the accumulator of a value."""
    return type if type.dtype is DType.F64 else tensor_type(type.shape, DType.F32)


@dataclass(slots=True)
class _Part:
    """One program while it is built: ops in order, and (buffer, value) per output.

    `after` are ops to insert right behind the one that makes a value, `before` ops to insert right
    before their first reader: neither lets values wait in memory.
    """

    name: str
    ops: list[Op] = field(default_factory=list)
    outputs: list[tuple[str, Value]] = field(default_factory=list)
    extra_inputs: dict[Value, str] = field(default_factory=dict)
    after: dict[Value, list[Op]] = field(default_factory=dict)
    before: list[Op] = field(default_factory=list)

    def finish(self, inputs: Mapping[Value, str]) -> StepProgram:
        """The program, reading what it uses of `inputs` and its own extra inputs."""
        names = {**inputs, **self.extra_inputs}
        code = [*self.before]
        for op in self.ops:
            code += [op, *(after for v in op.results for after in self.after.get(v, ()))]
        ops = place_late(code, set(self.before))
        used = {v for op in ops for v in op.operands} | {v for _, v in self.outputs}
        read = [v for v in names if v in used]
        graph = subgraph(read, ops, (v for _, v in self.outputs), self.name)
        return StepProgram(
            name=self.name,
            graph=graph,
            inputs=tuple(names[v] for v in read),
            outputs=tuple(name for name, _ in self.outputs),
        )


@dataclass(slots=True)
class _Builder:
    """Cuts one step. The three programs share the ops and values of the step's graph."""

    step: _Step
    num_microbatches: int
    reshard_after_forward: bool
    reduce_last: bool
    wide: bool
    partial: frozenset[Value] | None
    forward: _Part = field(default_factory=lambda: _Part("forward"))
    backward: _Part = field(default_factory=lambda: _Part("backward"))
    update: _Part = field(default_factory=lambda: _Part("update"))
    findings: list[Diagnostic] = field(default_factory=list)

    @property
    def accumulates(self) -> bool:
        """True when gradients are added up over micro-batches, or are parts of sums."""
        return self.num_microbatches > 1 or self.partial is not None

    @property
    def addends(self) -> float:
        """How many sums over samples an accumulator has at the end of a step."""
        parts = 1 if self.partial is None else TRACED_SAMPLES
        return self.num_microbatches / parts

    def build(self) -> StepPlan:
        """The plan. Raises CutRefusedError when the dataflow does not allow the cut."""
        graph, view = self.step.graph, self.step.view
        state = [(s, v) for s, v in self.step.outputs if s.role in STATE_ROLES]
        cut = find_cut(view, [v for _, v in state], self.accumulates, self.reduce_last)
        early, late = self._place_metrics(cut)
        if self.partial is not None:
            ends = [*cut, *(value for _, value in early)]
            check_partial(view, self.partial, ancestors(graph, ends))
        forward_ops = ancestors(graph, [v for _, v in early])
        computed = {v for op in forward_ops for v in op.results}
        missing = [v for v in cut if v not in computed]
        ops, residuals = choose_residuals(
            graph, set(forward_ops), missing, view.on_batch, self.reshard_after_forward
        )
        self.forward.ops, self.backward.ops = forward_ops, ops
        self._store_residuals(residuals)
        self._hand_over_cut(cut, computed, state)
        self._hand_over_metrics(early)
        self._finish_update([*late, *state], cut)
        return self._plan()

    def _place_metrics(
        self, cut: Sequence[Value]
    ) -> tuple[list[tuple[Slot, Value]], list[tuple[Slot, Value]]]:
        """Metrics computed per micro-batch, and those that follow from the cut or from no batch at
        all.
        """
        metrics = [(s, v) for s, v in self.step.outputs if s.role not in STATE_ROLES]
        ends = set(cut)
        late = [(s, v) for s, v in metrics if _follows_from(self.step.view, v, ends)]
        early = [pair for pair in metrics if pair not in late]
        for slot, value in early if self.accumulates else ():
            self._check_metric(slot, value)
        return early, late

    def _check_metric(self, slot: Slot, value: Value) -> None:
        """With several micro-batches a metric must be something that can be averaged."""
        op = self.step.view.producers.get(value)
        label = self.step.view.labels.get(value)
        if op is None or label is None or label.kind is Kind.SAMPLE:
            reason = f"output {slot.name} of {value.type} holds single samples"
            raise CutRefusedError(reason, *([op.loc] if op else []))
        if label.kind is Kind.MIXED:
            self.findings.append(
                Diagnostic(
                    "SW_STAGES_MEAN",
                    f"metric {slot.name} is not a sum over samples: the step reports the mean over "
                    f"{self.num_microbatches} micro-batches",
                    op.loc,
                    severity="note",
                )
            )

    def _store_residuals(self, residuals: Sequence[Value]) -> None:
        """Name what crosses from forward to backward: of a micro-batch, or of weights that stay
        gathered.
        """
        graph = self.step.graph
        gathers = [op.result for op in graph.walk() if isinstance(op.attrs, AllGatherAttrs)]
        gathered = depends_on(graph, gathers) - self.step.view.on_batch
        for i, value in enumerate(residuals):
            name = f"residual/{i}"
            role = "gathered" if value in gathered else "residual"
            _add(self.step.buffers, per_core(name, role, value.type))
            self.forward.outputs.append((name, value))
            self.backward.extra_inputs[value] = name

    def _hand_over_cut(
        self, cut: Sequence[Value], computed: set[Value], state: Sequence[tuple[Slot, Value]]
    ) -> None:
        """Pass the gradients to `update`, through accumulators when there are several micro-
        batches.
        """
        names = _gradient_names(self.step, cut, state)
        for value in cut:
            part = self.forward if value in computed else self.backward
            self._hand_over(part, names[value], "gradient", value, value)

    def _hand_over_metrics(self, metrics: Sequence[tuple[Slot, Value]]) -> None:
        """Report metrics as they are, or their mean over the micro-batches."""
        for slot, value in metrics:
            if not self.accumulates:
                self.forward.outputs.append((slot.name, value))
                continue
            mean = Value(value.type)
            self._hand_over(self.forward, f"accumulator/{slot.name}", "metric", value, mean)
            self.update.outputs.append((slot.name, mean))

    def _hand_over(self, part: _Part, name: str, role: str, value: Value, mean: Value) -> None:
        """Tie `value` of `part` to `mean` of `update`."""
        if not self.accumulates:
            _add(self.step.buffers, self._gradient_buffer(name, role, value.type, "computed"))
            part.outputs.append((name, value))
            self.update.extra_inputs[mean] = name
            return
        wide = _wide(value.type) if self.wide or role == "metric" else value.type
        _add(self.step.buffers, self._gradient_buffer(name, role, wide, "zeros"))
        _accumulate(part, name, value, wide)
        _take_mean(self.update, name, mean, wide, self.addends)

    def _gradient_buffer(self, name: str, role: str, type: TensorType, initial: str) -> BufferInfo:
        """The buffer of a gradient, laid out like its parameter when it has one."""
        like = self.step.buffers.get(name.removeprefix("gradient/"))
        if like is None or like.local_type.shape != type.shape:
            return per_core(name, role, type, initial)
        whole = tensor_type(like.global_type.shape, type.dtype)
        return replace(
            like, name=name, role=role, local_type=type, global_type=whole, initial=initial
        )

    def _finish_update(self, outputs: Sequence[tuple[Slot, Value]], cut: Sequence[Value]) -> None:
        """Everything after the cut; state that does not change needs no code."""
        inputs = self.step.inputs
        changed = [(s.name, v) for s, v in outputs if inputs.get(v) != s.name]
        self.update.ops += ancestors(self.step.graph, [v for _, v in changed], stop=set(cut))
        self.update.outputs += changed

    def _plan(self) -> StepPlan:
        """Programs, buffers that some program uses, and the schedule."""
        parts = [p for p in (self.forward, self.backward, self.update) if p.outputs]
        repeated = tuple(p.name for p in parts if p is not self.update)
        last = tuple(p.name for p in parts if p is self.update)
        if self.num_microbatches == 1:
            schedule: Schedule = ((repeated + last, 1),)
        else:
            schedule = ((repeated, self.num_microbatches), (last, 1))
        return self.step.plan(parts, schedule, self.num_microbatches, self.findings)


def _follows_from(view: StepView, value: Value, cut: set[Value]) -> bool:
    """True when `value` depends on the batch only through `cut`."""
    walked = upstream(view, [value], cut.__contains__)
    return not any(view.is_per_sample(at) for at in walked if at not in cut)


def _gradient_names(
    step: _Step, cut: Sequence[Value], state: Sequence[tuple[Slot, Value]]
) -> dict[Value, str]:
    """`gradient/<parameter>` where one parameter's update reads the value elementwise, else a
    number.
    """
    owners: dict[Value, list[str]] = {}
    for slot, value in state:
        if slot.role == "parameter":
            match _elementwise_sources(step.view, value, set(cut)):
                case [source]:
                    owners.setdefault(source, []).append(slot.name)
    alone = {value: names[0] for value, names in owners.items() if len(names) == 1}
    return {v: f"gradient/{alone.get(v, number)}" for number, v in enumerate(cut)}


def _elementwise_sources(view: StepView, value: Value, cut: set[Value]) -> list[Value]:
    """The values of `cut` that `value` is computed from, element by element."""
    shape = value.type.shape
    seen, todo, found = set[Value](), [value], []
    while todo:
        at = todo.pop()
        if at in cut:
            found.append(at)
            continue
        op = view.producers.get(at)
        if op is not None and OPS[op.name].elementwise:
            fresh = {v for v in op.operands if v.type.shape == shape} - seen
            seen |= fresh
            todo.extend(fresh)
    return found


def _accumulate(part: _Part, name: str, value: Value, wide: TensorType) -> None:
    """`accumulator += value` in the accumulator's type, right where `value` is made."""
    before = Value(wide)
    part.extra_inputs[before] = name
    b = Builder()
    total = b.add(before, b.in_type(value, wide.dtype))
    part.after.setdefault(value, []).extend(b.ops)
    part.outputs.append((name, total))


def _take_mean(part: _Part, name: str, mean: Value, wide: TensorType, count: float) -> None:
    """`mean = accumulator / count` in the value's type, and zeros back into the accumulator."""
    total = Value(wide)
    part.extra_inputs[total] = name
    b = Builder()
    share = b.full(wide.shape, 1.0 / count, wide.dtype)
    if mean.type.dtype is wide.dtype:
        b.append(Op("multiply", (total, share), (mean,)))
    else:
        scaled = b.multiply(total, share)
        b.append(Op("convert", (scaled,), (mean,), ConvertAttrs(mean.type.dtype)))
    zeros = b.full(wide.shape, 0.0, wide.dtype)
    part.before += b.ops
    part.outputs.append((name, zeros))


_ONE_SAMPLE = "; with one sample in all, tracing loses its dim: use strategy.micro_batch = 2"


def _is_one_sample(info: BufferInfo) -> bool:
    """True for a batch of one sample over all data ranks."""
    return info.role == "batch" and info.global_type.shape[:1] == (1,)


def _parts_stay(reason: str, loc: Loc | None = None) -> ShardingError:
    """One program has no accumulators, which make sums of what a phantom replica left as parts."""
    return ShardingError(
        MIXED_SAMPLES,
        f"a phantom replica requires a step that can be cut at its gradients: {reason}",
        loc,
        "use strategy.micro_batch = 2",
    )


def _uncut(step: _Step, num_microbatches: int, refused: CutRefusedError) -> StepPlan:
    """The whole step as one program, which is only right for one micro-batch."""
    if num_microbatches > 1:
        raise ShardingError(
            "SW_STAGES_CUT",
            f"num_microbatches={num_microbatches} requires a step that can be cut at its "
            f"gradients: {refused.reason}",
            refused.loc,
            "use one micro-batch, or reduce over the samples before the optimizer reads the value"
            + _ONE_SAMPLE * any(_is_one_sample(info) for info in step.buffers.values()),
        )
    finding = Diagnostic(
        "SW_STAGES_CUT",
        f"the step runs as one program: {refused.reason}",
        refused.loc,
        severity="warning",
    )
    return step.whole(1, [finding])
