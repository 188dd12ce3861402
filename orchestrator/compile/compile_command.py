"""`shardwright compile FILES ...`: neuronx-cc's command, one NEFF per model for one NeuronCore.

Reads the flags (`compile_flags.py`), finds out what each file holds, enforces the release's rules,
compiles in this process what the cache does not have, and writes a container that tells what made
it. Exit code 0, 2 for what the user typed, 70 for everything the compiler refuses.
"""

from __future__ import annotations

import os
import platform
import shlex
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError, InternalError, UsageError
from shardwright.compiler.frontend import isolated
from shardwright.compiler.frontend.frameworks import content_of
from shardwright.compiler.machine.target import models_digest
from shardwright.compiler.surface.flags import BY_SPELLING
from shardwright.compiler.surface.resolve import Resolved, resolve
from shardwright.orchestrator.compile.compile_flags import of_environment, parse
from shardwright.orchestrator.compile.compile_log import CompileLog
from shardwright.orchestrator.compile.modules import compiled, in_process
from shardwright.orchestrator.compile.through_cache import is_cached, through_cache
from shardwright.orchestrator.dump import dumping
from shardwright.orchestrator.dump.folder import FLAG
from shardwright.orchestrator.environment.reading import debug_folder
from shardwright.orchestrator.road.bundling import compiler_version
from shardwright.orchestrator.terminal import outputs

COMPILE_FAILURE, USAGE = 70, 2
_TEMPS = ".temps"
_OUTPUT = BY_SPELLING["output"]
_DEFAULTS = {_OUTPUT.usual, *(name for _, name in _OUTPUT.compiler_defaults)}


def main(arguments: Sequence[str]) -> int:
    """Run `compile`; returns the exit code. Mistakes on the command line raise UsageError."""
    files, given = parse(arguments, "shardwright compile")
    resolved = resolve([*of_environment(os.environ), *given])  # the right-most wins
    paths = _outputs(files, resolved.command.output)
    with CompileLog(Path(resolved.command.logfile), resolved.command.verbose) as log:
        log.say("info", f"Command line: {_command_line(arguments)}")
        for notice in resolved.notices:
            log.say(notice.severity, notice.message)
        for name, value in asdict(resolved.options).items():
            log.say("debug", f"option {name} = {value}")
        try:
            for file, output in zip(files, paths, strict=True):
                flag = FLAG if resolved.command.dump_dir else "SaveTemps"
                with dumping(_dump_folder(resolved, output, len(files) > 1), flag):
                    _compile_file(Path(file), output, resolved, log)
        except Exception as error:
            shown = _shown(error)
            code = USAGE if isinstance(shown, UsageError) else COMPILE_FAILURE
            log.failed(shown, [*_facts(arguments, resolved, paths), ("Exit code", str(code))])
            return code
        log.passed()
    return 0


def _shown(error: Exception) -> DiagnosticError:
    """An error as it is shown: a disk that refuses (intermediates, or temporary files) is no defect
    of ours."""
    if isinstance(error, DiagnosticError):
        return error
    if refused := outputs.of_the_disk(error, "temporary files", "compile"):
        return refused
    return InternalError.of(error, "".join(traceback.format_exception(error)))


def _outputs(files: Sequence[str], output: str) -> list[Path]:
    """The file to write for each model. Raises UsageError when several would be one."""
    if len(files) == 1:
        path = Path(output)
        return [path / f"{Path(files[0]).stem}.neff" if path.is_dir() else path]
    stems = [Path(file).name.partition(".")[0] for file in files]
    folder = Path("." if output in _DEFAULTS else output)
    if folder.suffix == ".neff" or len(set(stems)) < len(stems):
        raise UsageError(
            "SW_USAGE",
            f"several models require --output to be a directory and different names, got {output}",
        )
    return [folder / f"{stem}.neff" for stem in stems]


def _command_line(arguments: Sequence[str]) -> str:
    return shlex.join(["shardwright", "compile", *arguments])


def _facts(
    arguments: Sequence[str], resolved: Resolved, paths: Sequence[Path]
) -> list[tuple[str, str]]:
    """What a failure report needs besides the error."""
    facts = [
        ("Command line", _command_line(arguments)),
        ("Version", version_text()),
        ("Version profile", str(resolved.command.profile)),
        ("Host", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"),
    ]
    if resolved.command.save_temps:
        facts.append(("Artifacts", ", ".join(str(path.with_suffix(_TEMPS)) for path in paths)))
    return facts


def version_text() -> str:
    """What `--version` prints."""
    python = platform.python_version()
    return (
        f"Shardwright compiler {compiler_version()}, Python {python}, machine models"
        f" {models_digest()[:12]}, NumPy {np.__version__}, NEFF format 1"
    )


def _compile_file(file: Path, output: Path, resolved: Resolved, log: CompileLog) -> None:
    """One model file to one NEFF. Raises DiagnosticError."""
    command = resolved.command
    try:
        data = content_of(file, command.framework, command.input_shape)
    except OSError as error:
        raise UsageError("SW_USAGE", f"cannot read {file}: {error.strerror}") from error
    cached = is_cached(command) and not debug_folder()
    if folder := debug_folder():
        log.say("info", f"NEURON_FRAMEWORK_DEBUG: stages as text in {folder}")
    make = through_cache(command) if cached else in_process
    with isolated.Reader() as reader:
        content = compiled(file, data, resolved, log, reader, make)
    with log.stage("write"):
        outputs.write(output, content, "--output")
    log.dot()


def _dump_folder(resolved: Resolved, output: Path, many: bool) -> Path | None:
    """Where the stages of a model go: `--dump-dir`, with a folder per model where there are
    several, or beside the output for `SaveTemps`."""
    asked = resolved.command.dump_dir or debug_folder()
    if asked:
        return Path(asked) / output.stem if many else Path(asked)
    return output.with_suffix(_TEMPS) if resolved.command.save_temps else None
