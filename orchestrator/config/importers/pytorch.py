"""PyTorch's distribution of a model: the function of a user's that makes it (`train.py:build`), or
a table (TOML, JSON) that says it. The model itself is the job's.

The function is run once, on one process, with recorders in place of what shards a module
(`compiler/frontend/pytorch/distributed.py`).
"""

from __future__ import annotations

from pathlib import Path

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.pytorch.distributed_entry import from_function
from shardwright.compiler.frontend.pytorch.distribution import Distribution
from shardwright.compiler.frontend.pytorch.distribution_table import distribution_of
from shardwright.compiler.machine.target import FIRST_TARGET
from shardwright.orchestrator.config.importers.distributed_terms import tables_of, terms_of
from shardwright.orchestrator.config.importers.fields import (
    json_data,
    json_lines,
    text_of,
    toml_data,
    toml_lines,
    unreadable,
)
from shardwright.orchestrator.config.importers.imported import Asked, Imported, Meaning
from shardwright.orchestrator.config.importers.shapes import Ranks, cluster_tables
from shardwright.orchestrator.config.importers.table import Reading

_CODE = ".py:"


def imported_of(path: Path, asked: Asked) -> Imported:
    """What a file says about distribution. Raises UsageError for a file that is none (SW_IMPORT,
    SW_ENTRY, SW_TORCH_TABLE), and for what cannot be (`terms_of`)."""
    cores = asked.cores_of(FIRST_TARGET)
    said = distribution(path, (asked.instances or 1) * cores)
    terms = terms_of(said)
    tables = tables_of(terms)
    read = Reading(Path(str(path).partition(":")[0]))
    mesh = tables.get("mesh", {})
    if mesh:
        ranks = Ranks(
            **{axis: mesh.get(axis, 1) for axis in ("pp", "cp", "tp", "ep")},
            shard=mesh.get("dp_shard", 1),
            replicate=mesh.get("dp_replicate", 1),
        )
        tables |= cluster_tables(read, ranks, cores, asked.instances)
    tables.setdefault("strategy", {})
    if _CODE in str(path):  # its function makes the model too, unless another is named
        tables["model"] = {"entry": str(path.resolve())}
    return Imported("pytorch", read, Meaning(tables), terms=terms)


def distribution(path: Path, world_size: int) -> Distribution:
    """What a function (`file.py:function`) does to the model that it returns, of `world_size` ranks
    where it asks, or what a table says. Raises UsageError."""
    file, _, function = str(path).rpartition(":")
    if _CODE in str(path):
        place = Path(file).resolve()
        if not place.is_file():
            raise UsageError("SW_ENTRY", f"--from pytorch requires a file {file}, there is none")
        return from_function(f"{place.stem}:{function}", place.parent, world_size, "--from pytorch")
    if path.suffix == ".py":
        raise UsageError(
            "SW_ENTRY",
            f"--from pytorch requires file.py:function, got {path}",
            hint="name the function that builds and distributes the model, and returns it",
        )
    return _from_table(path)


def _from_table(path: Path) -> Distribution:
    text = text_of(path)
    is_json = path.suffix.lower() == ".json"
    data = json_data(path, text) if is_json else toml_data(path, text)
    if not isinstance(data, dict):
        raise unreadable(path, 1, "a distribution requires tables, got none")
    lines = json_lines(path, text) if is_json else toml_lines(text)
    numbered = list(enumerate(text.splitlines(), 1))

    def line(name: str, row: int = 0) -> int:
        """Of a name, of a row of a list of tables, or of the first name below."""
        heads = [number for number, one in numbered if one.strip() == f"[[{name}]]"]
        if row < len(heads):
            return heads[row]
        own = [number for key, number in lines.items() if key.startswith(f"{name}.")]
        return lines.get(name) or min(own, default=0)

    return distribution_of(data, str(path), line)
