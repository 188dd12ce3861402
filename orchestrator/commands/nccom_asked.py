"""What `shardwright nccom` is asked, in nccom-test's arguments: sizes, groups, pairs, hosts.

Source: the tool's user guide (SDK 2.29). What its page leaves open is said where it is decided.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from shardwright.collectives.ops import CollectiveError, CollectiveKind
from shardwright.collectives.timing.runtimes import runtime_named
from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.machine.target import load_target, logical
from shardwright.orchestrator.config.arguments import known_word
from shardwright.orchestrator.config.collective_settings import parse_bytes, settings
from shardwright.orchestrator.validation.published_collectives import ELEMENT_BYTES, KINDS
from shardwright.sim_cluster.network.what_if import WhatIf

RAGGED = {
    "alltoallv": CollectiveKind.ALL_TO_ALL,
    "all_to_all_v": CollectiveKind.ALL_TO_ALL,
    "allgv": CollectiveKind.ALL_GATHER,
    "all_gather_v": CollectiveKind.ALL_GATHER,
}
"""Operations whose ranks send different amounts: what they share out need not divide."""
OPERATIONS = KINDS | RAGGED
_DIVIDED = ("allg", "redsct", "alltoall")
_METADATA = ("send_counts", "send_displs", "recv_counts", "recv_displs")
CHECKS = ("random", "all_ones")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for, as given, by the names of its flags."""

    op: str
    target: str
    lnc: int
    nworkers: int
    nnodes: int
    minbytes: str
    maxbytes: str
    stepbytes: str
    stepfactor: str
    datatype: str
    profile: str
    runtime: str
    set: Sequence[str]
    custom_replica_groups: str
    custom_src_target_pairs: str
    data_parallel_dimension: int
    alltoallv_metadata: str
    iters: int
    warmup_iters: int
    neff_iters: int
    neff_warmup_iters: int
    check: str
    seed: int
    stats: Sequence[str]
    hosts: Sequence[str]
    hosts_file: str
    slurm_mode: bool
    slurm_job_id: str

    @property
    def kind(self) -> CollectiveKind:
        """The collective. Raises UsageError for an unknown operation."""
        return OPERATIONS[known_word(self.op, OPERATIONS, "nccom")]

    @property
    def element_bytes(self) -> int:
        """Of the type of the data. Raises UsageError for an unknown type."""
        return ELEMENT_BYTES[known_word(self.datatype, ELEMENT_BYTES, "--datatype")]

    @property
    def iterations(self) -> tuple[int, int]:
        """How many operations are measured, and how many run before or between them.

        Raises UsageError for no operation at all.
        """
        measured, warmup = self.iters, self.warmup_iters
        times, before = max(1, self.neff_iters), self.neff_warmup_iters
        if measured < 1 or min(warmup, self.neff_iters, before) < 0:
            given = f"{measured}, {warmup}, {self.neff_iters}, {before}"
            raise UsageError(
                "SW_USAGE",
                "--iters requires at least 1, --warmup_iters, --neff_iters and --neff_warmup_iters"
                f" at least 0, got {given}",
            )
        return measured * times, warmup * times + (measured + warmup) * before


def what_if(request: Request) -> WhatIf:
    """The collective. Raises UsageError for what is not understood or does not fit."""
    try:
        runtime = runtime_named(request.runtime)
    except CollectiveError as error:
        raise UsageError("SW_USAGE", f"--runtime: {error}") from error
    pairs = _lists(request.custom_src_target_pairs, "--custom-src-target-pairs", "src_target_pairs")
    if pairs and any(len(pair) != 2 for pair in pairs):
        raise UsageError("SW_USAGE", f"--custom-src-target-pairs requires pairs, got {pairs}")
    if request.op == "sendrecv" and not pairs:
        pairs = tuple((rank, rank + 1) for rank in range(request.nworkers - 1))
    kind = request.kind
    whole = WhatIf(
        target=logical(load_target(request.target), request.lnc, key="--lnc"),
        kind=kind,
        ranks=request.nworkers,
        instances=request.nnodes,
        groups=_lists(request.custom_replica_groups, "--custom-replica-groups", "replica_groups"),
        pairs=tuple((source, target) for source, target in pairs),
        shares=_shares(request, kind),
        runtime=runtime,
        settings=settings(request.set, "--set"),
    )
    if not request.data_parallel_dimension:
        return whole
    return _in_groups(whole, request.data_parallel_dimension)


def _in_groups(whole: WhatIf, size: int) -> WhatIf:
    """The ranks in groups of `size`, each as far apart as can be: of as many instances as a group
    has ranks, one of each (the page names that as the purpose; the order is our reading).

    Raises UsageError for a size that does not divide, or groups that are given besides.
    """
    (ranks,) = whole.replica_groups().groups if not whole.groups else ((),)
    if not ranks or size < 1 or len(ranks) % size:
        raise UsageError(
            "SW_USAGE",
            "--data-parallel-dimension requires a divisor of the ranks and no"
            f" --custom-replica-groups, got {size} of {whole.ranks}",
        )
    count = len(ranks) // size
    groups = tuple(ranks[first::count] for first in range(count))
    return replace(whole, groups=groups)


def hosts_of(request: Request) -> list[str]:
    """The hosts that the run is asked to be on, one per instance: given, from a file, or those of a
    slurm allocation, whose job is named or made. None are needed: instances are simulated.

    Raises UsageError for fewer hosts than instances, or both ways at once.
    """
    given = list(request.hosts)
    if request.hosts_file:
        given += _host_lines(request.hosts_file)
    if request.slurm_mode and given:
        raise UsageError("SW_USAGE", "--slurm-mode requires no --hosts and no --hosts-file")
    if request.slurm_mode:
        job = request.slurm_job_id
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "") if job not in ("", "alloc") else ""
        count = int(nodes) if nodes.isdigit() else request.nnodes
        given = [f"slurm-{job or 'alloc'}-{number}" for number in range(count)]
    if given and len(given) < request.nnodes:
        raise UsageError(
            "SW_USAGE",
            f"-N {request.nnodes} requires as many hosts, got {len(given)}: {', '.join(given)}",
            hint="name a host per instance, or none: instances are simulated",
        )
    return given[: request.nnodes]


