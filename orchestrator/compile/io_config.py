"""`--io-config` of neuron-cc: which inputs a model has, of which shapes and types, and which of its
outputs are wanted.

    {"inputs": {"input": [[1, 224, 224, 3], "float32"]}, "outputs": ["probabilities"]}

The text itself, a file of it, or a `file://` address. Model files say their shapes themselves here,
so that inputs are compared and outputs are chosen. Source: command reference of neuron-cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.dtypes import DType
from shardwright.compiler.ir.types import Graph, TensorType
from shardwright.compiler.support.documents import parse_json, read_text
from shardwright.compiler.support.schema import COUNT, TEXT, Entries, Table, row, several

_FLAG = "--io-config"
_FORM = Table(
    {"inputs": Entries(row(several(COUNT), TEXT)), "outputs": several(TEXT, least=1)},
)
_SHOWN = '{"inputs": {"arg0": [[1, 3], "float32"]}, "outputs": ["out0"]}'
_TYPES = {"bool": DType.PRED, "float16": DType.F16, "float32": DType.F32, "bfloat16": DType.BF16}
_TYPES |= {"int32": DType.I32, "uint32": DType.U32}


def chosen_outputs(
    graph: Graph, inputs: Sequence[str], outputs: Sequence[str], text: str
) -> list[str]:
    """The outputs of a model that `text` names, in its order; all of them where it is empty.
    `inputs` and `outputs` are the names that the graph's have.

    Raises UsageError (SW_IO_CONFIG) for what is no such text, and for inputs and outputs that the
    model does not have so.
    """
    if not text:
        return list(outputs)
    asked = _parsed(text)
    types = {name: value.type for name, value in zip(inputs, graph.inputs, strict=True)}
    if missing := [name for name in types if name not in asked["inputs"]]:
        raise _refused(f"input {missing[0]} of the model", "nothing", f"name all of {list(types)}")
    for name, (shape, dtype) in asked["inputs"].items():
        if name not in types:
            hint = did_you_mean(name, types) or f"inputs are {', '.join(types)}"
            raise _refused(f"inputs among {', '.join(types)}", repr(name), hint)
        if (tuple(shape), _TYPES.get(dtype)) != (types[name].shape, types[name].dtype):
            what = f"{name} as {_shown(types[name])}, as in the model"
            given = f"{dtype}{list(shape)}"
            raise _refused(what, given, "export the model again with the shapes that are wanted")
    for name in asked["outputs"]:
        if name not in outputs:
            hint = did_you_mean(name, outputs) or f"outputs are {', '.join(outputs)}"
            raise _refused(f"outputs among {', '.join(outputs)}", repr(name), hint)
    return [str(name) for name in asked["outputs"]]


def _shown(kind: TensorType) -> str:
    return f"{kind.dtype.numpy}{list(kind.shape)}"


def _parsed(text: str) -> Mapping[str, Any]:
    where = _FLAG
    if not text.lstrip().startswith("{"):
        where, text = text, _of_file(text)
    try:
        found = parse_json(text)
        _FORM.require(found, where)
    except ValueError as error:
        message = f"{_FLAG} requires JSON like {_SHOWN}: {error}"
        raise UsageError("SW_IO_CONFIG", message, None, "write inputs and outputs so") from error
    return dict(found)


def _of_file(text: str) -> str:
    address = urlparse(text)
    if address.scheme not in ("", "file"):
        raise _refused("a file, a file:// address or JSON", repr(text), "copy the file here first")
    path = Path(unquote(address.path) if address.scheme else text)
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UsageError("SW_IO_CONFIG", f"{_FLAG}: cannot read {path}: {error}") from error


def _refused(required: str, given: str, hint: str) -> UsageError:
    return UsageError("SW_IO_CONFIG", f"{_FLAG} requires {required}, got {given}", None, hint)
