"""Every statement of the vendor's documents that promises behaviour: the commands that show it,
what they did here, and the page of it.

Statements are rows of `tests/statements/*.toml`, in our words; one row per error code is made from
its trigger. Running them (minutes) writes `tests/statements/outcomes.json`; the page and the plain
tests read that.

    python -m tests.support.statements               # runs all
    python -m tests.support.statements TEXT ...      # those that contain a text
    python -m tests.support.statements --new         # those that are new, changed or broken
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests/statements"
STORED = ROWS / "outcomes.json"
PAGE = "docs/every-statement.md"
NEW = "--new"
OURS = ("shardwright", "neuronx-cc")
WITH_WORKERS = {"plan", "run", "parallel-compile", "submit"}
"""Verbs that start processes, and therefore are one."""


class Outcome(StrEnum):
    """What became of a statement here."""

    WORKS = "works"
    REFUSED = "refused as the vendor does"
    PART = "in part"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One promise. `run` are commands; the last has to end with `exit`, and together they have to
    print every text of `shows` and none of `hides`. `left` says what is not there."""

    of: str
    says: str
    outcome: Outcome
    run: tuple[str, ...] = ()
    exit: int = 0
    shows: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    left: str = ""

    @property
    def digest(self) -> str:
        """Of what is run and what it has to print."""
        asked = json.dumps([self.run, self.exit, self.shows, self.hides])
        return hashlib.sha256(asked.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What running a statement gave: the exit code of its last command, texts that were not printed
    and texts that should not have been."""

    digest: str
    exit: int = 0
    absent: list[str] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)

    def meets(self, statement: Statement) -> bool:
        """Whether it is what the statement says, and of its commands."""
        is_met = not (self.absent or self.unwanted) and self.exit == statement.exit
        return is_met and self.digest == statement.digest


def statements() -> list[Statement]:
    """Every statement, in the order of the page. Raises ValueError for one that is incomplete."""
    found = []
    for path in sorted(ROWS.glob("*.toml")):
        for row in tomllib.loads(path.read_text())["statement"]:
            given = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
            found.append(Statement(**given | {"outcome": Outcome(given["outcome"])}))
    found += _of_codes()
    for one in found:
        is_whole = one.outcome in (Outcome.WORKS, Outcome.REFUSED)
        if is_whole and not one.run:
            raise ValueError(f"a command has to show: {one.says}")
        if is_whole == bool(one.left):
            raise ValueError(f"what is left is said where something is: {one.says}")
    return found


def _of_codes() -> Iterator[Statement]:
    """A statement per documented error code: its trigger ends with it."""
    from shardwright.compiler.diagnostics.catalogue import catalogue
    from tests.support.error_triggers import TRIGGERS

    for code, entry in catalogue().items():
        if not code.startswith("NCC_"):
            continue
        says = f"{code}: {entry.meaning[0].lower()}{entry.meaning[1:]}"
        trigger = TRIGGERS.get(code)
        if trigger is None:
            left = "the feature is not offered; its calls are refused as NCC_EHCA005"
            run = (f"shardwright errors {code}",)
            made = {"run": run, "shows": (code,), "left": left, "outcome": Outcome.MISSING}
        elif trigger.call or trigger.patched:
            run = (f"pytest tests/test_error_triggers.py -k {code}",)
            made = {"run": run, "shows": ("1 passed",), "outcome": Outcome.REFUSED}
        else:
            target = "" if "--target" in trigger.flags else " --target trn1"
            run = (f"neuronx-cc compile {code}.mlir{target} {trigger.flags}".rstrip(),)
            status = 2 if code == "NCC_EARG001" else 70
            made = {"run": run, "shows": (f"[{code}]",), "exit": status}
            made |= {"outcome": Outcome.REFUSED}
        yield Statement(of="c", says=says, **made)


def stored() -> dict[str, Ran]:
    """What was found when the statements were run last, by what they say."""
    return {says: Ran(**row) for says, row in json.loads(STORED.read_text()).items()}


def write_models(folder: Path) -> None:
    """The model files that commands name."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tests.support.error_triggers import TRIGGERS, integer, mx_quantize
    from tests.support.model_files import write_model

    f32, i32 = np.zeros((8, 8), np.float32), np.zeros((4,), np.int32)
    models: Mapping[str, tuple[Any, list[Any]]] = {
        "product": (jnp.matmul, [f32, f32]),
        "softmax": (jax.nn.softmax, [f32]),
        "rows": (lambda x, i: x[i], [f32, i32]),
        "scatter": (lambda x, i: x.at[i].add(1.0), [f32, i32]),
        "update": (lambda x, i: jax.lax.dynamic_update_slice(x, x[:1], (i[0], 0)), [f32, i32]),
        "topk": (lambda x: jax.lax.top_k(x, 2), [f32]),
        "reverse": (lambda x: x[::-1], [f32]),
        "power": (lambda x: jax.lax.pow(x, 2.5), [f32]),
        "loop": (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x), x), [f32]),
        "any": (lambda x: jnp.any(x > 0), [f32]),
        "sort": (lambda x: jnp.sort(x, axis=-1), [f32]),
        "half": (lambda x: (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).sum(), [f32]),
        "erf": (jax.scipy.special.erf, [f32]),
        "onehot": (lambda x, i: jax.nn.one_hot(i, 8) @ x, [f32, i32]),
        "bits": (lambda k: jax.lax.rng_bit_generator(k, (4, 4))[1], [np.zeros(4, np.uint32)]),
    }
    for name, (function, arguments) in models.items():
        write_model(folder / f"{name}.mlir", function, arguments)
    for form in ("hlo.pb", "hlo", "export"):
        write_model(folder / f"product.{form}", jnp.matmul, [f32, f32])
    np.savez(folder / "ones.npz", arg0=f32 + 1, arg1=f32 + 1)
    np.savez(folder / "outside.npz", arg0=f32, arg1=np.array([0, 99, 1, 2], np.int32))
    (folder / "quantized.mlir").write_text(mx_quantize().text)
    (folder / "wide.mlir").write_text(integer("multiply", "i64"))
    for code, trigger in TRIGGERS.items():
        if trigger.text:
            (folder / f"{code}.mlir").write_text(trigger.text)


