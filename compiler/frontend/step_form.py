"""How a step is called, and which of its results is what.

A task's step is `(*state, batch) -> (*state, metrics)`. People write others as well: the batch as
several arguments, a key that is not returned, the loss before the state. How a step is called is
read from its signature; what its results are is found while it is traced, by names, shapes and
types: a result with those of a part of the state is its next value, the rest are metrics, and one
of them is the loss. What is found otherwise than usual is told (`told`).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.frontend.leaves import Leaf, Signature, form, named_leaves, signature
from shardwright.compiler.frontend.task import BATCH, Mode, TrainTask

LOSS, METRICS = "loss", "metrics"
MOST_SHOWN = 6  # results that a message lists (our choice)
_KEY = re.compile(r"(^|_)(p?rngs?|keys?)(_|$)")
"""What arguments that are keys of random numbers are called."""


def is_key_name(name: str) -> bool:
    """Whether an argument is called as keys of random numbers are."""
    return _KEY.search(name) is not None


def normal(task: TrainTask) -> TrainTask:
    """The task with `arguments`, and with a key for each argument that its step is not given."""
    if task.captured is not None:
        return task
    sources = task.arguments or _sources(task)
    fresh = tuple(s for s in sources if s not in task.state_names and not is_of_batch(s))
    found = task if task.arguments else replace(task, arguments=sources)
    return with_keys(found, fresh) if fresh else found


def is_of_batch(source: str) -> bool:
    """Whether an entry of `TrainTask.arguments` is the batch, or a piece of it."""
    return source.partition("/")[0] == BATCH


def with_keys(task: TrainTask, fresh: Sequence[str]) -> TrainTask:
    """The task with a typed key for each of `fresh` in its state."""
    import jax

    from shardwright.compiler.frontend.generator import implementation  # which takes tasks

    init, count = task.init, len(fresh)

    def keys(key: Any) -> tuple[Any, ...]:
        own = (jax.random.fold_in(key, n) for n in range(count))
        if not task.generator:
            return tuple(own)
        impl = implementation(task.generator)
        return tuple(jax.random.key(jax.random.bits(k), impl=impl) for k in own)

    def begun(key: Any) -> tuple[Any, ...]:
        assert init is not None
        return (*init(key), *keys(key))

    state = task.state
    if state is not None:
        state = (*state, *jax.eval_shape(lambda: keys(jax.random.key(0))))
    return replace(
        task,
        init=init and begun,
        state=state,
        state_names=(*task.state_names, *fresh),
        fresh_keys=(*task.fresh_keys, *fresh),
    )


def _sources(task: TrainTask) -> tuple[str, ...]:
    """What a step takes: its state, then a batch, unless its signature has more arguments."""
    names, usual = required_arguments(task.step), (*task.state_names, BATCH)
    if len(names) <= len(usual):
        return usual
    count = len(task.state_names)
    by_name = set(task.state_names) <= set(names)
    is_state = [name in task.state_names if by_name else n < count for n, name in enumerate(names)]
    rest = [name for name, own in zip(names, is_state, strict=True) if not own]
    pieces = [name for name in rest if not is_key_name(name)]
    source = {name: f"{BATCH}/{name}" if len(pieces) > 1 else BATCH for name in pieces}
    state = iter(task.state_names)
    return tuple(
        (name if by_name else next(state)) if own else source.get(name, name)
        for name, own in zip(names, is_state, strict=True)
    )


def required_arguments(step: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a step cannot do without; none where that is not known."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def arguments(task: TrainTask, state: Mapping[str, Any], batch: Any) -> Iterator[Any]:
    """What the step is called with, in order."""
    pieces = [source for source in task.arguments if is_of_batch(source)]
    for source in task.arguments:
        if not is_of_batch(source):
            yield state[source]
        elif source == BATCH:
            yield batch
        else:
            name = source.partition("/")[2]
            yield batch[name if isinstance(batch, Mapping) else pieces.index(source)]


def next_keys(keys: Any) -> tuple[Any, Any]:
    """(keys to be used, keys to go on from) of a pytree of keys, typed or raw."""
    import jax

    def split(leaf: Any) -> Any:
        typed = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        every = jax.random.split
        for _ in range(leaf.ndim - (not typed)):
            every = jax.vmap(every, out_axes=1)
        return every(leaf)

    both = jax.tree.map(split, keys)
    own, onward = (jax.tree.map(lambda leaf, n=n: leaf[n], both) for n in (0, 1))
    return own, onward


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the state as a step is given it: its name, what its leaves are, and whether a step
    may change it in place, as objects of `flax.nnx`."""

    name: str
    leaves: Signature
    tree: Any  # the structure, by which parts without leaves are told apart
    is_mutable: bool

    @classmethod
    def of(cls, name: str, tree: Any) -> Part:
        """The part of a state that is `tree`."""
        import jax

        return cls(name, signature(tree), jax.tree.structure(tree), _is_mutable(tree))

    @property
    def is_number(self) -> bool:
        """Whether it is one floating-point scalar, as a loss is too."""
        return len(self.leaves) == 1 and _is_scalar(self.leaves[0])

    def is_like(self, node: Any, leaves: Signature) -> bool:
        """Whether a node of the results, whose leaves are given, has its structure and types."""
        import jax

        return leaves == self.leaves and (bool(leaves) or jax.tree.structure(node) == self.tree)

    def may_be(self, item: _Item) -> bool:
        """Whether a result may be its next value. One array is only one that stands by itself, or
        has its name, and a loss is no state."""
        path, last = item.path, item.path.rpartition("/")[2]
        is_bare = len(self.leaves) == 1 and not self.leaves[0][0]
        if not self.is_like(item.node, item.leaves) or (self.is_number and LOSS in last.lower()):
            return False
        return not is_bare or not path or path.isdigit() or last == self.name


