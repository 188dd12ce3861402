"""A Ray cluster of three nodes that a job joins, in a process of its own, since Ray reads its
settings once per process. `python -m tests.support.cluster_job FOLDER`; prints one JSON object.

Everything it starts ends with it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.orchestrator.cache import Cache
from shardwright.orchestrator.service.ray_backend import RayExecutor
from shardwright.orchestrator.service.service import UnitService
from tests.support.scripted_units import answer, scripted, unit

NODES, UNITS = 3, 30
COMPUTED = "ray_shardwright_units_computed_total"
# A lost node is noticed within about two seconds instead of half a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_timeout_ms": 1000,
}
_WHERE = 'tr "\\0" "\\n" < /proc/$worker/environ | grep ^PYTHONPATH= > "$answer.where"'


@contextmanager
def cluster(folder: Path) -> Iterator[Any]:
    """Three nodes of one CPU; RAY_ADDRESS names them."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "_system_config": _HEALTH, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(NODES - 1):
            made.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = made.address
        yield made
    finally:
        made.shutdown()


def main(folder: Path) -> dict[str, Any]:
    """A job whose cluster loses a node in the middle."""
    where = answer(b"", _WHERE).replace("printf", f'cp "$answer.where" {folder}/where-$$; printf')
    units = [unit(f"u{n}", answer(b"%d" % n, "sleep 0.2")) for n in range(UNITS)]
    with scripted(folder), cluster(folder) as nodes:
        with_where = [unit("where", where), *units]
        lost: list[object] = []

        def watch(*_: object) -> None:
            if not lost and len(_workers(service)) == NODES:  # each node has done a unit
                lost.append(nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False))

        cache = Cache(folder / "cache")
        with UnitService(lambda: RayExecutor(NODES), cache, progress=watch) as service:
            refusal = _refusal()
            results = service.run(with_where)
            counted = _metrics(len(with_where))
        return {
            "refusal": refusal,
            "lost": len(lost),
            "results": [results[u.key].decode() for u in units],
            "attempts": [row.attempts for row in service.rows],
            "workers": sorted(_workers(service)),
            "where": [p.read_text() for p in folder.glob("where-*")],
            "metrics": counted,
        }


def _workers(service: UnitService) -> set[str]:
    return {row.worker.partition(":")[0] for row in service.rows}


def _refusal() -> str:
    """What a request for more than the cluster has is told; it must not wait."""
    try:
        RayExecutor(NODES + 1).close()
    except UsageError as error:
        return str(error)
    return ""


def _metrics(units: int) -> dict[str, float]:
    """Our counters on the metrics page of the head, which comes late and in parts: when it has
    counted all `units`, or after 40 s as it is then."""
    import ray

    alive = [n for n in ray.nodes() if n["Alive"]]
    ports = {n["MetricsExportPort"] for n in alive}
    until = time.monotonic() + 40
    found: dict[str, float] = {}
    while time.monotonic() < until and (len(found) < 2 or found.get(COMPUTED, 0) < units):
        for port in ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                lines = page.read().decode().splitlines()
            for line in lines:
                name = line.partition("{")[0]
                if name.startswith("ray_shardwright_units"):
                    found[name] = float(line.rpartition(" ")[2])
        time.sleep(1)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
