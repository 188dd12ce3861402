"""The jobs of `examples/`, what they print, and the recorded output beside them.

`python -m tests.support.gallery [FOLDER ...]` records it anew, where what it needs is installed.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from shardwright.orchestrator.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLANNED = (
    "llama_fsdp",
    "hsdp_7b",
    "pipeline_13b",
    "experts",
    "own_sharding",
    "llama_70b",
    "inference",
    "straggler",
    "long_context",
    "lora",
    "dpo",
    "torch_step",
)
QUICK = ("own_sharding",)  # to plan; the others are for the matrix
EXHAUSTIVE = (
    "llama_70b",
    "hsdp_7b",
    "pipeline_13b",
    "long_context",
    "inference",
    "lora",
)  # nothing that others do not show
NEEDS = {"torch_step": "torch"}  # libraries of an extra, which may not be installed
RECORDED = "plan.out"
SHARE = 0.1  # figures follow the compiler; more than this is another output
_NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
_OF_THE_TOOL = ("answered ", "next ", "no gain ", "gains ")
_BAR = re.compile(r"^\s*\W+$")  # says what the figures below it say


def is_possible(folder: str) -> bool:
    """Whether the library that an example needs is installed."""
    return folder not in NEEDS or find_spec(NEEDS[folder]) is not None


def planned(folder: str) -> str:
    """What `plan` prints of an example: a plan of now, a stored one says that it is one."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        job = str(EXAMPLES / folder / "job.toml")
        words = ["plan", job, "--fresh", "--tries", "0", "--executor", "inline"]
        code = main([*words, "--progress", "quiet"])
    assert code == 0, folder
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def words(text: str) -> str:
    """What is said without figures, bars, line breaks and the time of the tool itself."""
    return " ".join(_NUMBER.sub("#", " ".join(_kept(text))).split())


def figures(text: str) -> list[float]:
    """The figures in order."""
    found = _NUMBER.findall(" ".join(_kept(text)))
    return [float(number.replace(",", "")) for number in found]


def _kept(text: str) -> list[str]:
    """Lines without bars, and without the sections that are about the tool itself."""
    out, skipped = [], False
    for line in text.splitlines():
        if not line.startswith(" "):
            skipped = line.startswith(_OF_THE_TOOL)
        if not skipped and not _BAR.match(line):
            out.append(line)
    return out


def record(folder: str) -> None:
    """Write what an example prints beside it."""
    text = planned(folder)
    kept = (line for line in text.splitlines() if not line.startswith("answered "))
    (EXAMPLES / folder / RECORDED).write_text("".join(f"{line}\n" for line in kept))


if __name__ == "__main__":
    for name in sys.argv[1:] or PLANNED:
        if is_possible(name):
            record(name)
        print(name if is_possible(name) else f"{name}: left as it is, needs {NEEDS[name]}")
