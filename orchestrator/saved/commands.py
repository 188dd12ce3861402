"""The verb of this folder and its arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwright.orchestrator.config.arguments import asked_of, comma_words
from shardwright.orchestrator.saved.asked import SEGMENT, Asked


def add_verbs(verbs: Any) -> None:
    """Add it to the command."""
    save = verbs.add_parser("save", help="a model whose supported parts are NEFF files")
    save.add_argument("model", type=Path, help="an ONNX model, or the folder of a SavedModel")
    save.add_argument("--target", default="", help="the machine")
    what = save.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", "-o", type=Path, help="the model to write")
    what.add_argument(
        "--analyze", action="store_true", help="only count operators by kind, compiled and not"
    )
    save.add_argument(
        "--input-shape", default="", metavar="SIZES", help="batch=4,x=4x3x8x8: sizes of open dims"
    )
    save.add_argument(
        "--minimum-segment-size",
        type=int,
        default=SEGMENT,
        metavar="N",
        help=f"operators that a compiled part has at least; default: {SEGMENT}",
    )
    save.add_argument(
        "--no-fuse-ops",
        type=comma_words,
        default=[],
        metavar="NAMES",
        help="nodes that stay on the CPU, by their names or their operators'",
    )
    save.add_argument(
        "--extract-weights", action="store_true", help="weights stay in the model, not in NEFFs"
    )
    save.add_argument("--beside", action="store_true", help="NEFF files beside the model")
    save.add_argument("--signature", default="", help="of a SavedModel; default: serving_default")
    save.add_argument(
        "--compiler-args", default="", metavar="FLAGS", help="flags of `shardwright compile`"
    )
    save.add_argument(
        "--workdir",
        dest="compiler_workdir",
        default="",
        metavar="DIR",
        help="keeps StableHLO, NEFF files and the log of the compiler",
    )
    save.json_flag("parts and operators")
    save.set_defaults(verb=_save)


def _save(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.saved.saving import analyze, save
    from shardwright.orchestrator.terminal.terminal import say, say_json

    asked = asked_of(Asked, args)
    report = analyze(args.model, asked) if asked.analyze else save(args.model, args.output, asked)
    if args.json:
        say_json(report.as_dict())
    elif asked.analyze:
        say(f"{report.table()}\n{report}")
    else:
        say(f"{args.output}: {report}")
    return 0
