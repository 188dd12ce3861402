"""`shardwright alias DIR`: the vendor's commands by their names, for scripts that call them.

Each is a shell script that hands its command line to ours: `neuronx-cc` takes `compile`,
`list-operators`, `--help` and `--version` (command reference), `neuron_parallel_compile` what
`parallel-compile` takes (parallel compilation page), the tools what their verbs take. Names that
the vendor has withdrawn are there too: they say what does it today.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from shardwright.orchestrator.host import PACKAGES_ROOT
from shardwright.orchestrator.runtime.commands import TOOLS, WITHDRAWN
from shardwright.orchestrator.terminal.outputs import write, writing
from shardwright.orchestrator.terminal.terminal import say

_MODE = 0o755
_NEURONX_CC = """\
for word in "$@"; do
  case "$word" in
    compile|list-operators|-h|--help|--version) exec {command} "$@" ;;
  esac
done
echo "neuronx-cc requires a command: compile, list-operators, --help or --version" >&2
exit 2
"""
_PARALLEL = """\
exec {command} parallel-compile "$@"
"""
_TOOL = """\
exec {{command}} {verb} "$@"
"""
_BODIES = {
    "neuronx-cc": _NEURONX_CC,
    "neuron_parallel_compile": _PARALLEL,
    "nccom-test": _TOOL.format(verb="nccom"),
    **{name: _TOOL.format(verb=name) for name in TOOLS},
    **{name: _TOOL.format(verb=f"withdrawn {name}") for name in WITHDRAWN},
}
_HEAD = """\
#!/bin/sh
# {name}'s command line, answered by Shardwright (written by `shardwright alias`).
PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}
export PYTHONPATH
"""


def run(folder: Path) -> int:
    """Write the scripts, and say how a shell finds them. Raises UsageError (SW_OUTPUT) for a folder
    that cannot be written."""
    command = f"{shlex.quote(sys.executable)} -m shardwright"
    for name, body in _BODIES.items():
        path = folder / name
        head = _HEAD.format(name=name, root=shlex.quote(str(PACKAGES_ROOT)))
        write(path, head + body.format(command=command), "alias")
        with writing(path, "alias"):
            path.chmod(_MODE)
    say(f"wrote {', '.join(_BODIES)} to {folder}")
    say(f'export PATH={shlex.quote(str(folder.resolve()))}{os.pathsep}"$PATH"')
    return 0
