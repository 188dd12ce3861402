"""Calls of code that is no graph: kernels of NKI and operators of the user's in C++.

Both are programs for one machine, which nothing here executes; they are refused, after the checks
of the vendor's verification, each with its code. What a call of a kernel says is JSON, as it is or
in base 64, with the kernel's `func_name` and the absolute path of its artifact; NKI's release
stands there or in the artifact. Sources: error pages NCC_EVRF059, 065 and EBIR023, the calls that
public front ends write; decisions: design note 0094.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from shardwright.compiler.frontend.mlir import text_of
from shardwright.compiler.frontend.rules.registry import Site, refuse

NATIVE_KERNEL, CUSTOM_OP = "AwsNeuronCustomNativeKernel", "AwsNeuronCustomOp"
MLP_INTERMEDIATE = 4096
"""The largest intermediate size of an MLP kernel (documented: error page EBIR023)."""
_UNNAMED = "without a name"


def native_kernel(site: Site) -> NoReturn:
    """Refuses a kernel: for what its artifact lacks, or because it is code for the machine."""
    config = _config(text_of(site.op, "backend_config"))
    name = str(config.get("func_name", _UNNAMED))
    path = next((text for text in _texts(config) if Path(text).is_absolute()), None)
    if path is None:
        _too_old(name, "the call names no artifact")
    artifact = _found(Path(path), site.importer.locations.base)
    if artifact is None:
        refuse(
            "NCC_EVRF059",
            f"NKI kernel {name} requires its artifact {path}, got no such file, nor"
            f" {'/'.join(Path(path).parts[-2:])} below the launch folder",
            "trace the model again, or copy the artifact there",
        )
    if not (_has_version(config) or _has_version(_config(_text(artifact)))):
        _too_old(name, "neither the call nor its artifact says of which release it is")
    _check_intermediate(site, name)
    refuse(
        "NCC_EUOC002",
        f"NKI kernel {name} is instructions of NeuronCores: it is found, and nothing here runs it",
        "write what it computes in JAX or PyTorch; `shardwright plan` tiles and fuses it by itself",
    )


def custom_op(site: Site) -> NoReturn:
    """Refuses an operator that lies in a library for GpSimd."""
    refuse(
        "NCC_EUOC002",
        f"{CUSTOM_OP} calls a library of the user's for GpSimd, which nothing here runs",
        "replace it with ordinary operators",
    )


def _too_old(name: str, why: str) -> NoReturn:
    refuse(
        "NCC_EVRF065",
        f"NKI kernel {name} requires the metadata of newer releases of NKI, got none: {why}",
        "upgrade nki, trace the model again, clear the caches",
    )


def _config(text: str) -> Mapping[str, Any]:
    """A JSON object, in base 64 or as it is; empty for anything else."""
    for read in (_decoded, str):
        try:
            found = json.loads(read(text))
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _found(path: Path, folder: str) -> Path | None:
    """The artifact at its path, or under its last folder where the compiler was launched."""
    places = (path, Path(folder, *path.parts[-2:]))
    return next((place for place in places if place.is_file()), None)


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def _has_version(config: Mapping[str, Any]) -> bool:
    return any(key.lower().endswith("version") and value for key, value in config.items())


def _check_intermediate(site: Site, name: str) -> None:
    """Refuses an MLP kernel with a wide weight: one that the last dim of its input, the first of
    its operands, is contracted with.
    """
    if "mlp" not in name.lower() or not site.operands or not site.operands[0].type.rank:
        return
    hidden = site.operands[0].type.shape[-1]
    weights = [v.type.shape for v in site.operands[1:] if v.type.rank == 2]
    widest = max((wide for deep, wide in weights if deep == hidden), default=0)
    if widest > MLP_INTERMEDIATE:
        refuse(
            "NCC_EBIR023",
            f"MLP kernel {name} requires an intermediate size up to {MLP_INTERMEDIATE}, got"
            f" {widest}",
            "tile it, or raise tensor parallelism",
        )
