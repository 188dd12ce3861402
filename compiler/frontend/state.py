"""The state of a task as arrays: what of its pytrees is traced, and what is kept beside.

Users' states hold more than arrays: typed keys of random numbers, and, where a module is the state
(Equinox), functions and Python numbers. Keys become their data. The rest is no state of a step, nor
are arrays without elements: it goes in as it was and has to come back so. `capture.py` and
`reference.py` see arrays alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.leaves import named_leaves
from shardwright.compiler.frontend.step_form import (
    Part,
    arguments,
    next_keys,
    sort_results,
    told,
)
from shardwright.compiler.frontend.task import TrainTask
from shardwright.compiler.frontend.user_code import location


@dataclass(frozen=True, slots=True)
class _Key:
    """A leaf that is a typed key, of a generator as `jax.random.key_impl` names it."""

    impl: Any


@dataclass(frozen=True, slots=True)
class _Kept:
    """A leaf that is no array."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Empty:
    """A leaf without elements: no program has a buffer for it."""

    shape: tuple[int, ...]
    dtype: Any


_ARRAY = object()


@dataclass(frozen=True, slots=True)
class Pytree:
    """One pytree of the state: its structure and what its leaves are, by path name."""

    tree: Any
    leaves: tuple[tuple[str, Any], ...]

    @property
    def is_key(self) -> bool:
        """Whether all of it are typed keys."""
        return bool(self.leaves) and all(isinstance(kind, _Key) for _, kind in self.leaves)

    @property
    def is_plain(self) -> bool:
        """Whether all of it is traced as it is."""
        return all(kind is _ARRAY for _, kind in self.leaves)

    def arrays(self, leaves: Sequence[Any]) -> Any:
        """The pytree of arrays; None where a leaf is kept."""
        rows = zip(leaves, self.leaves, strict=True)
        return self.tree.unflatten([_array(leaf, kind) for leaf, (_, kind) in rows])

    def whole(self, arrays: Any) -> Any:
        """The user's pytree around its arrays."""
        import jax

        if self.is_plain:
            return arrays
        given = iter(jax.tree.leaves(arrays))
        return self.tree.unflatten([_leaf(given, kind) for _, kind in self.leaves])


