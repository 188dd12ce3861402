"""The verbs `report` and `compare`: what reports that are there say, on the screen or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwright.orchestrator.terminal import outputs
from shardwright.orchestrator.terminal.age import FLAG
from shardwright.orchestrator.terminal.terminal import say, say_json


def add_verbs(verbs: Any) -> None:
    """Their arguments."""
    report = verbs.add_parser("report", help="show a report again, or write it as an HTML page")
    report.add_argument("report", type=Path, help="report.json, or the directory of a run")
    report.add_argument(
        "--html",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="write the page here; without FILE beside the report",
    )
    report.set_defaults(verb=_report)
    compare = verbs.add_parser("compare", help="what changed between two reports or jobs")
    compare.add_argument("a", type=Path, help="report.json, the directory of a run, or a job.toml")
    compare.add_argument("b", type=Path, help="the same")
    compare.add_argument(FLAG, action="store_true", help="ask anew about jobs: plan them again")
    compare.json_flag()
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    compare.set_defaults(verb=_compare)


def _report(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.report.compare import read_report
    from shardwright.orchestrator.report.page.page import report_page

    found = read_report(args.report)
    if args.html is None:
        from shardwright.orchestrator.report.plan_screen import plan_screen
        from shardwright.orchestrator.report.screen import run_screen

        (run_screen if "numerics" in found else plan_screen)(found)
        return 0
    beside = args.report if args.report.is_dir() else args.report.parent
    path = beside / "report.html" if args.html == Path() else args.html
    outputs.write(path, report_page(found), "--html")
    say(str(path))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.report.compare import compare, print_comparison, side, tables
    from shardwright.orchestrator.report.page.page import compare_page

    found = compare(side(args.a, args.fresh), side(args.b, args.fresh))
    if args.html:
        outputs.write(args.html, compare_page(found, tables(found)), "--html")
    if args.json:
        say_json(found)
    else:
        print_comparison(found, args.again)
    return 0
