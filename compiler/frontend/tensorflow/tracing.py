"""From a function to a traced program. Runs in the child, where alone TensorFlow is loaded.

The function is traced once for what it reads and assigns, and once more with the new values of what
it assigns as results, and with tensors that it captures written into it: XLA has to know those that
are shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.graphs.graph import Value
from shardwright.compiler.frontend.graphs.sizes import Sizes
from shardwright.compiler.frontend.tensorflow.asking import Asked
from shardwright.compiler.frontend.tensorflow.losses import loss_of
from shardwright.compiler.frontend.tensorflow.models import SAMPLES, Found
from shardwright.compiler.frontend.tensorflow.places import Place, with_places
from shardwright.compiler.frontend.tensorflow.program import (
    GRADIENT,
    INPUT,
    LOSS,
    RESULT,
    UPDATE,
    VARIABLE,
    Port,
    Program,
)
from shardwright.compiler.frontend.tensorflow.raised import calling, of_xla

_LIBRARIES = ("site-packages", "dist-packages")
_OURS = Path(__file__).resolve().parents[2]
_OF_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
_BODIES = ("f", "body", "cond", "then_branch", "else_branch")
"""Attributes of operators that hold functions."""
TARGET = "target"


def traced(asked: Asked, found: Found) -> Program:
    """The program of a function. Raises UsageError, ImportRuleError."""
    inputs = _inputs(found, asked)
    specs = [tf.TensorSpec(v.shape, v.dtype, name=None) for v in inputs]
    with calling(f"{found.name}"):
        if found.prepare is not None:
            found.prepare(*specs)
    names = _variable_names(found.named)
    if asked.loss and not found.trains:
        function, inputs, kinds, classes = _with_loss(found, inputs, asked.loss, names)
    else:
        function, kinds, classes = found.function, {}, 0
    specs = [tf.TensorSpec(v.shape, v.dtype, name=f"arg{n}") for n, v in enumerate(inputs)]
    with calling(found.name):
        concrete = tf.function(function, autograph=False, jit_compile=True).get_concrete_function(
            *specs
        )
    whole = _Whole(concrete, names)
    hlo, places = whole.hlo(specs)
    values = {p.name: v for p, v in whole.values()} if asked.values else {}
    example = dict(zip((v.name for v in found.inputs), found.example, strict=False))
    return Program(
        name=_symbol(found.name),
        hlo=with_places(hlo, _from(asked.base, places)),
        arguments=(*(_port(v, classes) for v in inputs), *whole.ports),
        results=whole.results(kinds),
        samples=_samples(found, inputs),
        values=values,
        example=example if asked.values else {},
    )


def _port(value: Any, classes: int) -> Port:
    """An input; a target is of so many classes."""
    most = classes if value.name == TARGET else 0
    return Port(INPUT, value.name, value.shape, str(value.dtype), classes=most)


def _symbol(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name) or "model"


def _samples(found: Found, inputs: Sequence[Any]) -> int:
    """How many samples the inputs that were traced have."""
    own = found.samples or SAMPLES
    pairs = list(zip(found.inputs, inputs, strict=False))
    opened = [traced for v, traced in pairs if v.shape is None or v.shape[:1] == (own,)]
    sizes = {v.shape[0] for v in opened or inputs if v.shape}
    return int(sizes.pop()) if len(sizes) == 1 else 0


def _inputs(found: Found, asked: Asked) -> list[Any]:
    """The inputs with their sizes. Raises as `Sizes.shapes`."""
    opened = list(found.inputs)
    if found.samples and asked.samples:
        opened = [
            Value(v.name, v.dtype, (asked.samples, *v.shape[1:]))
            if v.shape and v.shape[0] == found.samples
            else v
            for v in opened
        ]
    sizes = Sizes.of(asked.sizes)
    if asked.samples:
        is_open = any(v.shape is not None and SAMPLES in v.shape for v in opened)
        sizes = sizes.but(**{SAMPLES: asked.samples}) if is_open else sizes
    shapes = sizes.shapes(opened)
    return [Value(v.name, v.dtype, shapes[v.name]) for v in opened]


def _variable_names(named: Iterable[Any]) -> dict[int, tuple[str, bool, Any]]:
    """Variable -> its name and whether it is trained, by the identity of its handle."""
    found: dict[int, tuple[str, bool, Any]] = {}
    for variable in named:
        own = getattr(variable, "value", variable)  # Keras wraps those of TensorFlow
        own = variable if not hasattr(own, "handle") else own
        name = getattr(variable, "path", None) or own.name.partition(":")[0]
        found[id(own.handle)] = (name, bool(own.trainable), own)
    return found


def _with_loss(
    found: Found, inputs: list[Any], loss: str, names: dict[int, tuple[str, bool, Any]]
) -> tuple[Callable[..., Any], list[Any], dict[int, tuple[str, str]], int]:
    """The function that gives a loss by name and its gradients, its inputs, what its first results
    are, and of how many classes its target is."""
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in inputs]
    with calling(found.name):
        forward = tf.function(
            found.function, autograph=False, jit_compile=True
        ).get_concrete_function(*specs)
    read = {id(handle) for handle in forward.captured_inputs}
    read |= {id(v.handle) for v in forward.variables}
    own = {id(v.handle): (v.name.partition(":")[0], v.trainable, v) for v in forward.variables}
    known = {**own, **names}
    trained = [(n, v) for key, (n, t, v) in known.items() if t and key in read]
    chosen = loss_of(loss, forward.structured_outputs, found.name)
    given = [*inputs]
    if chosen.target is not None:
        given.append(Value(TARGET, np.dtype(chosen.target[1]), chosen.target[0]))

    def step(*values: Any) -> Any:
        variables = [v for _, v in trained]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in variables:
                tape.watch(variable)
            results = found.function(*values[: len(inputs)])
            number = chosen.function(results, values[len(inputs) :])
        gradients = tape.gradient(
            number, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return [number, *map(tf.convert_to_tensor, gradients)]

    kinds = {0: (LOSS, "loss")}
    kinds |= {n + 1: (GRADIENT, name) for n, (name, _) in enumerate(trained)}
    return step, given, kinds, chosen.classes


class _Whole:
    """A concrete function with the new values of the variables that it assigns."""

    def __init__(self, concrete: Any, names: dict[int, tuple[str, bool, Any]]) -> None:
        self._concrete = concrete
        known = {
            id(v.handle): (v.name.partition(":")[0], bool(v.trainable), v)
            for v in concrete.variables
        }
        known.update(names)
        graph = concrete.graph
        read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
        first = len(graph.inputs) - len(concrete.captured_inputs)
        self._handles, self.ports, self._assigned = [], list[Port](), list[int]()
        used: dict[str, int] = {}
        for n, handle in enumerate(concrete.captured_inputs):
            if handle.dtype != tf.resource:
                continue
            name, is_trained, _ = known.get(id(handle), (f"variable{n}", False, None))
            used[name] = used.get(name, 0) + 1
            name = name if used[name] == 1 else f"{name}_{used[name] - 1}"
            dtype, shape = _type_of(handle, graph.inputs[first + n])
            if first + n not in read_only:
                self._assigned.append(len(self.ports))
            self.ports.append(Port(VARIABLE, name, shape, dtype, is_trained))
            self._handles.append(handle)

    def hlo(self, specs: Sequence[Any]) -> tuple[bytes, dict[str, Place]]:
        """HLO of the function, and the places of its operators. Raises ImportRuleError."""
        places = dict(_places(self._concrete.graph))
        self._check_results(places)
        whole = tf.function(self._call, autograph=False, jit_compile=True)
        found = whole.get_concrete_function(*specs)
        captured = [id(handle) for handle in found.captured_inputs]
        assert captured == [id(handle) for handle in self._handles], "its variables, in order"
        try:
            data: bytes = whole.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")
        except Exception as error:
            raise of_xla(error, places) from error
        return data, places

    def _call(self, *values: Any) -> Any:
        concrete, graph = self._concrete, tf.compat.v1.get_default_graph()
        mine = [graph.capture(handle) for handle in self._handles]
        handles = dict(zip(map(id, self._handles), mine, strict=True))
        count = len(concrete.inputs) - len(concrete.captured_inputs)
        given = dict(zip((t.op.name for t in concrete.inputs[:count]), values, strict=True))
        for outer, inner in zip(concrete.captured_inputs, concrete.inputs[count:], strict=True):
            is_handle = outer.dtype == tf.resource
            value = handles[id(outer)] if is_handle else tf.constant(outer.numpy())
            given[inner.op.name] = value
        made = concrete.graph.as_graph_def()
        nodes = [node for node in made.node if node.name not in given]
        used = {name.partition(":")[0] for node in nodes for name in node.input}
        del made.node[:]
        made.node.extend(nodes)
        results = tf.graph_util.import_graph_def(
            made,
            input_map={f"{name}:0": v for name, v in given.items() if name in used},
            return_elements=[t.name for t in concrete.outputs],
            name="",
        )
        new = [
            tf.raw_ops.ReadVariableOp(resource=mine[n], dtype=tf.as_dtype(self.ports[n].dtype))
            for n in self._assigned
        ]
        return [*results, *new]

    def _check_results(self, places: dict[str, Place]) -> None:
        """Refuse results whose shape only a run knows, and those that are no numbers."""
        for result in self._concrete.outputs:
            made = _maker(self._concrete.graph, result)
            if made.type in _OF_PYTHON or result.dtype in (tf.string, tf.resource, tf.variant):
                given = f"XLA_CPU: {made.type} ({{{{node {made.name}}}}}"
                raise of_xla(ValueError(given), places)
            if not result.shape.is_fully_defined():
                error = ValueError(f"dynamic shape {result.shape} of {{{{node {made.name}}}}}")
                raise of_xla(error, places)

    def results(self, kinds: dict[int, tuple[str, str]]) -> tuple[Port, ...]:
        """What the whole function gives."""
        names = _result_names(self._concrete.structured_outputs)
        found = []
        for n, result in enumerate(self._concrete.outputs):
            kind, name = kinds.get(n, (RESULT, names[n]))
            found.append(Port(kind, name, tuple(result.shape), result.dtype.name))
        new = (self.ports[n] for n in self._assigned)
        return (*found, *(Port(UPDATE, p.name, p.shape, p.dtype) for p in new))

    def values(self) -> Iterator[tuple[Port, Any]]:
        """Values of the variables."""
        for port, handle in zip(self.ports, self._handles, strict=True):
            dtype = tf.as_dtype(port.dtype)
            yield port, tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()


def _maker(graph: Any, result: Any) -> Any:
    """The operator that makes a result, also in functions that are called."""
    made = result.op
    while True:
        body = _body(graph, made, _BODIES[0])
        if made.type == "Identity":
            result = made.inputs[0]
        elif body is not None:
            graph, result = body, body.outputs[result.value_index]
        else:
            return made
        made = result.op


def _type_of(handle: Any, placeholder: Any) -> tuple[str, tuple[int, ...]]:
    """Element type and shape of what a handle is of. Raises ImportRuleError for what is no
    variable."""
    data = getattr(handle, "_handle_data", None) or getattr(placeholder.op, "_handle_data", None)
    rows = list(data.shape_and_type) if data is not None and data.is_set else []
    if not rows:
        raise ImportRuleError(
            "SW_TF_OPERATOR",
            "a function requires tensors and variables, got a resource that is neither (a table,"
            " an iterator, a queue)",
            hint="look values up before the function, where the data is read",
        )
    shape = tf.TensorShape(rows[0].shape)
    if not shape.is_fully_defined():
        raise ImportRuleError(
            "NCC_EMOD025", f"every dimension requires a static size, got a variable of {shape}"
        )
    return tf.as_dtype(rows[0].dtype).name, tuple(shape)


def _result_names(structure: Any) -> list[str]:
    """Names of flat results, by their keys; else out0 and so on."""
    return [path or f"out{n}" for n, path in enumerate(_keys(structure))]


def _keys(structure: Any, path: str = "") -> Iterator[str]:
    if isinstance(structure, dict):
        for key in sorted(structure):
            yield from _keys(structure[key], f"{path}/{key}".strip("/"))
    elif isinstance(structure, tuple | list):
        for n, part in enumerate(structure):
            yield from _keys(part, f"{path}/{n}" if path else "")
    elif structure is not None:
        yield path


def _places(graph: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Place]]:
    """The user's line of every operator, also of functions that are called."""
    for operator in graph.get_operations():
        place = _users(operator.traceback)
        if place:
            yield f"{prefix}{operator.name}", place
        for key in _BODIES:
            called = _body(graph, operator, key)
            if called is not None and depth < 16:
                yield from _places(called, f"{prefix}{operator.name}/", depth + 1)


def _from(base: str, places: dict[str, Place]) -> dict[str, Place]:
    """Places with files below a folder named from there."""
    if not base:
        return places
    root = Path(base).resolve()
    return {
        name: (str(Path(file).relative_to(root)) if Path(file).is_relative_to(root) else file, line)
        for name, (file, line) in places.items()
    }


def _body(graph: Any, operator: Any, key: str) -> Any:
    if key not in operator.node_def.attr:
        return None
    function = graph._get_function(operator.node_def.attr[key].func.name)
    return getattr(function, "graph", None)


def _users(trace: Any) -> Place | None:
    """The innermost line of code that is neither a library nor ours."""
    for frame in reversed(list(trace or ())):
        if _is_users(frame.filename):
            return frame.filename, frame.lineno
    return None


@cache
def _is_users(file: str) -> bool:
    """Whether a file is the user's: neither a library's nor one of ours."""
    is_library = file[:1] == "<" or any(part in file for part in _LIBRARIES)
    return not is_library and not Path(file).resolve().is_relative_to(_OURS)
