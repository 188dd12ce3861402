"""What a job stores and reads again, changed behind right checksums: plans, reports, journals of
sweeps, and entries of the cache of every kind."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import random
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgpack

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.outline.unit import unpack_function
from shardwright.orchestrator.cache import About, Cache, open_cache
from shardwright.orchestrator.cache.entry import EntryName, pack_entry, read_about, unpack_entry
from shardwright.orchestrator.config.config import CacheConfig
from shardwright.orchestrator.keys.reads import observed
from shardwright.orchestrator.report.compare import compare, read_report, tables
from shardwright.orchestrator.report.page.page import compare_page, report_page
from shardwright.orchestrator.report.plan_screen import screen_lines
from shardwright.orchestrator.report.screen import run_screen
from shardwright.orchestrator.report.shape import check_report, check_whatif
from shardwright.orchestrator.road import plan_cache
from shardwright.orchestrator.service.executor import WorkUnit
from shardwright.orchestrator.service.unit_errors import refusal_kind, stored_refusal
from shardwright.orchestrator.whatif import advised
from shardwright.orchestrator.whatif.journal import Journal, _digest
from shardwright.orchestrator.whatif.rows import METRICS, ordered, pareto, row_of
from shardwright.sharding.partition.partitioned import decode_partitioned
from shardwright.sim_cluster.timing.timing_unit import decode_answer
from tests.support.forge.documents import (
    changed_bytes,
    changed_document,
    changed_msgpack,
    json_text,
)
from tests.support.forge.pool import Judge
from tests.support.plans import report_of

Stored = dict[str, Any]
"""`reports`, and `units`: packed results by kind."""
_KEY = "0" * 64
_NUMERICS = {
    "steps": 2,
    "losses": [5.1, 4.9],
    "reference_losses": [5.1, 4.9],
    "worst_loss_error": 1e-7,
    "worst_loss": {"step": "step 2", "error": 1e-7, "allowed": 1e-5, "note": ""},
    "worst_param_error": {"leaf": "params/w", "error": 1e-7, "allowed": 1e-5, "note": ""},
    "worst_l0": {"program": "forward", "value": "x", "error": 1e-7, "allowed": 1e-5, "note": ""},
    "undecided": ["params/k/bias"],
    "rounding": {"samples": 3, "times": 4},
    "parts": {"count": 2, "mean_loss": 5.1, "loss": 10.2, "place": "model.py:7"},
    "bound": 1e-5,
    "passed": True,
    "l0": {"forward": 1e-7},
    "cast": "none",
}


def plans_judge(given: tuple[str, Stored]) -> Judge:
    """Entries of the plan cache, with the screens that are made of them."""
    folder, material = given
    cache = Cache(Path(tempfile.mkdtemp(dir=folder, prefix=f"{os.getpid()}-")))
    reports: list[Any] = material["reports"]

    def judge(number: int) -> str:
        dice = random.Random(number)
        kind, source, check = _plan_source(reports, dice)
        data = changed_document(source, json_text, dice)
        cache.put(kind, _KEY, data, About("plan", {"a": "b"}))
        found, _ = plan_cache.stored(cache, kind, _KEY, check)
        if found is None:
            return "set aside"
        if kind == plan_cache.READS:
            return _ended(lambda: [observed(names) for names in found])
        shown = found if kind == plan_cache.KIND else {**reports[0], "whatif": found}
        return _ended(lambda: _shown(shown))

    return judge


def _plan_source(reports: list[Any], dice: random.Random) -> tuple[str, Any, Callable[[Any], None]]:
    kind = dice.random()
    if kind < 0.1:
        return plan_cache.READS, _READ, plan_cache._check_lists
    if kind < 0.25:
        return advised.KIND, _WHATIF, check_whatif
    return plan_cache.KIND, dice.choice(reports), check_report


_READ = [
    ["read /a/b.py", "listed /a", "looked for /a/b", "environment HOME", "package jax"],
    ["read /c"],
]
_WHATIF = {
    "tried": [
        {
            "change": "strategy.remat=none",
            "status": "fits",
            "helps": True,
            "peak_bytes": 2**30,
            "global_batch": 8,
            "same_batch": True,
            "step_time_s": 1.0,
            "tokens_per_s": 100.0,
            "time_change": -0.1,
            "usd_per_1e6_tokens": 1.5,
            "cost_change": -0.1,
        },
        {"change": "mesh.tp=2", "status": "refused", "helps": False, "code": "X", "message": "y"},
    ],
    "left": ["mesh.tp=4"],
    "stored_s": 1.7e9,
}
_AGE = {"stored_s": 1.7e9, "again": "shardwright plan --fresh"}


def _shown(report: dict[str, Any]) -> None:
    """Everything that is made of a plan."""
    plan_cache.exit_code(report)
    row_of(_KEY, {}, report).flat()
    screen_lines(report, 80)
    report_page(report)


def reports_judge(given: tuple[str, Stored]) -> Judge:
    """Files of reports, as `report` and `compare` take them."""
    folder, material = given
    own = Path(tempfile.mkdtemp(dir=folder, prefix=f"{os.getpid()}-"))
    first = material["reports"][0]
    files = {"provenance": {**first["provenance"], "files": {"bundle": "x"}, **_AGE}}
    sources = [*material["reports"], {**first, **files, "numerics": _NUMERICS}]

    def judge(number: int) -> str:
        dice = random.Random(number)
        path = own / "report.json"
        path.write_bytes(changed_document(dice.choice(sources), json_text, dice, "schema"))

        def used() -> None:
            found = read_report(path)
            with redirect_stdout(io.StringIO()):
                (run_screen if "numerics" in found else _shown)(found)
            changes = compare(first, found)
            compare_page(changes, tables(changes))

        return _ended(used)

    return judge


def journals_judge(given: tuple[str, Stored]) -> Judge:
    """Journals of sweeps: rows with right digests."""
    folder, material = given
    path = Path(tempfile.mkdtemp(dir=folder, prefix=f"{os.getpid()}-")) / "journal"
    reports = material["reports"]
    rows = [row_of(_KEY, {"mesh.tp": "2"}, r).as_dict() | {"stored_s": 1.7e9} for r in reports]

    def judge(number: int) -> str:
        dice = random.Random(number)
        data = changed_document(copy.deepcopy(dice.choice(rows)), json.dumps, dice)
        try:
            row = json.loads(data)
            data = json.dumps({**row, "digest": _digest(row)}).encode()
        except (ValueError, TypeError, RecursionError):
            pass  # it has no digest that fits
        path.write_bytes(data + b"\n")

        def read() -> None:
            found = list(Journal(path).read().values())
            for metric in METRICS.values():
                ordered(found, metric)
                pareto(found, metric, METRICS["peak_gib"])
                [metric.text(row) for row in found]

        return _ended(read)

    return judge


def entries_judge(given: tuple[str, Stored]) -> Judge:
    """Entries of the cache: their frame, and results of units in them."""
    folder, material = given
    cache = Cache(Path(tempfile.mkdtemp(dir=folder, prefix=f"{os.getpid()}-")))
    units: list[tuple[str, bytes]] = material["units"]

    def judge(number: int) -> str:
        dice = random.Random(number)
        kind, payload = dice.choice(units)
        name = EntryName(refusal_kind("compile") if kind == "refusal" else kind, _KEY)
        data = _changed_entry(name, payload, dice)
        path = cache.path(name.kind, _KEY)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

        def used() -> None:
            read_about(path)
            if kind == "refusal":
                stored_refusal(cache, WorkUnit("compile", _KEY, "x", b""))
                return
            stored = cache.get(kind, _KEY)
            if stored is not None:
                _READERS[kind](stored)

        return _ended(used)

    return judge


_READERS: dict[str, Callable[[bytes], object]] = {
    "compile": unpack_function,
    "partition": decode_partitioned,
    "time": decode_answer,
}


def _changed_entry(name: EntryName, payload: bytes, dice: random.Random) -> bytes:
    kind = dice.random()
    if kind < 0.8:
        return pack_entry(name, changed_msgpack(payload, dice), About("x", {"a": "b"}))
    data = pack_entry(name, payload, About("x", {"a": "b"}))
    if kind < 0.9:
        return changed_bytes(data, dice)
    assert unpack_entry(data) is not None
    size = int.from_bytes(data[40:44], "little")
    about = changed_msgpack(data[44 : 44 + size], dice)
    rest = len(about).to_bytes(4, "little") + about + payload
    return data[:8] + hashlib.sha256(rest).digest() + rest


def material(folder: Path) -> Stored:
    """The report of a small plan, and what its units answered."""
    place = str(folder / "cache of the material")
    own = folder / "job"
    own.mkdir()
    report = report_of(
        own,
        2,
        (f"cache.dir={place}",),
        mesh={"pp": 2},
        strategy={"name": "llm-training"},
        cluster={"target": "trn1.2xlarge"},
        faults={"slow_cores": "1:1.3"},
    )
    units = [("refusal", refusal_payload())]
    store = open_cache(CacheConfig(dir=place))
    for kind in _READERS:
        found = sorted(
            (e for e in store.local.entries() if e.name.kind == kind), key=lambda e: e.size
        )
        payloads = [store.get(kind, e.name.key) for e in found[:3]]
        units += [(kind, payload) for payload in payloads if payload is not None]
    assert {kind for kind, _ in units} == {"refusal", *_READERS}
    return {"reports": [json.loads(json.dumps(report))], "units": units}


def refusal_payload() -> bytes:
    """A stored refusal."""
    packed: bytes = msgpack.packb(["CompileError", "NCC_X", "message", ["a.py", 3, ""], "hint"])
    return packed


def _ended(work: Callable[[], object]) -> str:
    try:
        work()
    except DiagnosticError as error:
        return error.code
    return "done"
