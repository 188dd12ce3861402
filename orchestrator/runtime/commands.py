"""The verbs of the vendor's tools, by their names, and refusals of names that were withdrawn."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import FIRST_TARGET, machine_name
from shardwright.orchestrator.config.arguments import lazily

TOOLS = ("neuron-ls", "neuron-top", "neuron-monitor", "neuron-profile", "neuron-explorer")
"""The vendor's tools that are verbs here."""
WITHDRAWN = {
    "neuron-det": "neuron-ls has the devices",
    "neuron-cli": "nothing has to be reset: a simulated core is free when its process ends",
    "neuron-gatherinfo": "doctor tells what is wrong with the host, --debug what a command met",
    "neuron-dump": "doctor tells what is wrong with the host, --debug what a command met",
    "neuron-bench": "nccom times collectives",
    "neuronperf": "plan times steps, neff run with --time a file",
}
"""Names that occur in old scripts, and what does it here."""
_ANALYZE = "neuron-profile analyze"


def add_verbs(verbs: Any) -> None:
    """Add the verbs to the command."""
    ls = verbs.add_parser("neuron-ls", help="devices of the simulated machine, and who holds them")
    _machine_flags(ls)
    ls.add_argument("-j", "--json-output", action="store_true", help="as JSON")
    ls.add_argument("-w", "--wide", action="store_true", help="with processes")
    ls.add_argument("-a", "--show-all-procs", action="store_true", help="the same")
    ls.add_argument("-t", "--topology", action="store_true", help="draw the links between devices")
    ls.set_defaults(verb=_ls)
    top = verbs.add_parser("neuron-top", help="cores, memory and executions, as text")
    _machine_flags(top)
    names = ("target", "lnc")
    top.set_defaults(verb=lazily("runtime.neuron_monitor", "top", *names))
    monitor = verbs.add_parser("neuron-monitor", help="the same as JSON, every period")
    _machine_flags(monitor)
    monitor.add_argument("--period", type=float, default=5.0, help="seconds (default 5)")
    monitor.add_argument("--count", type=int, default=0, help="objects; 0: without end")
    monitor.set_defaults(
        verb=lazily("runtime.neuron_monitor", "monitor", *names, "period", "count")
    )
    for name in ("neuron-profile", "neuron-explorer"):
        _profile(verbs.add_parser(name, help="one simulated execution of a NEFF, in its parts"))
    old = verbs.add_parser("withdrawn", help="what does today what a withdrawn tool did")
    old.add_argument("name", help=", ".join(WITHDRAWN))
    old.add_argument("words", nargs=argparse.REMAINDER, help="its arguments, which are not read")
    old.set_defaults(verb=withdrawn)


def _profile(parser: Any) -> None:
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    capture = tools.add_parser("capture", help="simulate one execution and keep it")
    capture.add_argument("-n", "--neff", type=Path, required=True, metavar="FILE")
    capture.add_argument("-s", "--session-file", type=Path, default=Path("profile.ntff"))
    capture.add_argument("--target", default="", help="machine; default: the one it was made for")
    verb = lazily("runtime.profile", "capture", "neff", "session_file", "target")
    capture.set_defaults(verb=verb)
    view = tools.add_parser("view", help="show what was captured")
    view.add_argument("-n", "--neff", type=Path, metavar="FILE", help="checked, if it is given")
    view.add_argument("-s", "--session-file", type=Path, default=Path("profile.ntff"))
    forms = ("summary-text", "summary-json", "json", "perfetto")
    view.add_argument("--output-format", choices=forms, default=forms[0])
    view.add_argument("--output-file", type=Path, metavar="FILE", help="default: stdout")
    names = ("neff", "session_file", "output_format", "output_file")
    view.set_defaults(verb=lazily("runtime.profile", "view", *names))
    analyze = tools.add_parser("analyze", prefix_chars="\0")
    analyze.add_argument("words", nargs=argparse.REMAINDER)
    analyze.set_defaults(verb=withdrawn, name=_ANALYZE)


def _machine_flags(parser: Any) -> None:
    what = "instance type or family, or a JSON file"
    parser.add_argument("--target", type=machine_name, default=FIRST_TARGET, help=what)
    parser.add_argument("--lnc", type=int, default=0, help="physical cores per logical core")


def _ls(args: argparse.Namespace) -> int:
    from shardwright.orchestrator.runtime import neuron_ls

    wide = args.wide or args.show_all_procs
    return neuron_ls.run(args.target, args.lnc, args.json_output, wide, args.topology)


def withdrawn(args: argparse.Namespace) -> int:
    """Refuse a name that was withdrawn. Raises UsageError."""
    instead = WITHDRAWN.get(args.name) or (
        "the hints of `shardwright neuron-profile view --output-format summary-text`"
        if args.name == _ANALYZE
        else f"names that were withdrawn are {', '.join(WITHDRAWN)}"
    )
    raise UsageError(
        "SW_WITHDRAWN",
        f"a tool of today is required, got {args.name}, which the vendor has withdrawn",
        hint=instead,
    )
