"""`shardwright checkpoint`: what value runs saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.orchestrator.config.arguments import lazily


def add_verbs(verbs: Any) -> None:
    """Add it to the command."""
    checkpoint = verbs.add_parser("checkpoint", help="what a value run saved")
    tools = checkpoint.add_subparsers(required=True, metavar="TOOL")
    gather = tools.add_parser("gather", help="the whole state as one .npz of global arrays")
    gather.add_argument("folder", type=Path, help="an output directory, or one saved step")
    gather.add_argument("--out", type=Path, required=True, help=".npz to write")
    gather.set_defaults(verb=lazily("values.gather", "gather", "folder", "out"))
