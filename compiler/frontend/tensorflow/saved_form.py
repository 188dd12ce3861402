"""A SavedModel whose compiled parts are operators that hold their NEFF files; all others are what
they were.

A part is a `PyFunc`, TensorFlow's operator for a function of the process that runs it, which is
found by a name (`TOKEN`): importing `shardwright.tensorflow` gives that process the function. Its
first operands are constants: the NEFF, and what it is called as (`NeffOp`). An operator of the part
whose tensors others read is replaced by one of its name that hands on the part's results, with
their shapes, so that the others stay byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import LoadError, UsageError
from shardwright.compiler.frontend.tensorflow.splitting import Opened, Part, Split
from shardwright.compiler.frontend.user_code import called

TOKEN = "shardwright.neff"
FILE, ABOUT = "saved_model.pb", "assets.extra/shardwright.json"
_EXECUTABLE, _ABOUT = "/executable", "/about"
_MOST_BYTES = 2**31 - 1
_RUNS: dict[str, Any] = {}
"""What was registered: TensorFlow only has weak references."""
_RESULTS = "neff_results"


@dataclass(frozen=True, slots=True)
class NeffOp:
    """An operator with a NEFF: the machine, and the types of its results by NumPy's names."""

    executable: bytes
    name: str
    target: str
    types: tuple[str, ...]

    @property
    def about(self) -> bytes:
        """All but the NEFF, as the second operand has it."""
        plain = {"name": self.name, "target": self.target, "types": list(self.types)}
        return json.dumps(plain, sort_keys=True).encode()

    @classmethod
    def of(cls, executable: bytes, about: bytes) -> NeffOp:
        """That of two operands. Raises LoadError for others."""
        try:
            found = json.loads(about)
            types = tuple(map(str, found["types"]))
            return cls(executable, str(found["name"]), str(found["target"]), types)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(Path(FILE), error) from error


def saved_bytes(opened: Opened, split: Split, neffs: Sequence[bytes], target: str) -> bytes:
    """The file of a SavedModel with one signature, whose parts have these NEFF files. Raises
    UsageError for one that is larger than a message may be."""
    import tensorflow as tf
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel(saved_model_schema_version=1)
    meta = saved.meta_graphs.add()
    meta.meta_info_def.tags.append("serve")
    meta.meta_info_def.tensorflow_version = tf.__version__
    meta.graph_def.CopyFrom(_graph(opened, split, neffs, target))
    signature = meta.signature_def[opened.name]
    signature.method_name = "tensorflow/serving/predict"
    for rows, names in ((signature.inputs, opened.inputs), (signature.outputs, opened.outputs)):
        for key, name in names.items():
            tensor = opened.graph.get_tensor_by_name(name)
            rows[key].name = name
            rows[key].dtype = tensor.dtype.as_datatype_enum
            rows[key].tensor_shape.CopyFrom(tensor.shape.as_proto())
    if saved.ByteSize() > _MOST_BYTES:
        raise UsageError(
            "SW_SAVED_SIZE",
            f"a SavedModel requires at most {_MOST_BYTES} bytes, got {saved.ByteSize()}",
            hint="divide the model, or save it as ONNX with --beside",
        )
    data: bytes = saved.SerializeToString(deterministic=True)
    return data


def _graph(opened: Opened, split: Split, neffs: Sequence[bytes], target: str) -> Any:
    """The graph of a model in parts."""
    import tensorflow as tf

    message = opened.message
    nodes = {node.name: node for node in message.node}
    made = tf.compat.v1.GraphDef(versions=message.versions, library=message.library)
    hosts = [part for part in split.parts if not part.is_compiled]
    read = {name for part in hosts for name in part.constants}
    read |= {name.partition(":")[0] for name in opened.outputs.values()}
    given = {name.partition(":")[0] for name in opened.inputs.values()}
    made.node.extend(
        node
        for node in message.node
        if node.name in given or (node.op == "Const" and node.name in read)
    )
    inputs = (each for part in hosts for name in part.nodes for each in nodes[name].input)
    waited = {name[1:] for name in inputs if name.startswith("^")}
    number = 0
    for part in split.parts:
        if part.is_compiled:
            types = tuple(opened.tensor(name).dtype.name for name in part.outputs)
            held = NeffOp(neffs[number], f"neff_{number}", target, types)
            _add_part(made, opened, part, held)
            for name in part.nodes:  # what others wait for, though it makes nothing
                if name in waited and not opened.live[name].outputs:
                    made.node.add(name=name, op="NoOp", input=[f"^{held.name}"])
            number += 1
        else:
            made.node.extend(nodes[name] for name in part.nodes)
    return made


