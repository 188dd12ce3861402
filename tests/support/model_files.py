"""Model files in every form the compile command reads, made from one JAX function, and a way to
compile and run them as a user does."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import export

from shardwright.compiler.neff.reader import Container
from shardwright.orchestrator.cli import main

FORMS = ("hlo.pb", "hlo", "mlir", "bc", "export")


def write_model(
    path: Path, function: Callable[..., Any], arguments: Sequence[Any], donate: tuple[int, ...] = ()
) -> Path:
    """Write `function` of arguments of these shapes; the suffix of `path` chooses the form."""
    shapes = [jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in arguments]
    jitted = jax.jit(function, donate_argnums=donate)
    lowered = jitted.lower(*shapes)
    match path.name.partition(".")[2]:
        case "hlo.pb":
            data = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
        case "hlo":
            data = lowered.compiler_ir("hlo").as_hlo_text().encode()
        case "mlir":
            data = lowered.as_text(debug_info=True).encode()
        case "bc":
            data = export.export(jitted)(*shapes).mlir_module_serialized
        case "export":
            data = bytes(export.export(jitted)(*shapes).serialize())
        case form:
            raise AssertionError(form)
    path.write_bytes(data)
    return path


def compile_line(line: str) -> int:
    """Exit code of a command line as it stands in a script, with the name of either compiler."""
    words = shlex.split(line)
    assert words[0] in ("neuronx-cc", "shardwright")
    return main(words[1:])


def run_neff(path: Path, arguments: Sequence[Any], level: str = "L1") -> list[np.ndarray]:
    """The outputs of a file through `neff run`."""
    inputs, outputs = path.with_suffix(".in.npz"), path.with_suffix(".out.npz")
    np.savez(inputs, **{f"arg{k}": np.asarray(a) for k, a in enumerate(arguments)})
    command = ["neff", "run", str(path), "--inputs", str(inputs), "--outputs", str(outputs)]
    assert main([*command, "--level", level]) == 0
    with np.load(outputs) as found:
        return [found[f"out{k}"] for k in range(len(found.files))]


def meta_of(path: Path) -> dict[str, Any]:
    """What the file says about its making."""
    return Container.open(path, "program").meta


def info_of(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """`neff info --json`."""
    capsys.readouterr()
    assert main(["neff", "info", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