@dataclass(frozen=True, slots=True)
class StateTree:
    """The pytrees of a state. `arrays` has `jax.ShapeDtypeStruct` leaves, or a state's own."""

    parts: tuple[Pytree, ...]
    arrays: tuple[Any, ...]

    @property
    def _leaves(self) -> Iterator[tuple[str, Any]]:
        return (row for part in self.parts for row in part.leaves)

    @property
    def keys(self) -> frozenset[str]:
        """Names of the typed keys."""
        return frozenset(name for name, kind in self._leaves if isinstance(kind, _Key))

    @property
    def kept(self) -> dict[str, Any]:
        """What is no array, or has no elements, by name."""
        rows = ((n, kind) for n, kind in self._leaves if isinstance(kind, _Kept | _Empty))
        return {name: getattr(kind, "value", kind) for name, kind in rows}

    def whole(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The user's state around arrays in the structure of `self.arrays`."""
        return tuple(p.whole(part) for p, part in zip(self.parts, arrays, strict=True))


def state_tree(task: TrainTask) -> StateTree:
    """The abstract state, one pytree per name of `task.state_names`; allocates nothing.

    Raises UsageError when `init` does not return a tuple of as many.
    """
    import jax

    if task.state is not None:
        return split_state(task, task.state)
    assert task.init is not None
    init, found = task.init, list[StateTree]()

    def arrays(key: Any) -> tuple[Any, ...]:
        found.append(split_state(task, init(key)))
        return found[-1].arrays

    shapes = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    return StateTree(found[-1].parts, shapes)


def split_state(task: TrainTask, state: Any) -> StateTree:
    """A state of the task, as `init` and `step` return it. Raises UsageError for another tuple."""
    names = task.state_names
    if not isinstance(state, tuple) or len(state) != len(names):
        given = f"{type(state).__name__}" + (f" of {len(state)}" if type(state) is tuple else "")
        raise UsageError(
            "SW_TASK_STATE",
            f"init requires a tuple of {len(names)} ({', '.join(names)}), got {given}",
            hint='return (params, opt_state), or set state_names: ("state",) for (state,)',
        )
    pairs = [split_pytree(name, part) for name, part in zip(names, state, strict=True)]
    return StateTree(tuple(p for p, _ in pairs), tuple(arrays for _, arrays in pairs))


def array_step(
    task: TrainTask,
    tree: StateTree,
    said: list[str] | None = None,
    kept: Collection[int] = (),
) -> Callable[..., Any]:
    """The step of a `normal` task on arrays, `(*state, batch) -> (*state, metrics)`, the metrics by
    path; called `step`, so that every name stack begins with `jit(step)`. `said` is told what was
    found otherwise than usual. What it returns of the leaves `kept`, by number, is what it was
    given: they are frozen.

    It raises UsageError when what is no array comes back changed, and as `sort_results`.
    """
    names, fresh = task.state_names, task.fresh_keys

    def step(*args: Any) -> Any:
        before = dict(zip(names, tree.whole(args[: len(names)]), strict=True))
        parts = [Part.of(name, before[name]) for name in names if name not in fresh]
        onward = {}
        for name in fresh:
            before[name], onward[name] = next_keys(before[name])
        results = task.step(*arguments(task, before, args[len(names)]))
        with at(task.step):
            found = sort_results(parts, results, task.results, task.loss, task.mode)
        if said is not None:
            said[:] = told(task, parts, found)
        after = before | onward | dict(found.state)
        with at(task.step):
            split = split_state(task, tuple(after[name] for name in names))
            _check_kept(tree.kept, split.kept)
        arrays = _with_given(split.arrays, args[: len(names)], kept) if kept else split.arrays
        return (*arrays, found.named_metrics)

    return step


def _with_given(after: Any, given: Any, kept: Collection[int]) -> Any:
    """A pytree with the leaves `kept`, by number, of another."""
    import jax

    leaves, structure = jax.tree.flatten(after)
    pairs = zip(leaves, jax.tree.leaves(given), strict=True)
    return structure.unflatten([b if n in kept else a for n, (a, b) in enumerate(pairs)])


@contextmanager
def at(step: Callable[..., Any]) -> Iterator[None]:
    """Give what is refused about a step the line where it begins."""
    try:
        yield
    except UsageError as error:
        d = error.diagnostic
        raise UsageError(d.code, d.message, d.loc or location(step), d.hint) from error


def _check_kept(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in (*before, *after):
        old, new = (f"{kept[name]!r}" if name in kept else "nothing" for kept in (before, after))
        if name not in before or name not in after or not _is_same(before[name], after[name]):
            raise UsageError(
                "SW_TASK_RESULT",
                f"step requires {name}, which is no array, back as it was: {old}, got {new}",
                hint="what a step changes is an array: jnp.asarray(value) in init",
            )


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and bool(old == new))


def split_pytree(prefix: str, part: Any) -> tuple[Pytree, Any]:
    """One pytree as what is traced of it: its structure, and its arrays."""
    import jax

    leaves, tree = jax.tree.flatten(part)
    names = [name for name, _ in named_leaves(prefix, part)]
    kinds = [_kind(leaf, fixed) for leaf, fixed in zip(leaves, _of_modules(part), strict=True)]
    split = Pytree(tree, tuple(zip(names, kinds, strict=True)))
    return split, part if split.is_plain else split.arrays(leaves)


def _of_modules(part: Any) -> Iterator[bool]:
    """Per leaf, whether it is of an Equinox module: `eqx.filter_jit` traces arrays alone, so that a
    rate of dropout and a flag are Python numbers, as code that branches on them requires.
    """
    import jax

    equinox = sys.modules.get("equinox")
    module: type = getattr(equinox, "Module", type(None))
    if equinox is None:
        yield from (False for _ in jax.tree.leaves(part))
        return
    for node in jax.tree.leaves(part, is_leaf=lambda node: isinstance(node, module)):
        yield from (isinstance(node, module) for _ in jax.tree.leaves(node))


def _kind(leaf: Any, is_of_module: bool) -> Any:
    import jax

    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return _Key(_generator(leaf))
        return _ARRAY if math.prod(leaf.shape) else _Empty(tuple(leaf.shape), leaf.dtype)
    is_number = isinstance(leaf, bool | int | float | complex)
    return _ARRAY if is_number and not is_of_module else _Kept(leaf)


def _generator(key: Any) -> Any:
    """The generator of a key, or of the shape of one, which jax tells of keys alone."""
    import jax

    found: list[Any] = []
    jax.eval_shape(lambda k: found.append(jax.random.key_impl(k)), key)
    return found[0]


def _array(leaf: Any, kind: Any) -> Any:
    """What is traced of a leaf; shapes stay shapes."""
    import jax

    if isinstance(kind, _Kept | _Empty):
        return None
    if not isinstance(kind, _Key):
        return leaf
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return jax.eval_shape(jax.random.key_data, leaf) if is_shape else jax.random.key_data(leaf)


def _leaf(arrays: Iterator[Any], kind: Any) -> Any:
    """The user's leaf, of the next array where it is made of one."""
    import jax
    import jax.numpy as jnp

    if isinstance(kind, _Kept):
        return kind.value
    if isinstance(kind, _Empty):
        return jnp.zeros(kind.shape, kind.dtype)
    array = next(arrays)
    if not isinstance(kind, _Key):
        return array
    wrap = partial(jax.random.wrap_key_data, impl=kind.impl)
    is_shape = isinstance(array, jax.ShapeDtypeStruct)
    return jax.eval_shape(wrap, array) if is_shape else wrap(array)
