"""What the leaves of the step's state were taken for, as the fewest paths that say it.

A wrong role is a wrong plan: a weight that counts as optimizer state is gathered for nobody. So a
user's own step always shows them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from shardwright.compiler.program import BufferInfo
from shardwright.orchestrator.report.text import Facts

STATE_ROLES = ("parameter", "optimizer", "cache", "rng")


def role_rows(buffers: Iterable[BufferInfo]) -> list[Facts]:
    """Per role of state, the paths below which every leaf has it: `{role, paths, leaves,
    elements}`."""
    state = [b for b in buffers if b.role in STATE_ROLES and b.initial == "given"]
    paths = _paths([(b.name.split("/"), b.role) for b in state])
    return [
        {
            "role": role,
            "paths": paths[role],
            "leaves": len(own),
            "elements": sum(b.global_type.num_elements for b in own),
        }
        for role in STATE_ROLES
        if (own := [b for b in state if b.role == role])
    ]


def _paths(leaves: Sequence[tuple[list[str], str]], depth: int = 1) -> dict[str, list[str]]:
    """The shortest paths, of `depth` parts or more, that tell the roles of all leaves."""
    below: dict[str, list[tuple[list[str], str]]] = defaultdict(list)
    for parts, role in leaves:
        below["/".join(parts[:depth])].append((parts, role))
    found: dict[str, list[str]] = defaultdict(list)
    for path, rows in below.items():
        roles = {role for _, role in rows}
        if len(roles) == 1 or max(len(parts) for parts, _ in rows) <= depth:
            found[rows[0][1]].append(path)
            continue
        for role, deeper in _paths(rows, depth + 1).items():
            found[role] += deeper
    return found