def _is_mutable(tree: Any) -> bool:
    """Whether a pytree has objects of `flax.nnx` in it, which steps change in place."""
    import jax

    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    found = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree))
    return any(isinstance(node, nnx.Pytree) for node in found)


def _is_scalar(leaf: Leaf) -> bool:
    return leaf[1] == () and "float" in str(leaf[2])


@dataclass(frozen=True, slots=True)
class Sorted:
    """What a step returned: the next value by part of the state, the metrics by path, and which of
    those is the loss, or of inference the logits, under what name."""

    state: Mapping[str, Any]
    metrics: Mapping[str, Any]
    loss: str
    result: str = LOSS

    @property
    def named_metrics(self) -> dict[str, Any]:
        """The metrics with the loss as `loss`, or the logits as `logits`."""
        own = (self.loss, self.result)
        rest = {name: leaf for name, leaf in self.metrics.items() if name not in own}
        return {**rest, self.result: self.metrics[self.loss]}


def sort_results(
    parts: Sequence[Part],
    results: Any,
    given: Sequence[str] = (),
    loss: str = "",
    mode: Mode = Mode.TRAIN,
) -> Sorted:
    """Say which of a step's results is what. `given` names them in order, where they are a tuple
    and are not to be found; `loss` is the path of the loss among the metrics. Inference has logits
    [B, V] instead.

    Raises: UsageError when a part comes back as something else, or there is no loss.
    """
    state, items = next_state(parts, results, given)
    if not state and any(p.leaves for p in parts) and not any(p.is_mutable for p in parts):
        raise UsageError(
            "SW_TASK_RESULT",
            f"step requires its new state ({', '.join(p.name for p in parts)}) among its results,"
            f" got {_shown({item.path or 'one result': item.node for item in items}, results)}",
            hint="a training step returns the state that the next one starts from",
        )
    metrics = _metrics(items)
    if not mode.trains:
        return Sorted(state, metrics, _logits(metrics, mode, results), mode.result)
    return Sorted(state, metrics, _loss(metrics, loss, results))


def next_state(
    parts: Sequence[Part], results: Any, given: Sequence[str] = ()
) -> tuple[Mapping[str, Any], list[_Item]]:
    """The next value of every part that is among the results, and what else is among them. Raises
    UsageError where a part comes back as something else."""
    items = _items(parts, results)
    if given:
        taken = _as_given(parts, results, given)
        rest = [
            replace(item, path=_named(item.path, given))
            for item in items
            if item.path.partition("/")[0] not in taken.values()
        ]
        return {name: results[int(path)] for name, path in taken.items()}, rest
    found = _taken(parts, items)
    rest = [item for n, item in enumerate(items) if n not in found.values()]
    _check_meant([p for p in parts if p.name not in found and not p.is_mutable], rest)
    return {name: items[n].node for name, n in found.items()}, rest


