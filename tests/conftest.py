"""Settings of the test process, made before anything imports NumPy or jax."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from threadpoolctl import threadpool_limits

# Simulated ranks run on threads of ours and tests in several processes, so BLAS must not add its
# own threads: they wait by spinning, more than half of the processor time of tests that multiply.
# The variables are for processes that tests start: they are read when NumPy is loaded, and here a
# plugin of pytest (jaxtyping) has loaded it.
for library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
threadpool_limits(1)
# XLA is asked for eight CPU devices: it is the oracle of eight-way partitioning.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# XLA compiles each reference for one run: not optimizing it, and the older emitters of fused loops,
# save more than a third of the processor time of tests against JAX.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"


class OnlyBelowShardwright:
    """The checkout is on the path of tests, for `tests` itself: none of our packages is found at
    its top, where no installation has them."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in ("collectives", "compiler", "orchestrator", "sharding", "sim_cluster"):
            raise ModuleNotFoundError(f"{name} is imported as shardwright.{name}", name=name)


sys.meta_path.insert(0, OnlyBelowShardwright())
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
# The collector looks for cycles among everything alive, which jax and the tests themselves make
# much: a tenth of all processor time with Python's own threshold of 700, a twentieth with 10,000.
gc.set_threshold(200_000, 20, 10)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Units are kept in one folder for all processes of a test run: a test finds what another has
    compiled, and none touches the user's cache. One that is about compiling names its own."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_COMPILE_CACHE_URL", str(shared / "cache"))
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):
            # Tests start some hundred interpreters, and each would compile every module it imports.
            patch.delenv("PYTHONDONTWRITEBYTECODE")
            patch.setenv("PYTHONPYCACHEPREFIX", str(shared / "modules"))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` (`tests/golden/`)."""
    text = "write golden files anew and say what changed"
    parser.addoption("--update-golden", action="store_true", help=text)


LONGEST_FIRST = (
    "docs/test_pages.py",
    "system/test_ray_jobs.py",
    "system/test_ray.py",
    "golden/test_golden_cells.py",
    "sharding/test_strategy_matrix.py",
    "system/test_gallery.py",
    "orchestrator/test_service_faults.py",
    "system/test_rounding_verdict.py",
    "orchestrator/test_forty_changes.py",
    "test_first_command.py",
    "system/test_models.py",
    "system/test_whole_road.py",
    "ops/test_every_type.py",
    "system/test_injected_faults.py",
    "sharding/test_pipeline_values.py",
    "compiler/test_flash_corpus.py",
    "models/test_vision_models.py",
    "system/test_value_recovery.py",
    "compiler/index_ops/test_random_numbers_of_dims.py",
    "compiler/test_ladders.py",
    "system/test_random_graphs.py",
    "system/test_random_cores.py",
    "compiler/index_ops/test_ordering.py",
    "compiler/lower/test_llama_bytes.py",
    "sharding/test_uneven.py",
    "system/test_forge.py",
    "sharding/test_reference_ranks.py",
    "compiler/frontend/test_frontend_steps.py",
    "compiler/frontend/test_model_families.py",
    "compiler/ir/test_training_step.py",
    "system/test_overlap_road.py",
    "ops/test_reference_vs_jax.py",
    "compiler/index_ops/test_index_models.py",
    "sharding/test_shardy.py",
    "sharding/test_layer_shifts.py",
    "orchestrator/test_validate.py",
    "sharding/test_xla_partitioner.py",
    "test_tiny.py",
)
"""Files of about 20 seconds or more, of the quick tests or of the matrix. A file stays in one
process, so a long one that starts late would leave the other processes idle at the end.
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, everything else as it was found; cells of matrices say of how many."""
    place = {config.rootpath / "tests" / name: at for at, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    for item in items:
        if cells := item.get_closest_marker("cells"):
            item.user_properties.append(("cells", cells.args))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many cells of the matrices in values this run had: none is left out in silence. And what
    became of golden files that were written."""
    told = [
        (key, value, outcome)
        for outcome in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.getreports(outcome)
        for key, value in getattr(report, "user_properties", ())  # none of a file that fails
    ]
    ran = Counter((*value, outcome) for key, value, outcome in told if key == "cells")
    for (name, total, outcome), number in sorted(ran.items()):
        terminalreporter.write_line(f"cells of {name}: {number} of {total} {outcome}")
    golden = [value for key, value, outcome in told if key == "golden" and outcome == "passed"]
    for text in sorted(filter(None, golden)):
        terminalreporter.write_line(text)
    if golden:
        changed = sum(map(bool, golden))
        terminalreporter.write_line(f"golden files: {changed} of {len(golden)} written anew")


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the collector need not look at them again."""
    gc.collect()
    gc.freeze()
