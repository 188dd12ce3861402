"""The verb of this folder and its arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwright.orchestrator.config.arguments import asked_of
from shardwright.orchestrator.triton.asked import (
    LEVEL,
    LEVELS,
    QUEUE,
    QUEUE_TIMEOUT_S,
    TIMEOUT_S,
    Asked,
)


def add_verbs(verbs: Any) -> None:
    """Add it to the command."""
    triton = verbs.add_parser("triton", help="a model repository of Triton that serves a NEFF")
    triton.add_argument("file", type=Path, help="a NEFF, a traced module or a saved ONNX model")
    triton.add_argument("folder", type=Path, metavar="DIR", help="the repository")
    triton.add_argument("--name", required=True, help="of the model")
    triton.add_argument("--version", type=int, default=1, help="its folder; default: 1")
    triton.add_argument(
        "--max-batch", type=int, default=0, metavar="N", help="samples of requests that are one run"
    )
    triton.add_argument("--instances", type=int, default=1, metavar="N", help="processes of it")
    triton.add_argument(
        "--queue", type=int, default=QUEUE, metavar="N", help="requests that wait; more are refused"
    )
    triton.add_argument(
        "--queue-timeout",
        dest="queue_timeout_s",
        type=float,
        default=QUEUE_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long a request waits at most; default: {QUEUE_TIMEOUT_S:g}",
    )
    triton.add_argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long a run takes at most; default: {TIMEOUT_S:g}",
    )
    triton.add_argument(
        "--weights",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=".npz with arguments that no request has, as `neff run --inputs` takes them",
    )
    triton.add_argument("--level", choices=LEVELS, default=LEVEL)
    triton.add_argument("--program", default="", help="which one, where a file holds several")
    triton.set_defaults(verb=_triton)


def _triton(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.triton.repository import write_model

    return write_model(args.file, args.folder, asked_of(Asked, args))
