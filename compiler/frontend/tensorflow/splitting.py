"""A signature of a SavedModel in parts: what is compiled, and what stays in TensorFlow.

The signature is frozen (variables become constants) and its shapes are those that are asked for. An
operator is compiled where XLA has code for it, it keeps no state, and shapes and types of all that
it reads and makes are known; a part's HLO is what `tf.function(jit_compile=True)` makes of it. What
is refused later is told to `split` again. Only what is asked for by name loads TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.compiler.diagnostics import LoadError, Loc, UsageError, did_you_mean
from shardwright.compiler.frontend.graphs.graph import Value
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.levels import RefusedError, without_small
from shardwright.compiler.frontend.user_code import called

SIGNATURE, BATCH = "serving_default", "batch"
"""A SavedModel's usual signature, and what an open first dim is called."""
ASKED = "it is to stay on the CPU"
SMALL = "its part has fewer operators than a compiled one"
_XLA = "XLA_CPU_JIT"
_UNCOUNTED = ("Identity", "IdentityN", "NoOp")
_GIVEN = ("Placeholder", "Const")
TYPES = (
    *("float32", "float16", "bfloat16", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_NAMED = re.compile(r"\{\{(?:function_)?node ([^}]+)\}\}")


@dataclass(frozen=True, slots=True)
class Part:
    """Operators that run together, by name. `inputs` and `outputs` are tensors (`name:0`) that
    cross its border, `constants` operators with constants that it reads."""

    nodes: tuple[str, ...]
    is_compiled: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[str, ...]

    @property
    def key(self) -> object:
        """What tells it from other parts of its graph."""
        return self.nodes, self.outputs


@dataclass(frozen=True, slots=True)
class Split:
    """A graph in parts, in an order in which they run; `kept` are operators that stay in
    TensorFlow, and why."""

    parts: tuple[Part, ...]
    kept: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Type and shape of a tensor that crosses the border of a compiled part."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Opened:
    """A frozen signature: its graph as TensorFlow has it and as its message, tensors of arguments
    and results by name."""

    name: str
    graph: Any
    message: Any
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @cached_property
    def live(self) -> dict[str, Any]:
        """Operators that results depend on, but for arguments and constants, in order."""
        wanted = {name.partition(":")[0] for name in self.outputs.values()}
        found = []
        for op in reversed(self.graph.get_operations()):
            if op.name in wanted:
                wanted |= {each.op.name for each in op.inputs}
                wanted |= {each.name for each in op.control_inputs}
                found.append(op)
        return {op.name: op for op in reversed(found) if op.type not in _GIVEN}

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Why operators stay in TensorFlow; "" of those that are compiled."""
        return {name: _reason(op) for name, op in self.live.items()}

    def split(self, refused: Mapping[str, str], least: int) -> Split:
        """Its parts. `refused` are operators that are not to be compiled, and why; compiled parts
        have at least `least` operators."""
        live = self.live
        reasons = {name: refused.get(name) or self.reasons[name] for name in live}
        compiled = {name for name, reason in reasons.items() if not reason}

        def count(name: str) -> int:
            return int(live[name].type not in _UNCOUNTED)

        found = without_small(list(live), lambda n: _before(live[n]), compiled, count, least)
        kept = [(n, reasons[n] or SMALL) for n in live if not found[n][1] and count(n)]
        sides = sorted(set(found.values()))
        groups = [([n for n in live if found[n] == side], side[1]) for side in sides]
        return Split(tuple(self._part(nodes, side) for nodes, side in groups), tuple(kept))

    def _part(self, nodes: Sequence[str], is_compiled: bool) -> Part:
        own = set(nodes)
        read = [each for name in nodes for each in self.live[name].inputs]
        given = dict.fromkeys(each for each in read if each.op.name not in own)
        constants = dict.fromkeys(each.op.name for each in given if each.op.type == "Const")
        inputs = [each.name for each in given if each.op.type != "Const"]
        last = {name: self._last(self.live[name], own) for name in nodes}
        outputs = [f"{name}:{n}" for name in nodes for n in range(last[name] + 1)]
        return Part(tuple(nodes), is_compiled, tuple(inputs), tuple(outputs), tuple(constants))

    def _last(self, op: Any, own: Collection[str]) -> int:
        """The place of the last tensor of an operator that is read outside; -1 where none is.
        Operators that only wait for it read its first."""
        results = set(self.outputs.values())
        places = [-1]
        for place, tensor in enumerate(op.outputs):
            users = (each.name for each in tensor.consumers())
            if tensor.name in results or any(u not in own and u in self.live for u in users):
                places.append(place)
        waiting = (each.name for each in self.live.values() if op in each.control_inputs)
        if op.outputs and any(name not in own for name in waiting):
            places.append(0)
        return max(places)

    def at(self, part: Part, loc: Loc | None) -> list[str]:
        """The operators of a part that a place in its HLO comes from."""
        scope = "" if loc is None else loc.scope
        return [name for name in part.nodes if scope == name or scope.endswith(f"/{name}")]

    def count(self, part: Part) -> list[str]:
        """Kinds of the operators of a part, but for such as only hand on."""
        kinds = (self.live[name].type for name in part.nodes)
        return [kind for kind in kinds if kind not in _UNCOUNTED]

    def tensor(self, name: str) -> Tensor:
        """A tensor of which type and shape are known."""
        found = self.graph.get_tensor_by_name(name)
        return Tensor(np.dtype(found.dtype.as_numpy_dtype), tuple(found.shape.as_list()))

    def size(self, name: str) -> int:
        """Bytes of a tensor, 0 where they are not known."""
        found = self.graph.get_tensor_by_name(name)
        known = found.shape.is_fully_defined() and found.dtype.name in TYPES
        return self.tensor(name).num_bytes if known else 0

    def hlo(self, part: Part) -> bytes:
        """The serialised HLO module of a compiled part. Raises RefusedError for operators that XLA
        does not take."""
        import tensorflow as tf

        message = self._message_of(part)
        specs = [self.graph.get_tensor_by_name(name) for name in part.inputs]

        def part_of_model(*values: Any) -> list[Any]:
            given = {f"{_INPUT}{n}:0": value for n, value in enumerate(values)}
            found: list[Any] = tf.graph_util.import_graph_def(
                message, given, list(part.outputs), name=""
            )
            return found

        types = [tf.TensorSpec(each.shape, each.dtype) for each in specs]
        function = tf.function(part_of_model, jit_compile=True, autograph=False)
        try:
            data: bytes = function.experimental_get_compiler_ir(*types)(stage="hlo_serialized")
        except (tf.errors.OpError, ValueError, TypeError) as error:
            raise RefusedError(_refused(part, str(error))) from error
        return data

    def _message_of(self, part: Part) -> Any:
        """The graph of a part, whose arguments are names of nothing in it."""
        import tensorflow as tf

        nodes = {node.name: node for node in self.message.node}
        made = tf.compat.v1.GraphDef(versions=self.message.versions, library=self.message.library)
        names = {name: f"{_INPUT}{n}:0" for n, name in enumerate(part.inputs)}
        made.node.extend(nodes[name] for name in part.constants)
        for name in part.nodes:
            node = made.node.add()
            node.CopyFrom(nodes[name])
            del node.input[:]
            node.input.extend(names.get(each.name, each.name) for each in self.live[name].inputs)
        return made


_INPUT = "argument_of_part_"


def _refused(part: Part, said: str) -> dict[str, str]:
    """Operators that a message of XLA's names; where it names none, all of the part."""
    short = said.strip().splitlines()[0][:200] if said.strip() else "XLA refuses it"
    found = {name for names in _NAMED.findall(said) for name in (names, names.rpartition(" ")[2])}
    named = [name for name in part.nodes if name in found]
    return dict.fromkeys(named or part.nodes, short)


def _before(op: Any) -> Iterable[str]:
    yield from (each.op.name for each in op.inputs)
    yield from (each.name for each in op.control_inputs)


def _reason(op: Any) -> str:
    """Why an operator stays in TensorFlow."""
    if op.op_def is not None and op.op_def.is_stateful and not _has_no_state(op):
        return "it keeps a state, or has an effect"
    for tensor in (*op.inputs, *op.outputs):
        if tensor.dtype.name not in TYPES:
            return f"{tensor.name} is of type {tensor.dtype.name}"
        if not tensor.shape.is_fully_defined():
            return f"the shape of {tensor.name} is not known before it runs"
    return "" if _has_code(op.type) else f"XLA has no code for {op.type}"


def _has_no_state(op: Any) -> bool:
    """Whether a call or a loop, which may have a state, has none inside."""
    inside = [each for each in op.node_def.attr.values() if each.HasField("func")]
    if not inside or op.type in ("PyFunc", "EagerPyFunc"):
        return False
    return not any(
        node.op in ("PyFunc", "EagerPyFunc") or _is_stateful(node.op)
        for each in inside
        for node in op.graph._get_function(each.func.name).cached_definition.node_def
    )


def _is_stateful(kind: str) -> bool:
    from tensorflow.python.framework import op_def_registry

    found = op_def_registry.get(kind)
    return found is None or bool(found.is_stateful)


def _has_code(kind: str) -> bool:
    from tensorflow.python.framework import kernels

    found = kernels.get_registered_kernels_for_op(kind).kernel
    return kind == "NoOp" or any(each.device_type == _XLA for each in found)


def asked(opened: Opened, names: Collection[str]) -> dict[str, str]:
    """Operators that are named, by their own name or their kind, and why they stay in
    TensorFlow. Raises UsageError for a name of none."""
    live = opened.live
    kinds = {op.type for op in live.values()}
    for name in names:
        if name not in live and name not in kinds:
            raise UsageError(
                "SW_USAGE",
                f"no_fuse_ops requires names or kinds of operators of the model, got {name!r}",
                hint=did_you_mean(name, [*kinds, *live], f"kinds are {', '.join(sorted(kinds))}"),
            )
    return {n: ASKED for n, op in live.items() if n in names or op.type in names}


def load(path: Path) -> Any:
    """A SavedModel, as TensorFlow loads it. Raises UsageError where that is not installed,
    LoadError for a damaged model."""
    with called("importing tensorflow"):
        import tensorflow as tf
    try:
        return tf.saved_model.load(str(path))
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        raise LoadError(
            "SW_SAVED_FILE",
            f"{path}: a SavedModel is required, got {type(error).__name__}: {said}",
            hint="tf.saved_model.save(model, path) writes one",
        ) from error


def open_saved(path: Path, signature: str, sizes: Sizes) -> Opened:
    """A signature of a SavedModel, of inputs of some sizes. Raises UsageError where TensorFlow is
    not installed, for an unknown signature and sizes that do not fit, LoadError for a damaged
    model."""
    loaded = load(path)
    import tensorflow as tf
    from tensorflow.python.framework import convert_to_constants

    signatures = dict(loaded.signatures)
    name = signature or (SIGNATURE if SIGNATURE in signatures else next(iter(signatures), ""))
    if name not in signatures:
        raise UsageError(
            "SW_USAGE",
            f"{path} requires one of its signatures, {', '.join(signatures) or 'none'}, got"
            f" {name or 'none'}",
            hint=did_you_mean(name, signatures, "tf.saved_model.save(model, path, signatures=...)"),
        )
    function = signatures[name]
    _check_state(path, function)
    frozen = convert_to_constants.convert_variables_to_constants_v2(
        function, lower_control_flow=False
    )
    names = _argument_names(function, frozen)
    results = dict(zip(sorted(function.structured_outputs), frozen.outputs, strict=True))
    values = tuple(_value(names[each.name], each) for each in frozen.inputs)
    numbers = tuple(value for value in values if value.dtype is not None)
    shapes = sizes.shapes(numbers)
    message = frozen.graph.as_graph_def()
    for node in message.node:
        node.attr.pop("_output_shapes", None)
        given = names.get(f"{node.name}:0")
        if node.op == "Placeholder" and given in shapes:
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(shapes[given]).as_proto())
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(message, name="")
    return Opened(
        name=name,
        graph=graph,
        message=message,
        inputs={names[each.name]: each.name for each in frozen.inputs},
        outputs={key: tensor.name for key, tensor in results.items()},
    )


def _check_state(path: Path, function: Any) -> None:
    """Refuse tables, and variables that are changed: a file with constants has neither. Raises
    UsageError with all of them."""
    graphs = [function.graph, *(each.graph for each in function.graph._functions.values())]
    changed = [
        f"{op.type} {op.name}"
        for graph in graphs
        for op in graph.get_operations()
        if (op.type.startswith("Assign") and op.type.endswith("VariableOp"))
        or op.type.startswith(("LookupTable", "HashTable", "MutableHashTable"))
    ]
    if changed:
        raise UsageError(
            "SW_SAVED_STATE",
            f"{path.name} requires a signature without tables and variables that change, got"
            f" {', '.join(dict.fromkeys(changed))}",
            hint="keep them in front of what is saved: a signature of numbers alone",
        )


def _argument_names(function: Any, frozen: Any) -> dict[str, str]:
    """Tensor of an argument -> the name that callers have for it."""
    given = function.structured_input_signature[1]
    by_tensor = {spec.name: key for key, spec in given.items()}
    return {each.name: by_tensor.get(each.op.name, each.op.name) for each in frozen.inputs}


def _value(name: str, tensor: Any) -> Value:
    """An argument, whose open dims have names."""
    if tensor.dtype.name not in TYPES:
        return Value(name, None, None)
    dtype = np.dtype(tensor.dtype.as_numpy_dtype)
    if tensor.shape.rank is None:
        return Value(name, dtype, None)
    sizes = tensor.shape.as_list()
    open_dims = [BATCH, *[""] * len(sizes)]
    dims = (o if size is None else size for size, o in zip(sizes, open_dims, strict=False))
    return Value(name, dtype, tuple(dims))
