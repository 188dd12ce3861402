"""The capture hook: a step of a user's script that leaves its graph to be compiled instead of
running.

A hooked step runs as it is, until NEURON_EXTRACT_GRAPHS_ONLY is set: then every signature it is
called with is traced, lowered and written as a StableHLO portable artifact, and the call returns
zeros, so that the script goes on to its next graph. `shardwright parallel-compile` sets the
variable and compiles what was left.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from shardwright.compiler.frontend.capture import artifact_of
from shardwright.compiler.support.files import write_atomic

EXTRACT_ONLY = "NEURON_EXTRACT_GRAPHS_ONLY"
DIRECTORY = "SHARDWRIGHT_GRAPHS_DIR"
DEFAULT_DIRECTORY = "graphs"
GRAPH, ABOUT = "graph.stablehlo", "graph.json"


def graphs_directory() -> Path | None:
    """Where graphs are left; None when steps are to run."""
    if os.environ.get(EXTRACT_ONLY, "").lower() in ("", "0", "false"):
        return None
    return Path(os.environ.get(DIRECTORY) or DEFAULT_DIRECTORY)


class Hooked:
    """A step with the hook. Attributes are those of the step."""

    def __init__(self, step: Callable[..., Any], name: str) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._name = name
        self._jitted: Any = None
        self._results: dict[Hashable, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, also inside of another traced one; or leave its graph, and return zeros."""
        directory = graphs_directory()
        if directory is None or _is_traced(args, kwargs):
            return self._step(*args, **kwargs)
        signature = _signature(args, kwargs)
        if signature not in self._results:
            self._results[signature] = self._leave(directory, args, kwargs)
        return _zeros(self._results[signature])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def _leave(self, directory: Path, args: Any, kwargs: Any) -> Any:
        """Write the graph of a call; the shapes of its results."""
        import jax

        is_jitted = hasattr(self._step, "trace") and hasattr(self._step, "lower")
        self._jitted = self._jitted or (self._step if is_jitted else jax.jit(self._step))
        traced = self._jitted.trace(*args, **kwargs)
        write_graph(directory, self._name, artifact_of(traced))
        return traced.out_info


def write_graph(directory: Path, name: str, artifact: bytes) -> Path:
    """Write an artifact into a folder of its own, named by its digest; the folder."""
    digest = hashlib.sha256(artifact).hexdigest()
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip(".") or "step"
    folder = directory / f"{plain}-{digest[:16]}"
    if not (folder / ABOUT).exists():
        write_atomic(folder / GRAPH, artifact)
        about = {"name": name, "digest": digest, "script": sys.argv[:1]}
        write_atomic(folder / ABOUT, json.dumps(about, indent=1).encode())  # last: it is whole
        print(f"captured {name}: {folder}", file=sys.stderr, flush=True)
    return folder


def _is_traced(args: Any, kwargs: Any) -> bool:
    import jax

    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))


def _signature(args: Any, kwargs: Any) -> Hashable:
    """What decides which graph a call has: shapes and types of arrays, other values as they are."""
    import jax

    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    return tree, tuple(_leaf_signature(leaf) for leaf in leaves)


def _leaf_signature(leaf: Any) -> Hashable:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), str(leaf.dtype), str(getattr(leaf, "sharding", ""))
    return type(leaf).__name__, leaf if isinstance(leaf, Hashable) else id(leaf)


def _zeros(results: Any) -> Any:
    """Arrays of zeros in the shapes of `results`."""
    import jax
    import jax.numpy as jnp

    def zero(leaf: Any) -> Any:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, leaf)
            return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype))
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(zero, results)