def _add_part(made: Any, opened: Opened, part: Part, op: NeffOp) -> None:
    """The operators of a compiled part."""
    import tensorflow as tf

    name = op.name
    for suffix, value in ((_EXECUTABLE, op.executable), (_ABOUT, op.about)):
        held = made.node.add(name=name + suffix, op="Const")
        held.attr["dtype"].type = tf.string.as_datatype_enum
        held.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.string, shape=()))
    node = made.node.add(name=name, op="PyFunc")
    node.input.extend([name + _EXECUTABLE, name + _ABOUT, *part.inputs])
    tensors = [opened.graph.get_tensor_by_name(each) for each in part.outputs]
    given = [opened.graph.get_tensor_by_name(each) for each in part.inputs]
    node.attr["token"].s = TOKEN.encode()
    node.attr["Tin"].list.type.extend(
        [*[tf.string.as_datatype_enum] * 2, *(each.dtype.as_datatype_enum for each in given)]
    )
    node.attr["Tout"].list.type.extend(each.dtype.as_datatype_enum for each in tensors)
    places: dict[str, list[tuple[int, Any]]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.op.name, []).append((place, tensor))
    for owner, rows in places.items():
        _add_results(made, name, owner, rows)


def _add_results(made: Any, part: str, owner: str, rows: Sequence[tuple[int, Any]]) -> None:
    """Results of a part under the name of the operator that made them, with their shapes."""

    def shaped(name: str, place: int, tensor: Any) -> None:
        node = made.node.add(name=name, op="EnsureShape", input=[f"{part}:{place}"])
        node.attr["T"].type = tensor.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())

    if len(rows) == 1:
        shaped(owner, *rows[0])
        return
    names = [f"{owner}/{_RESULTS}_{place}" for place, _ in rows]
    for name, (place, tensor) in zip(names, rows, strict=True):
        shaped(name, place, tensor)
    node = made.node.add(name=owner, op="IdentityN", input=names)
    node.attr["T"].list.type.extend(tensor.dtype.as_datatype_enum for _, tensor in rows)


def register(run: Any) -> None:
    """Give TensorFlow the function that operators with a NEFF call: of (executable, about, *arrays)
    a list of arrays. Raises UsageError where TensorFlow is not installed."""
    with called("importing tensorflow"):
        from tensorflow.python.ops import script_ops
    # private, and the same in all of 2.x: names of functions of the process (script_ops.py)
    script_ops._py_funcs._funcs[TOKEN] = _RUNS.setdefault(TOKEN, run)


def neff_ops(path: Path) -> Iterator[NeffOp]:
    """The operators with a NEFF of a SavedModel. Raises LoadError for a damaged file."""
    with called("importing tensorflow"):
        from tensorflow.core.protobuf import saved_model_pb2
    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString((path / FILE).read_bytes())
    except Exception as error:  # protobuf's own among them
        raise damaged(path, error) from error
    for meta in saved.meta_graphs:
        held = {node.name: node for node in meta.graph_def.node if node.op == "Const"}
        for node in meta.graph_def.node:
            if node.op == "PyFunc" and node.attr["token"].s == TOKEN.encode():
                yield NeffOp.of(*(_text(held[node.name + each]) for each in (_EXECUTABLE, _ABOUT)))


def _text(node: Any) -> bytes:
    """The value of a constant that is a text."""
    values = node.attr["value"].tensor.string_val
    return values[0] if values else b""


def about_of(path: Path) -> Mapping[str, Any] | None:
    """What was noted of a SavedModel's parts; None of another model. Raises LoadError."""
    file = path / ABOUT
    if not file.exists():
        return None
    try:
        found: Mapping[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return found


def damaged(path: Path, error: Exception) -> LoadError:
    """The error of a SavedModel that cannot be read."""
    said = (str(error).strip().splitlines() or [""])[0]
    return LoadError(
        "SW_SAVED_FILE",
        f"{path}: a whole SavedModel is required, got {type(error).__name__}: {said}",
        hint="save the model again: shardwright save",
    )
