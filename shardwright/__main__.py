"""`python -m shardwright`: the same as the `shardwright` command."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from shardwright.orchestrator.cli import main


def command() -> NoReturn:
    """Run the command and end the process with its exit code.

    The interpreter is not taken down piece by piece: returning the memory of graphs and of jaxlib's
    contexts object by object took 2 to 3 s of an interrupt (measured at load 16), and the system
    takes it back at once. What is registered to run at exit runs.
    """
    try:
        code = main()
    except SystemExit as end:  # argparse: help, version, wrong usage
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a reader that went away
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