@dataclass(frozen=True, slots=True)
class _Item:
    """A node of the results that may be a part of the state, or a leaf."""

    path: str
    node: Any
    leaves: Signature

    @property
    def is_number(self) -> bool:
        return len(self.leaves) == 1 and _is_scalar(self.leaves[0])


def _items(parts: Sequence[Part], results: Any) -> list[_Item]:
    """The results, down to nodes that are like a part of the state, else to leaves."""

    def is_part(node: Any) -> bool:
        leaves = signature(node)
        return any(part.is_like(node, leaves) for part in parts)

    rows = named_leaves("", results, is_part)
    return [_Item(path, node, signature(node)) for path, node in rows]


def _taken(parts: Sequence[Part], items: Sequence[_Item]) -> dict[str, int]:
    """Which item is the next value of which part: of several alike the next one in order, since
    results mostly come in the order of arguments. A scalar that would leave no loss is none.

    Raises: UsageError where a scalar may be one of several, one of which may be the loss.
    """
    taken: dict[str, int] = {}
    last = -1
    numbers = [part for part in parts if part.is_number]
    for part in parts:
        free = [(n, item) for n, item in enumerate(items) if n not in taken.values()]
        like = [n for n, item in free if part.may_be(item)]
        named = [n for n in like if items[n].path.rpartition("/")[2] == part.name]
        if part.is_number and not named and len(like) > len(numbers):
            raise UsageError(
                "SW_TASK_RESULT",
                f"step requires one result that may be the next {part.name}, got"
                f" {', '.join(items[n].path for n in like)}",
                hint=f'name them in order: results=("{part.name}", "loss", ...)',
            )
        like = named or like
        if like:
            last = taken[part.name] = next((n for n in like if n > last), like[0])
    left = [i for n, i in enumerate(items) if n not in taken.values() and i.is_number]
    scalars = [part.name for part in numbers if part.name in taken]
    if scalars and not left:
        del taken[scalars[-1]]
    return taken


def _as_given(parts: Sequence[Part], results: Any, given: Sequence[str]) -> dict[str, str]:
    """Position of every part that is named as a result."""
    if not isinstance(results, tuple | list) or len(results) != len(given):
        raise UsageError(
            "SW_TASK_RESULT",
            f"step requires a tuple of {len(given)} results ({', '.join(given)}), got"
            f" {type(results).__name__}"
            + (f" of {len(results)}" if isinstance(results, tuple | list) else ""),
        )
    return {part.name: str(given.index(part.name)) for part in parts if part.name in given}


def _named(path: str, given: Sequence[str]) -> str:
    """The path of a result with its name in place of its position."""
    top, slash, below = path.partition("/")
    name = given[int(top)]
    return path if name == METRICS else f"{name}{slash}{below}"


def _check_meant(parts: Sequence[Part], items: Sequence[_Item]) -> None:
    """Refuse results that are a part of the state with other leaves, shapes or types.

    Raises: UsageError SW_TASK_RESULT.
    """
    leaves = {item.path: item.leaves[0] for item in items if item.leaves}
    for part in parts:
        below = _meant(part, leaves)
        if below is None:
            continue
        for name, *wanted in part.leaves:
            have = leaves.get("/".join(filter(None, (below, name))), ("", None, None))[1:]
            if have != tuple(wanted):
                own = "/".join(filter(None, (part.name, name)))
                given = f"{own} as {_type_text(*have)}" if have[1] else "nothing"
                raise UsageError(
                    "SW_TASK_RESULT",
                    f"step requires state {own} back as {_type_text(*wanted)}, got {given}",
                    hint="a step returns its state with unchanged leaves, shapes and types",
                )