def _host_lines(file: str) -> list[str]:
    try:
        lines = Path(file).expanduser().read_text().splitlines()
    except OSError as error:
        raise UsageError("SW_USAGE", f"--hosts-file requires a file, got {file!r}") from error
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def _shares(request: Request, kind: CollectiveKind) -> tuple[tuple[Fraction, ...], ...]:
    """What every rank sends to each, of its buffer; none where all send alike."""
    entries = _metadata(request, kind)
    rows = [tuple(Fraction(n, sum(e["send_counts"])) for n in e["send_counts"]) for e in entries]
    return tuple(rows * len(rows[0]) if len(rows) == 1 else rows)


def _metadata(request: Request, kind: CollectiveKind) -> list[dict[str, list[int]]]:
    """The entries of the file of counts: one of all ranks, or one of each. Raises UsageError."""
    text, flag = request.alltoallv_metadata, "--alltoallv-metadata"
    if not text:
        return []
    if request.op not in RAGGED or kind is not CollectiveKind.ALL_TO_ALL:
        raise UsageError("SW_USAGE", f"{flag} requires alltoallv, got {request.op}")
    data = _json(text, flag, "alltoallv_metadata")
    try:
        found = [{key: [int(n) for n in entry[key]] for key in _METADATA} for entry in data]
    except (TypeError, ValueError, KeyError) as error:
        raise _unread(text, flag, f"entries with {', '.join(_METADATA)}") from error
    sound = [
        min(map(min, e.values())) >= 0 and sum(e["send_counts"]) > 0
        for e in found
        if all(e.values())
    ]
    lengths = {len(numbers) for entry in found for numbers in entry.values()}
    if len(sound) != len(found) or not all(sound) or len(lengths) != 1:
        raise _unread(text, flag, "as many counts as a group has ranks, of which one is above 0")
    if len(found) not in (1, *lengths):
        raise _unread(text, flag, f"one entry, or one of each of {min(lengths)} ranks")
    return found


def sizes(request: Request, ranks: int) -> list[int]:
    """Sizes from the smallest to the largest, by factor or by step, each as whole elements that
    the `ranks` of a group share out.

    Raises UsageError for a range that is empty or does not grow.
    """
    first = parse_bytes(request.minbytes, "--minbytes")
    last = parse_bytes(request.maxbytes or request.minbytes, "--maxbytes")
    if first > last:
        raise UsageError("SW_USAGE", f"--maxbytes requires at least {first}, got {last}")
    unit = _unit(request, ranks)
    return [_rounded(size, unit) for size in _series(first, last, request)]


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit if unit > 1 else size


def _unit(request: Request, ranks: int) -> int:
    """Bytes of which a size is a multiple; 1 for as it is given.

    Inferred: where ranks share out a buffer, every one has as many elements. Counts that are given
    are shares of the buffer, of what is sent and of what is received: in units of their greatest
    common divisor, the least buffer that both divide, which makes 1,048,608 B of 1 MB as on the
    page.
    """
    kind = request.kind
    if kind not in (KINDS[name] for name in _DIVIDED) or request.op in ("allgv", "all_gather_v"):
        return 1
    counts = [e[key] for e in _metadata(request, kind) for key in ("send_counts", "recv_counts")]
    if not counts:
        return ranks * request.element_bytes
    least = math.gcd(*(n for row in counts for n in row))
    return math.lcm(*(max(1, sum(row) // least) for row in counts)) * request.element_bytes


def _series(first: int, last: int, request: Request) -> Iterator[int]:
    factor = float(request.stepfactor) if _is_number(request.stepfactor) else 0.0
    if request.stepfactor and factor <= 1:
        raise UsageError("SW_USAGE", f"--stepfactor requires above 1, got {request.stepfactor}")
    given = request.stepbytes
    step = parse_bytes(given, "--stepbytes") if given else max(1, (last - first) // 10)
    size = first
    while size <= last:
        yield size
        size = max(size + 1, int(size * factor)) if factor else size + step


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"\d+(\.\d+)?", text))


def _lists(text: str, flag: str, key: str) -> tuple[tuple[int, ...], ...]:
    """Lists of ranks, as JSON or in a JSON file, bare or under the tool's key; its own files have
    one list more around those of pairs."""
    if not text:
        return ()
    lists = _json(text, flag, key)
    try:
        if lists and all(isinstance(each[0], list) for each in lists):
            lists = [row for each in lists for row in each]
        return tuple(tuple(int(rank) for rank in each) for each in lists)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise _unread(text, flag, "a JSON list of lists of ranks", key) from error


def _json(text: str, flag: str, key: str) -> Any:
    """What a flag has as JSON or names as a file of it, bare or under `key`."""
    try:
        data = json.loads(text if text.lstrip()[:1] in "[{" else Path(text).read_text())
        return data[key] if isinstance(data, Mapping) else data
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unread(text, flag, "a JSON list of lists of ranks", key) from error


def _unread(text: str, flag: str, needed: str, key: str = "replica_groups") -> UsageError:
    return UsageError(
        "SW_USAGE",
        f"{flag} requires {needed}, or a file of one, got {text!r}",
        hint=f'for example {{"{key}": [[0, 1], [2, 3]]}}',
    )
