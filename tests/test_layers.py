"""Imports run downward only, heavy libraries stay where they belong, and files stay readable in
size."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orchestrator", "sharding", "sim_cluster", "compiler", "collectives")
ALLOWED = {
    "orchestrator": {"sharding", "sim_cluster", "compiler", "collectives"},
    "sharding": {"compiler", "collectives"},
    "sim_cluster": {"compiler", "collectives"},
    "compiler": {"collectives"},
    "collectives": set(),
}
SIM_COMPILER = {"dtypes", "diagnostics", "isa", "machine", "neff", "support", "timing"}
HEAVY = {
    "jax": ("compiler/frontend/", "orchestrator/models/", "sharding/partition/shardy.py"),
    "jaxlib": ("compiler/frontend/", "sharding/partition/shardy.py"),
    "torch": ("compiler/frontend/",),
    "onnx": ("compiler/frontend/",),
    "tensorflow": ("compiler/frontend/",),
    "optax": ("compiler/frontend/pytorch/", "compiler/frontend/updates.py", "orchestrator/models/"),
    "ray": ("orchestrator/service/ray_", "orchestrator/submission/ray_jobs.py"),
    "matplotlib": ("orchestrator/terminal/plots.py",),
    "boto3": ("orchestrator/cache/bucket.py",),
    "botocore": ("orchestrator/cache/bucket.py",),
}
ABOVE = {
    "orchestrator/changes/": ("orchestrator.road", "orchestrator.whatif"),
    "orchestrator/road/": ("orchestrator.whatif",),
}
"""Rooms that what lies in a folder may not import: they stand on it."""
COMPILER = (
    *("diagnostics", "dtypes", "model_types", "support", "options", "machine"),
    *("text", "isa", "timing", "ir", "neff", "steps", "program", "surface", "rewriting", "serial"),
    *("schedule", "codegen", "passes", "attention", "lower", "fusion", "outline"),
    *("linking", "shown", "driver", "frontend"),
)
"""Rooms and files of the compiler; each may import those in front of it, and `KNOTS`."""
KNOTS = {
    ("text", "isa"): "the words of both texts are read in one place",
    ("text", "ir"): "the words of both texts are read in one place",
    ("ir", "neff"): "the name of the axis of stages",
    ("attention", "lower"): "labels of values, until fusion is one room",
    ("linking", "shown"): "the note of a program's memory in dumps",
}
MAX_LINES = 600
MAX_FUNCTION_LINES = 60


def source_files() -> list[Path]:
    return sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def imported_modules(tree: ast.AST) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def layer_findings(path: str, module: str) -> str | None:
    """What is wrong with `path` importing `module`, if anything."""
    package, module = path.split("/")[0], module.removeprefix("shardwright.")
    head = module.split(".")[0]
    if head in PACKAGES and head != package and head not in ALLOWED[package]:
        return f"{package} may not import {head}"
    if package == "sim_cluster" and head == "compiler":
        part = [*module.split("."), ""][1]
        if part not in SIM_COMPILER:
            return f"sim_cluster may not import compiler.{part}"
    for folder, rooms in ABOVE.items():
        if path.startswith(folder) and module.startswith(rooms):
            return f"{folder} may not import {module}"
    if package == head == "compiler" and (finding := _compiler_finding(path, module)):
        return finding
    if head in HEAVY and not path.startswith(HEAVY[head]):
        return f"only {HEAVY[head]} may import {head}"
    return None


def _compiler_finding(path: str, module: str) -> str | None:
    """What is wrong with a room of the compiler importing another."""
    room, other = Path(path).parts[1].removesuffix(".py"), [*module.split("."), ""][1]
    pair = room, other
    if room == "__init__" or room == other or not other or pair in KNOTS:
        return None
    missing = [name for name in pair if name not in COMPILER]
    if missing:
        return f"COMPILER in tests/test_layers.py has no {missing[0]}"
    return (
        f"{room} may not import {other}" if COMPILER.index(room) < COMPILER.index(other) else None
    )


def test_layer_rules_hold() -> None:
    findings = []
    for file in source_files():
        path = file.relative_to(ROOT).as_posix()
        for module, line in imported_modules(ast.parse(file.read_text())):
            if finding := layer_findings(path, module):
                findings.append(f"{path}:{line}: {finding}")
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("collectives/x.py", "shardwright.compiler.dtypes"),
        ("sharding/x.py", "shardwright.sim_cluster.instructions.l0"),
        ("sim_cluster/x.py", "shardwright.compiler.ir.types"),
        ("compiler/lower/x.py", "jax.numpy"),
        ("compiler/passes/x.py", "shardwright.compiler.lower.body"),
        ("orchestrator/road/job.py", "ray"),
        ("orchestrator/road/x.py", "shardwright.orchestrator.whatif.tries"),
    ],
)
def test_layer_rules_find_a_violation(path: str, module: str) -> None:
    assert layer_findings(path, module) is not None


def test_files_and_functions_stay_readable() -> None:
    findings = []
    for file in source_files():
        text = file.read_text()
        if (lines := text.count("\n")) > MAX_LINES:
            findings.append(f"{file.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    findings.append(
                        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name} {size} lines"
                    )
    assert not findings, "\n".join(findings)


def test_light_imports_load_no_heavy_library() -> None:
    """`import compiler` packages and the command's module load neither jax nor ray."""
    code = (
        "import sys; from shardwright.orchestrator import cli;"
        "from shardwright.compiler import driver; from shardwright.sharding import plan;"
        "from shardwright.sim_cluster.values import run_values;"
        "print([m for m in ('jax', 'jaxlib', 'ray', 'torch', 'matplotlib', 'optax', 'boto3')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"


def test_the_command_sets_what_numpy_reads_before_numpy_is_loaded() -> None:
    """The number of BLAS threads: with more than one, simulated cores fight for the CPUs and a
    value run takes three times as long."""
    code = "import sys, shardwright.orchestrator.cli; print('numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (out.returncode, out.stdout.strip()) == (0, "False"), out.stderr
