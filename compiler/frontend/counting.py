"""Which operators of a model file are supported, counted by type; nothing is compiled.

An operator of XLA is supported when it has an import rule that does not always refuse, one of ONNX
or MXNet when it has a row. For a machine of neuron-cc it has to be in a list of that compiler too.
What a rule or a row makes of attributes and types is not asked: compiling tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwright.compiler.frontend.detect import Asked, read_module
from shardwright.compiler.frontend.graphs.forms import Reading, form_of
from shardwright.compiler.frontend.graphs.graph import every_node
from shardwright.compiler.frontend.rules import RULES
from shardwright.compiler.frontend.rules.registry import REFUSALS
from shardwright.compiler.machine.target import NEURON_CC
from shardwright.compiler.serial.placement import OperatorRow
from shardwright.compiler.surface.framework_operators import LISTED
from shardwright.compiler.surface.operators import neuron_cc_reason

Judge = Callable[[str], str]
"""Operator -> why it is not supported, as the end of a sentence; empty for one that is."""
_STABLE, _HIGHER = "stablehlo.", "chlo."
_STRUCTURE = ("stablehlo.return",)
NO_RULE, NO_ROW, NO_LIST = "has no import rule", "has no row", "is in no list of neuron-cc"


@dataclass(frozen=True, slots=True)
class Counted:
    """The form of a file, and its operators by type: those that are not supported first."""

    form: str
    rows: tuple[OperatorRow, ...]

    @property
    def total(self) -> int:
        """Operators of the file."""
        return sum(row.instances for row in self.rows)

    @property
    def supported(self) -> int:
        """Those among them that are supported."""
        return sum(row.on_cores for row in self.rows)


def counted(data: bytes, file: str, compiler: str) -> Counted:
    """The operators of a model file, its content and path, for a compiler by name.

    Raises: ImportRuleError for a file that is not read, as `read_module`.
    """
    form = form_of(data)
    if form is None:
        module = read_module(data, Asked(file=file))
        names = list(_of_module(module.stablehlo))
        return Counted(module.form, _rows(names, _judge_of_xla(compiler)))
    model = form.read(data, file)
    nodes = [node.operator for node in every_node(model)]
    own = {name for _, name in model.functions}
    return Counted(form.form.name.lower(), _rows(nodes, _judge_of(form, own, compiler)))


def _of_module(source: bytes | str) -> Iterator[str]:
    """Names of a module's operators, without what only structures it."""
    from shardwright.compiler.frontend.context import make_context, parse_module
    from shardwright.compiler.frontend.mlir import all_ops

    with make_context():
        for op in all_ops(parse_module(source)):
            if op.name.startswith((_STABLE, _HIGHER)) and op.name not in _STRUCTURE:
                yield str(op.name)


def _judge_of_xla(compiler: str) -> Judge:
    def judge(name: str) -> str:
        is_made = name.startswith(_HIGHER)  # of operators of StableHLO, where no rule has it
        if name in REFUSALS or (name not in RULES and not is_made):
            return NO_RULE
        return neuron_cc_reason(name.partition(".")[2]) if compiler == NEURON_CC else ""

    return judge


def _judge_of(form: Reading, own: set[str], compiler: str) -> Judge:
    held = {row.operator for row in form.operators()}
    listed = LISTED.get(form.form.name.lower(), ())

    def judge(name: str) -> str:
        if name in own:  # a function of the model: its nodes are counted
            return ""
        if name not in held:
            return NO_ROW
        return NO_LIST if compiler == NEURON_CC and name not in listed else ""

    return judge


def _rows(names: list[str], judge: Judge) -> tuple[OperatorRow, ...]:
    rows = []
    for name, count in Counter(names).items():
        why = judge(name)
        shown = name.removeprefix(_STABLE)
        rows.append(OperatorRow(shown, count, 0 if why else count, why))
    return tuple(sorted(rows, key=lambda row: (row.is_supported, -row.instances, row.name)))