def ran(statement: Statement, models: Path) -> Ran:
    """What the commands of a statement do, in a new folder with the models."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in models.iterdir():
            (folder / file.name).symlink_to(file)
        printed, status = "", 0
        for line in statement.run:
            text, status = _done(line, folder)
            printed += text
    plain = " ".join(printed.split())
    return Ran(
        digest=statement.digest,
        exit=status,
        absent=[text for text in statement.shows if " ".join(text.split()) not in plain],
        unwanted=[text for text in statement.hides if text in plain],
    )


def _done(line: str, folder: Path) -> tuple[str, int]:
    """(what a command prints, its exit code)."""
    words = shlex.split(line)
    variables = {"COLUMNS": "100"}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words[0] in OURS:
        if not set(words) & WITH_WORKERS:
            return _ours(words[1:], variables, folder)
        line = f"{sys.executable} -m shardwright {shlex.join(words[1:])}"
    elif words[0] == "pytest":
        line = f"cd {ROOT} && {sys.executable} -m pytest -p no:randomly {shlex.join(words[1:])}"
    elif words[0] == "python":
        line = f"{sys.executable} {shlex.join(words[1:])}"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(
        ["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.stdout + done.stderr, done.returncode


def _ours(words: Sequence[str], variables: Mapping[str, str], folder: Path) -> tuple[str, int]:
    """A command of ours, in this process."""
    from shardwright.orchestrator.cli import main

    printed, before, at = io.StringIO(), dict(os.environ), Path.cwd()
    os.environ.update(variables)
    os.chdir(folder)
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            try:
                status = main(words)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(bool(end.code))
    finally:
        os.chdir(at)
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue(), status


HEAD = """# Every statement

Generated by `make statements`, which runs the commands; a test keeps it true to what they did, and
`make exhaustive` runs them again. Each row is a sentence of neuronx-cc's, neuron-cc's and the
runtime's public documents that promises behaviour, in our words, with the command that shows what
happens here. *refused as the vendor does* means that the vendor's compiler refuses it too; `pytest`
names a test that shows it. Model files are those of `tests/support/statements.py`.
"""
TITLES = {
    "0": "Where documents contradict each other",
    "a.1": "Commands",
    "a.2": "Options",
    "a.3": "Combinations",
    "a.4": "What a compile prints",
    "b.1": "The operator table",
    "b.2": "Beyond the table",
    "b.3": "Custom calls",
    "c": "Error codes",
    "d": "Numerics",
    "e.1": "The file",
    "e.2": "Cache",
    "e.3": "Parallel compilation",
    "e.4": "Environment",
    "f.1": "Loading",
    "f.2": "Cores",
    "f.3": "Memory",
    "f.4": "Execution and collectives",
    "g": "Tools",
    "h": "neuron-cc (Inferentia 1)",
    "i": "Names",
    "j": "What people forget",
}


def page() -> str:
    """The page as text, of what is stored."""
    rows, found = statements(), stored()
    counts = Counter(row.outcome for row in rows)
    shares = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome)
    parts = [HEAD, f"**{len(rows)} statements: {shares}.**\n"]
    parts.append("| part | " + " | ".join(Outcome) + " |\n|---|---|---|---|---|")
    for of, title in TITLES.items():
        each = Counter(row.outcome for row in rows if row.of == of)
        parts.append(f"| {title} | " + " | ".join(str(each[o]) for o in Outcome) + " |")
    for of, title in TITLES.items():
        parts.append(f"\n## {title}\n")
        parts.append("| statement | command | outcome |\n|---|---|---|")
        parts += [_line(row, found[row.says]) for row in rows if row.of == of]
    return "\n".join(parts) + "\n"


def _line(row: Statement, done: Ran) -> str:
    commands = "<br>".join(f"`{line}`" for line in row.run).replace("|", "\\|")
    outcome = f"**{row.outcome}**: {row.left}" if row.left else row.outcome
    if not done.meets(row):
        outcome = f"**broken**: exit {done.exit}, absent {done.absent}, unwanted {done.unwanted}"
    return f"| {row.says} | {commands} | {outcome} |".replace("\n", " ")


def main(texts: Sequence[str]) -> int:
    """Run the statements that contain one of the texts, or all; store and write the page."""
    rows = statements()
    old = stored() if STORED.exists() else {}
    found = {row.says: old.get(row.says, Ran(digest="")) for row in rows}
    with tempfile.TemporaryDirectory() as name:
        os.environ["NEURON_COMPILE_CACHE_URL"] = f"{name}/cache"
        models = Path(name) / "models"
        models.mkdir()
        write_models(models)
        for row in rows:
            is_asked = any(text in row.says for text in texts)
            is_new = texts == [NEW] and not found[row.says].meets(row)
            if not texts or is_asked or is_new:
                found[row.says] = ran(row, models)
                if not found[row.says].meets(row):
                    print("NOT MET", row.says, asdict(found[row.says]), sep="\n  ", flush=True)
                # After each, so that a run that is interrupted keeps what it has.
                _store(found)
    _store(found)
    (ROOT / PAGE).write_text(page())
    return 0


def _store(found: Mapping[str, Ran]) -> None:
    STORED.write_text(
        json.dumps({says: asdict(one) for says, one in found.items()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
