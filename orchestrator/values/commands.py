"""`shardwright checkpoint`: what value runs saved."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_verbs(verbs: Any) -> None:
    """Add it to the command."""
    checkpoint = verbs.add_parser("checkpoint", help="what a value run saved")
    tools = checkpoint.add_subparsers(required=True, metavar="TOOL")
    gather = tools.add_parser("gather", help="the whole state as one .npz of global arrays")
    gather.add_argument("folder", type=Path, help="an output directory, or one saved step")
    gather.add_argument("--out", type=Path, required=True, help=".npz to write")
    gather.set_defaults(verb=_gather)


def _gather(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.values.gather import gather

    return gather(args.folder, args.out)
