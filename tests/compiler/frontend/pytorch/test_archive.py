"""Files of torch.export.save are looked through before torch reads them, which needs no torch."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from typing import Any

import pytest

from shardwright.compiler.diagnostics import ImportRuleError, UsageError
from shardwright.compiler.frontend.detect import read_module
from shardwright.compiler.frontend.pytorch import archive

NODE = {"target": "torch.ops.aten.relu.default", "inputs": [], "outputs": [], "metadata": {}}
GRAPH, CONSTANTS = "model/models/model.json", "model/data/constants/model_constants_config.json"
OLD = "serialized_exported_program.json"


def program(node: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """A document of a graph with one node."""
    return {"graph_module": {"graph": {"nodes": [{**NODE, **(node or {})}], **others}}}


def file_of(entries: dict[str, Any], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as made:
        for name, content in entries.items():
            made.writestr(name, json.dumps(content))
    return stream.getvalue()


@pytest.mark.parametrize("name", [GRAPH, OLD, "loss/models/loss.json"])
def test_programs_are_told_by_their_entries(name: str) -> None:
    data = file_of({name: program(), "model/archive_format": "pt2"})
    assert archive.is_program(data)
    archive.check(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(60), file_of({"arg0.npy": 1, "model.json": {}})],
)
def test_other_files_are_no_programs(data: bytes) -> None:
    assert not archive.is_program(data)
    with pytest.raises(ImportRuleError, match="SW_MODEL_FORM"):
        read_module(data)


CALLS = (
    *("torch.hub.load", "torch.load", "builtins.eval", "os.system", "operator.add", "#ext:x"),
    *("torch.ops.__class__.mro", "torch.ops._dir.x", "_operator.__class__", "torch.sym_max.x.y"),
    *("torch.ops.aten.add.Tensor.x", "torch.ops.import_module.__call__", "_operator.call"),
    "torch.ops.aten.from_file.default",
)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "compressed": (file_of({GRAPH: program()}, zipfile.ZIP_DEFLATED), "which is compressed"),
    "no document": (file_of({GRAPH: 3, "x/models/y.json": program({"target": "eval"})}), "eval"),
    "constants": (file_of({GRAPH: program(), CONSTANTS: {}}), "KeyError"),
    "object": (
        file_of({GRAPH: program(), CONSTANTS: {"config": {"o": {"path_name": "custom_obj_0"}}}}),
        "constant 'o', an object of Python's",
    ),
    "expression": (
        file_of({GRAPH: program(sym_int_values={"s0": {"as_expr": {"expr_str": "exit()"}}})}),
        "NCC_EMOD025",
    ),
    **{call: (file_of({OLD: program({"target": call})}), f"a call of '{call}'") for call in CALLS},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_program_needs_is_refused_before_torch_is_loaded(name: str) -> None:
    data, said = HOSTILE[name]
    with pytest.raises(ImportRuleError, match=r"SW_TORCH_FILE|NCC_EMOD025") as caught:
        archive.read_program(data)
    assert said in str(caught.value)


def test_calls_deep_in_a_graph_are_looked_at() -> None:
    inner = {"as_graph": {"name": "body", "graph": {"nodes": [{**NODE, "target": "torch.load"}]}}}
    data = file_of({GRAPH: program({"inputs": [{"arg": inner}]})})
    with pytest.raises(ImportRuleError, match=r"torch\.load"):
        archive.check(data)


def test_without_torch_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="SW_NEEDS_PACKAGE") as caught:
        read_module(file_of({GRAPH: program()}))
    assert "pip install -e '.[torch]'" in caught.value.diagnostic.hint


def test_the_namespace_is_imported_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    import shardwright.torch

    for call in (shardwright.torch.trace, shardwright.torch.analyze, shardwright.torch.load):
        with pytest.raises(UsageError, match="SW_NEEDS_PACKAGE") as caught:
            call("anything")
        assert "pip install -e '.[torch]'" in caught.value.diagnostic.hint