def _meant(part: Part, leaves: Mapping[str, Leaf]) -> str | None:
    """Below which path of the results the part seems to be: half of its leaves have their names
    and ranks there."""
    ranks = {name: len(shape) for name, shape, _ in part.leaves if shape is not None}
    found: Counter[str] = Counter()
    for path, (_, shape, _dtype) in leaves.items():
        for name, rank in ranks.items():
            if (
                shape is not None
                and rank
                and len(shape) == rank
                and f"/{path}".endswith(f"/{name}")
            ):
                found[path.removesuffix(name).rstrip("/")] += 1
    best = found.most_common(1)
    return best[0][0] if best and 2 * best[0][1] >= len(ranks) else None


def _metrics(items: Sequence[_Item]) -> dict[str, Any]:
    """The leaves that are no state, by path, without what is no array or has no elements."""
    rows = [(i.path, i.node) for i in items if i.leaves and i.leaves[0][1] is not None]
    rows = [(path, leaf) for path, leaf in rows if 0 not in getattr(leaf, "shape", ())]
    short = Counter(_short(path) for path, _ in rows)
    return {_short(p) if short[_short(p)] == 1 else p: leaf for p, leaf in rows}


def _short(path: str) -> str:
    """A path without the position of a result that has names in it."""
    top, _, below = path.partition("/")
    return below if top.isdigit() and below else path or LOSS


def _loss(metrics: Mapping[str, Any], given: str, results: Any) -> str:
    """The path of the loss: the scalar called so, the only one with `loss` in its name, the only
    scalar, or the only one that is a result of its own. Raises UsageError for none or several."""
    scalars = [name for name, leaf in metrics.items() if _is_scalar(("", *form(leaf)))]
    if given in scalars:
        return given
    last = {name: name.rpartition("/")[2].lower() for name in scalars}
    for found in (
        [name for name in scalars if name == LOSS],
        [name for name in scalars if last[name] == LOSS],
        [name for name in scalars if LOSS in last[name]],
        scalars,
        [name for name in scalars if name.isdigit()],
    ):
        if len(found) == 1 and not given:
            return found[0]
    shown = ", ".join(scalars[:MOST_SHOWN]) or "none among " + _shown(metrics, results)
    asked = f"the scalar {given}" if given else "one scalar `loss`"
    raise UsageError(
        "SW_TASK_RESULT",
        f"step requires {asked} in float among its results, got {shown}",
        hint=f'name it: loss="{scalars[0]}" of the task'
        if scalars
        else "return the loss as well, a scalar",
    )


def _logits(metrics: Mapping[str, Any], mode: Mode, results: Any) -> str:
    """The path of the logits. Raises UsageError for none of two dims."""
    name = mode.result
    if name in metrics and len(form(metrics[name])[0] or ()) == 2:
        return name
    raise UsageError(
        "SW_TASK_RESULT",
        f"step of mode {mode} requires `{name}` of two dims among its results, got"
        f" {_shown(metrics, results)}",
        hint=f'return {{"{name}": ...}} besides the state',
    )


def _shown(metrics: Mapping[str, Any], results: Any) -> str:
    types = {name: form(leaf) for name, leaf in metrics.items()}
    rows = [f"{name} {_type_text(*own)}" if own[1] else name for name, own in types.items()]
    return ", ".join(rows[:MOST_SHOWN]) or f"a result of type {type(results).__name__}"


def _type_text(shape: tuple[int, ...] | None, dtype: str | None) -> str:
    """A type as the IR writes it, where it has it."""
    import numpy as np

    from shardwright.compiler.dtypes import DType

    try:
        name = DType.from_numpy(np.dtype(dtype)).value
    except (KeyError, TypeError):
        name = str(dtype)
    return f"{name}{list(shape or ())}"


def told(task: TrainTask, parts: Sequence[Part], found: Sorted) -> tuple[str, ...]:
    """What is not as in `(*state, batch) -> (*state, metrics)`, for the screen."""
    pieces = [source.partition("/")[2] for source in task.arguments if "/" in source]
    lines = [*task.notes, *([f"the batch is {', '.join(pieces)}"] if pieces else [])]
    lines += [f"{name} is a fresh key per step" for name in task.fresh_keys]
    for part in parts:
        if part.name not in found.state and part.leaves:
            what = "changed in place" if part.is_mutable else "not returned: it stays as it is"
            lines.append(f"{part.name} is {what}")
    if found.loss != found.result and not (found.loss.isdigit() and len(found.metrics) == 1):
        lines.append(f"the loss is result {found.loss}")
    return tuple(lines)
