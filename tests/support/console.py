"""Pages whose commands are run again: a page of Markdown is a session in a shell.

A fenced block ```` ```console ```` holds commands (`$ shardwright ...`, `$ ls ...`) with what they
print: stdout, or stderr where they fail without stdout, and `[exit N]` after one that does not end
with 0. A block ```` ```LANGUAGE file=NAME ```` is a file that is written before the commands behind
it run, one ```` ```diff ```` a patch that is applied. All of a page runs in one folder: an empty
one, or, where the page has the line `IN_CHECKOUT`, a copy of the checkout, which is then the code
that runs. What the host and the cache decide is masked (`MASKS`) on both sides.

    python -m tests.support.console [docs/trace.md ...]      # writes what commands print now
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    "README.md",
    "docs/first-ten-minutes.md",
    "docs/own-step.md",
    "docs/lora.md",
    "docs/from.md",
    "docs/extending.md",
    "docs/what-ifs.md",
    "docs/inference.md",
    "docs/unet.md",
    "docs/trace.md",
    "docs/dumps.md",
    "docs/strategies/context.md",
    "docs/neuron-cc.md",
    "docs/pytorch-trace.md",
    "docs/faq.md",
    "docs/serving.md",
    "docs/saved-models.md",
)
"""The pages that are sessions."""
NEEDED = {"docs/pytorch-trace.md": "torch", "docs/saved-models.md": "onnx"}
"""Page -> a package that its commands need, and that may be missing."""
TIMEOUT_S = 240
IN_CHECKOUT = "<!-- The commands of this page run in a copy of the checkout. -->"
CHECKOUT = ("shardwright", "collectives", "compiler", "sharding", "sim_cluster", "orchestrator")
CHECKOUT += ("tests", "examples", "docs", "pyproject.toml")
BLOCK = re.compile(r"^```(?P<info>[^\n]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
MASKS = (
    (re.compile(r"^answered .*(\n +.*)*", re.MULTILINE), "answered   in ..."),
    (re.compile(r"^stored +(?!the answer| ).*\n( {11}.*\n)*", re.MULTILINE), ""),
    (re.compile(r"(─+ )?stored, (the oldest )?\d+ \w+ old"), r"stored, \2... old"),
    (re.compile(r"^files      bundle .*\n( +.*\n)*", re.MULTILINE), "files      ...\n"),
    (re.compile(r"^built .*\n(.*\n)*?(?= +┌)", re.MULTILINE), "built    ...\n"),
    (re.compile(r"^\.[.s]* +\[ *\d+%\]\n(.*\n)*?\d+ passed.*$", re.MULTILINE), "... passed"),
    (re.compile(r"^files in (\S+): .*(\n(?!```)\S.*)*", re.MULTILINE), r"files in \1: ..."),
    (re.compile(r"(?<=\d,000) +(?=\d+,000\b)"), " "),
)
"""How long the host took, for what and on which workers; what of an answer was stored, and since
when; how many tests there are; between which columns a tick of a plot that lies between two is
written; files, whose paths wrap where they are long and some of which need
optional libraries."""
PROGRAMS = {
    "shardwright": [sys.executable, "-m", "shardwright"],
    "python": [sys.executable],
    "cat": ["cat"],
    "ls": ["ls"],
}


def replayed(page: str, folder: Path, cache: str = "") -> str:
    """The page with what its commands print in `folder` now, and the cache they use (one of their
    own)."""
    if IN_CHECKOUT in page:
        _check_out(folder)

    def block(match: re.Match[str]) -> str:
        info, body = match["info"], match["body"]
        if info == "console":
            body = "".join(_session(commands_of(body), folder, cache or str(folder / ".cache")))
        elif "file=" in info:
            path = folder / info.partition("file=")[2]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
        elif info == "diff":
            _apply(body, folder)
        return f"```{info}\n{body}```"

    return BLOCK.sub(block, page)


def _apply(patch: str, folder: Path) -> None:
    """Raises AssertionError where the lines around what a patch changes are others by now."""
    done = subprocess.run(
        ["git", "apply", "-"], input=patch, text=True, cwd=folder, capture_output=True
    )
    assert not done.returncode, (
        "a patch of the page requires the lines around it as the sources have them now: bring it"
        f" up to date\n{done.stderr}{patch}"
    )


def _check_out(folder: Path) -> None:
    """Copy what the commands of a page may read, run or change."""
    for name in CHECKOUT:
        if (ROOT / name).is_dir():
            caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=caches)
        else:
            shutil.copy(ROOT / name, folder / name)


def commands_of(body: str) -> list[str]:
    """The commands of a block; a line that ends with a backslash goes on in the next."""
    joined = body.replace("\\\n", "\0")
    return [line[2:].replace("\0", "\\\n") for line in joined.splitlines() if line[:2] == "$ "]


def masked(text: str) -> str:
    """The text without what differs from host to host."""
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text


def _session(commands: list[str], folder: Path, cache: str) -> Iterator[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder if (folder / "shardwright").is_dir() else ROOT),
        "COLUMNS": "80",
        "NEURON_COMPILE_CACHE_URL": cache,
    }
    for command in commands:
        program, *words = shlex.split(command.replace("\\\n", " "))
        done = subprocess.run(
            [*PROGRAMS[program], *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        printed = done.stderr if done.returncode and not done.stdout else done.stdout
        lines = [line.rstrip() for line in printed.replace(str(folder), "~").splitlines()]
        if done.returncode:
            lines.append(f"[exit {done.returncode}]")
        yield f"$ {command}\n" + "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Write the pages that are named, else all, with what their commands print now."""
    import tempfile

    for name in sys.argv[1:] or PAGES:
        page = ROOT / name
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(replayed(page.read_text(), Path(folder)))


if __name__ == "__main__":
    main()
