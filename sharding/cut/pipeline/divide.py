"""A step of forward, backward and update programs divided among the stages of a pipeline.

`op_placement.py` and `update.py` say who runs what; here every part gets its programs, and what one
stage makes and another reads becomes a transfer of a named buffer. The result is a step plan like
any other, with several stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.compiler.diagnostics import Loc, ShardingError
from shardwright.compiler.frontend.roles import STATE_ROLES, WEIGHT_ROLES
from shardwright.compiler.ir.build import subgraph
from shardwright.compiler.ir.cross_stage import is_cross_stage
from shardwright.compiler.ir.types import Op, Value
from shardwright.compiler.neff.schedule import STAGE_AXIS, Schedule, Transfer, flat
from shardwright.compiler.program import BufferInfo, StepPlan, StepProgram
from shardwright.sharding.cut.pipeline.op_placement import (
    Backward,
    Code,
    Forward,
    PlacedProgram,
    place_forward,
)
from shardwright.sharding.cut.pipeline.partial_sums import At, Partial, Stages
from shardwright.sharding.cut.pipeline.schedules import (
    most_in_flight,
    program_name,
    stage_schedules,
)
from shardwright.sharding.cut.pipeline.unstack import Staged
from shardwright.sharding.cut.pipeline.update import Update
from shardwright.sharding.cut.stages import per_core


def divide(step: StepPlan, staged: Staged, num_stages: int, schedule: str) -> StepPlan:
    """The step on `num_stages` stages; part `k` of the model lies on stage `k % num_stages`.

    Raises: ShardingError (SW_PIPELINE_CUT) for a step that is one program, or an op that joins
    stages otherwise than by a sum; UsageError for a schedule the counts do not allow.
    """
    programs = {p.name: p for p in step.programs}
    if programs.keys() != {"forward", "backward", "update"}:
        raise ShardingError(
            "SW_PIPELINE_CUT",
            f"mesh.{STAGE_AXIS} requires a step that is cut into forward, backward and update, got"
            f" {', '.join(programs)}",
            *_why_uncut(step),
        )
    return _Divider(step, programs, staged, num_stages, schedule).build()


def _why_uncut(step: StepPlan) -> tuple[Loc | None, str]:
    """The line that kept the step in one program, and what was said about it."""
    findings = step.metadata["findings"]
    assert isinstance(findings, tuple)
    for found in findings:
        if found.code == "SW_STAGES_CUT":
            return found.loc, f"without stages {found.message}"
    return None, "stages need a training step: gradients, and an optimizer that reads them"


@dataclass(slots=True)
class _Piece:
    """A program of one part while it is built."""

    name: str
    stage: int
    code: Sequence[Code]
    key: int  # the part, or for the update the stage
    outputs: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    free: list[Value] = field(default_factory=list)
    inputs: dict[Value, str] = field(default_factory=dict)

    def settle(self) -> None:
        """Keep the ops that outputs need, and every reduction over stages: all stages take part."""
        needed = set(self.outputs.values())
        kept: list[Op] = []
        made: set[Value] = set()
        for op, stages in reversed(self.code):
            if stages is not None and self.key not in stages:
                continue
            if is_cross_stage(op) or any(v in needed for v in op.results):
                kept.append(op)
                needed.update(op.operands)
                made.update(op.results)
        self.ops = kept[::-1]
        read = dict.fromkeys(v for op in self.ops for v in op.operands)
        self.free = [v for v in (read | dict.fromkeys(self.outputs.values())) if v not in made]

    def program(self) -> StepProgram:
        """The finished program."""
        graph = subgraph(self.inputs, self.ops, self.outputs.values(), self.name)
        return StepProgram(
            name=self.name,
            graph=graph,
            inputs=tuple(self.inputs.values()),
            outputs=tuple(self.outputs),
            stage=self.stage,
        )


class _Divider:
    """Divides one step."""

    def __init__(
        self,
        step: StepPlan,
        programs: Mapping[str, StepProgram],
        staged: Staged,
        num_stages: int,
        schedule: str,
    ) -> None:
        self.step, self.source, self.staged = step, programs, staged
        self.num_stages, self.schedule = num_stages, schedule
        self.parts = range(staged.num_parts)
        self.buffers = dict(step.buffers)
        self.stages = defaultdict[str, set[int]](set)  # that have a buffer
        self.transfers: dict[tuple[str, int], Transfer] = {}
        self.pieces: dict[str, _Piece] = {}
        self.names: dict[Value, str] = {}

    def build(self) -> StepPlan:
        """The plan: programs from the last to the first, since readers decide what is sent."""
        self.forward, self.backward = self._placed()
        self._make_pieces()
        for part in self.parts:
            self._finish(self.pieces[program_name("backward", part)])
        for part in reversed(self.parts):
            self._finish(self.pieces[program_name("forward", part)])
        self._finish_update()
        return self._plan()

    def _inputs(self, kind: str) -> dict[Value, str]:
        """Input values of a whole program and their buffers."""
        return {value: name for name, value in self.source[kind].reads}

    def _outputs(self, kind: str) -> tuple[tuple[str, Value], ...]:
        return self.source[kind].writes

    def _role(self, name: str) -> str:
        return self.buffers[name].role

    def _placed(self) -> tuple[Forward, PlacedProgram]:
        """Who runs what of the forward and of the backward program."""
        inputs = self._inputs("forward")
        weights = [v for v, name in inputs.items() if self._role(name) in WEIGHT_ROLES]
        batch = [v for v, name in inputs.items() if self._role(name) in ("batch", "rng")]
        homes = {v: self.staged.homes[n] for v, n in inputs.items() if n in self.staged.homes}
        forward = place_forward(self.source["forward"].graph, weights, batch, homes)
        sums = frozenset(v for n, v in self._outputs("backward") if self._role(n) == "gradient")
        own = {v for v, n in self._inputs("backward").items() if self._role(n) == "gradient"}
        backward = Backward(self.source["backward"].graph, forward, sums, frozenset(own))
        return forward, backward.run()

    def _make_pieces(self) -> None:
        """Every program with the outputs of the whole one that it computes."""
        for kind, placed in (("forward", self.forward.placed), ("backward", self.backward)):
            for part in self.parts:
                stage = part % self.num_stages
                name = program_name(kind, part)
                self.pieces[name] = _Piece(name, stage, placed.code, part)
            for name, value in self._outputs(kind):
                if not self.buffers[name].is_kept:  # who reads one decides who stores it
                    for part, own in self._makers(placed, name, value):
                        self.pieces[program_name(kind, part)].outputs[name] = own

    def _makers(
        self, placed: PlacedProgram, name: str, value: Value
    ) -> Iterator[tuple[int, Value]]:
        """The parts that make an output, and their term of it."""
        placement = placed.placement(value)
        if isinstance(placement, Partial):
            yield from placement.terms.items()
        elif isinstance(placement, At):
            yield min(placement.stages), placed.now.get(value, value)
        else:
            home = self.staged.homes.get(name.removeprefix("gradient/"), self.parts[-1])
            yield home, value

    def _finish(self, piece: _Piece) -> None:
        """Settle a program and bind what it reads; what another part makes is sent."""
        piece.settle()
        for value in piece.free:
            piece.inputs[value] = self._source(piece, value)
        self._held_by(piece)

    def _held_by(self, piece: _Piece) -> None:
        for name in (*piece.inputs.values(), *piece.outputs):
            self.stages[name].add(piece.stage)

    def _source(self, piece: _Piece, value: Value) -> str:
        """The buffer from which a forward or backward program reads."""
        kind, _, _ = piece.name.partition(".")
        name = self._inputs(kind).get(value)
        if name is not None and not self.buffers[name].is_kept:
            return name
        home = self.backward.home(value) if kind == "backward" else None
        if home is not None:
            return self._sent(value, "backward", home, piece)
        home = self.forward.placed.home(value)
        assert home is not None or kind == "backward"
        # What is nobody's its own part computes in forward.
        return self._sent(value, "forward", piece.key if home is None else home, piece)

    def _sent(self, value: Value, kind: str, home: int, reader: _Piece) -> str:
        """The buffer of a value that part `home` makes, sent to the stage of its reader."""
        writer = self.pieces[program_name(kind, home)]
        name = self._buffer(value)
        writer.outputs[name] = value
        self.stages[name].add(writer.stage)
        if writer.stage != reader.stage:
            known = self.transfers.get((name, reader.stage))
            readers = (reader.name, *([known.reader] if known else ()))
            self._send(name, name, writer, reader.stage, min(readers, key=self._order))
        return name

    def _order(self, name: str) -> tuple[bool, int]:
        """Programs in the order a micro-batch goes through them."""
        kind, part = name.split(".")
        return kind == "backward", -int(part) if kind == "backward" else int(part)

    def _send(
        self, sent: str, received: str, writer: _Piece, target: int, reader: str, once: bool = False
    ) -> None:
        self.transfers[received, target] = Transfer(
            sent=sent,
            received=received,
            source=writer.stage,
            target=target,
            writer=writer.name,
            reader=reader,
            num_bytes=self.buffers[sent].local_type.num_bytes,
            once=once,
        )
        self.stages[received].add(target)

    def _buffer(self, value: Value) -> str:
        """The name of what parts hand each other."""
        if value not in self.names:
            inputs = self._inputs("backward").items()
            given = {v: n for v, n in inputs if self.buffers[n].is_kept}
            name = given.get(value, f"border/{len(self.names)}")
            self.names[value] = name
            if name not in self.buffers:
                self.buffers[name] = per_core(name, "residual", value.type)
        return self.names[value]

    def _finish_update(self) -> None:
        """The update of every stage: who has which state follows from who reads it."""
        inputs = self._inputs("update")
        roles = {v: self._role(name) for v, name in inputs.items()}
        made = {v: frozenset(self.stages[inputs[v]]) for v in inputs if roles[v] == "gradient"}
        state = {
            v: frozenset(self.stages.get(name, ()))
            for v, name in inputs.items()
            if roles[v] in (*STATE_ROLES, "metric")
        }
        wanted = {v: self._owners(inputs[v]) for v in made}
        update = Update(self.source["update"].graph, self.num_stages, state, made, wanted)
        update.run()
        while not self._bind_update(update, inputs):
            pass

    def _owners(self, gradient: str) -> Stages:
        """The stages of the weight a gradient belongs to; empty when it has no one owner."""
        return frozenset(self.stages.get(gradient.removeprefix("gradient/"), ()))

    def _bind_update(self, update: Update, inputs: Mapping[Value, str]) -> bool:
        """Programs of the update; False when an output had to be made known to more stages."""
        terms = {
            own: (inputs[value], stage)
            for value, by_stage in update.terms.items()
            for stage, own in by_stage.items()
        }
        held = defaultdict(set, {name: set(stages) for name, stages in self.stages.items()})
        while True:
            pieces = [self._update_piece(update, s, held) for s in range(self.num_stages)]
            read = [(inputs[v], piece.stage) for piece in pieces for v in piece.free if v in inputs]
            if all(stage in held[name] for name, stage in read):
                break
            for name, stage in read:
                held[name].add(stage)
        if self._spread(update, held):
            return False
        for piece in pieces:
            self.pieces[piece.name] = piece
            for value in piece.free:
                piece.inputs[value] = inputs.get(value) or self._term(piece, *terms[value])
            self._held_by(piece)
        return True

    def _update_piece(self, update: Update, stage: int, held: Mapping[str, set[int]]) -> _Piece:
        """The update of one stage, given who holds which buffer."""
        piece = _Piece(program_name("update", stage), stage, update.placed.code, stage)
        for name, value in self._outputs("update"):
            update.whole(value)
            placement = update.placed.placement(value)
            default = frozenset((self._default(name),))
            at = placement.stages if isinstance(placement, At) else default
            if stage in (held.get(name) or {min(at)}):
                piece.outputs[name] = update.placed.now.get(value, value)
        piece.settle()
        return piece

    def _default(self, name: str) -> int:
        """The stage of a leaf that nothing ties to one."""
        return self.staged.homes.get(name, 0) % self.num_stages

    def _spread(self, update: Update, held: Mapping[str, set[int]]) -> bool:
        """Make known what a stage holds and does not compute."""
        found = False
        for name, value in self._outputs("update"):
            placement = update.placed.placement(value)
            if isinstance(placement, At) and not held.get(name, set()) <= placement.stages:
                update.everywhere(value)
                found = True
        return found

    def _term(self, piece: _Piece, gradient: str, stage: int) -> str:
        """The buffer of one stage's term of a gradient, sent if it is another stage's."""
        if stage == piece.stage:
            return gradient
        received = f"{gradient}@{stage}"
        self.buffers[received] = replace(
            self.buffers[gradient], name=received, role="gradient", initial="computed"
        )
        writers = [p for p in self.pieces.values() if gradient in p.outputs and p.stage == stage]
        last = max((p for p in writers if p.name[0] != "u"), key=lambda p: self._order(p.name))
        self._send(gradient, received, last, piece.stage, piece.name, once=True)
        return received

    def _plan(self) -> StepPlan:
        """Programs, buffers by stage, schedules."""
        pieces = [p for p in self.pieces.values() if p.outputs]
        schedules = stage_schedules(
            self.schedule, self.num_stages, len(self.parts), self.step.num_microbatches
        )
        run = {name: None for schedule in schedules for name in flat(schedule)}
        if idle := [name for name in run if name not in {p.name for p in pieces}]:
            kind, part = idle[0].split(".")
            raise ShardingError(
                "SW_PIPELINE_CUT",
                f"mesh.{STAGE_AXIS} requires work for every part of the model, got none in the"
                f" {kind} pass of part {part}",
                hint="use fewer stages, or train a weight in the first layers: what is frozen and"
                " follows no trained weight has no backward pass",
            )
        mesh = {STAGE_AXIS: self.num_stages, **self.step.mesh}
        return replace(
            self.step,
            mesh=mesh,
            buffers=dict(self._placed_buffers(pieces, schedules)),
            programs=tuple(p.program() for p in pieces),
            schedules=schedules,
            transfers=tuple(self.transfers.values()),
        )

    def _placed_buffers(
        self, pieces: Sequence[_Piece], schedules: Sequence[Schedule]
    ) -> Iterator[tuple[str, BufferInfo]]:
        """Buffers with their stages and as many slots as micro-batches are in flight; gathered
        weights are alike in all of them, so that one slot serves a stage that gathers its own.
        """
        sent = {transfer.sent for transfer in self.transfers.values()}
        for name, info in self.buffers.items():
            stages = self.stages.get(name)
            if stages is None and (
                info.role not in (*STATE_ROLES, "batch") or info.initial == "computed"
            ):
                continue
            stages = stages or {self._default(name)}
            ordered = tuple(sorted(stages))
            slots: tuple[int, ...] = ()
            if info.role == "residual" or (info.is_kept and name in sent):
                users = [p for p in pieces if name in p.inputs.values() or name in p.outputs]
                slots = tuple(self._slots(s, users, schedules[s]) for s in ordered)
            part = self.staged.parts.get(name)
            yield name, replace(info, stages=ordered, slots=slots, part=part)

    def _slots(self, stage: int, users: Iterable[_Piece], schedule: Schedule) -> int:
        """The most micro-batches of a buffer a stage holds at a time."""
        own = sorted((p.name for p in users if p.stage == stage), key=self._order)
        return most_in_flight(schedule, own[0], own[-1])
