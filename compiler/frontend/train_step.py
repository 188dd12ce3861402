"""A training step of the user's with arguments to show it by, as a `TrainTask`.

A training script has a step and calls it with a state and a batch. Such a call says all that a task
has to be told: an argument that a result replaces is state, keys that are not returned are drawn
anew for each step, the arguments with one number of rows are the batch, and what is no array is a
constant. The step is traced once for that, on shapes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.diagnostics import UsageError, did_you_mean
from shardwright.compiler.frontend.leaves import named_leaves
from shardwright.compiler.frontend.programs import PMAP_FILE
from shardwright.compiler.frontend.state import Pytree, at, split_pytree
from shardwright.compiler.frontend.step_form import (
    Part,
    is_key_name,
    next_state,
    required_arguments,
)
from shardwright.compiler.frontend.task import BATCH, BatchFactory, TrainTask
from shardwright.compiler.frontend.user_code import anew, called, layers, location, per_device

STATE, KEY, CONSTANT = "state", "key", "constant"
KINDS = (STATE, BATCH, KEY, CONSTANT)
"""What an argument of a step can be."""
_BATCH = {"batch", "data", "x", "xs", "y", "ys", "inputs", "targets", "label", "labels"}
_BATCH |= {"image", "images", "tokens", "input_ids"}
"""Names that arguments which are a batch have in public code; such a one is no state, though a
result may be like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What is said about a step beside its code; what is not said is found.

    `example` is the arguments of a call, a tuple or a function that returns it, which may take a
    key of random numbers. `arguments` says of an argument, by name, which of `KINDS` it is. The
    other fields are those of `TrainTask`.
    """

    example: Any = None
    batches: BatchFactory | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    results: tuple[str, ...] = ()
    loss: str = ""
    roles: Mapping[str, str] = field(default_factory=dict)
    batch_dim: int = 0
    tokens_per_sample: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        for name, kind in self.arguments.items():
            if kind not in KINDS:
                raise UsageError(
                    "SW_TASK_ROLE",
                    f"an argument of a step is one of {', '.join(KINDS)}, got {name}: {kind!r}",
                    hint=did_you_mean(str(kind), KINDS, "roles= says what leaves of state are"),
                )


Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""What a step is called with, by position and by name."""


class TrainStep:
    """A step with what is said about it. It is called, and has the attributes, as before."""

    def __init__(self, step: Callable[..., Any], settings: StepSettings) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self.settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step."""
        return self._step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        step = object.__getattribute__(self, "_step")  # which a copy does not have at first
        return getattr(step, name)

    def task(
        self,
        call: Call | None = None,
        settings: Mapping[str, Any] | None = None,
        base_dir: str | None = None,
    ) -> TrainTask:
        """The task, shown by the arguments of a call, or by the step's own example, which is given
        `settings`.

        Raises: UsageError when there is neither, or it is not clear what is what.
        """
        if call is not None:
            return _task(self._step, self.settings, lambda key: call, base_dir)
        example = self.settings.example
        if example is None:
            raise UsageError(
                "SW_STEP_EXAMPLE",
                f"{step_name(self._step)} requires arguments to show it by, got none",
                location(self._step),
                "give them to shardwright.plan(step, state, batch), or a function that makes them"
                " to the decorator: @train_step(example=make_example)",
            )

        def made(key: Any) -> Call:
            return _call(example, key, settings or {})

        return _task(self._step, self.settings, made, base_dir)


def _call(example: Any, key: Any, settings: Mapping[str, Any]) -> Call:
    """The arguments that an example is, or makes, of a key where it takes one."""
    if callable(example):
        first = [key] if required_arguments(example) else []
        example = example(*first, **settings)
    if isinstance(example, Mapping):
        return (), example
    return tuple(example) if isinstance(example, tuple | list) else (example,), {}


def step_name(step: Callable[..., Any]) -> str:
    """What a step is called, also under functools.partial."""
    names = (getattr(layer, "__name__", None) for layer in layers(step))
    return next(filter(None, names), "step")


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of one call by name, in the order of the step's signature, and which of them
    have to be given by name."""

    values: Mapping[str, Any]
    keywords: frozenset[str]

    @classmethod
    def of(cls, step: Callable[..., Any], call: Call) -> _Arguments:
        """Those of a call. Raises UsageError where the step does not take them."""
        args, kwargs = call
        try:
            signature = inspect.signature(step)
        except (TypeError, ValueError):  # of a callable that says nothing
            values = {f"arg{n}": value for n, value in enumerate(args)} | dict(kwargs)
            return cls(values, frozenset(kwargs))
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise UsageError(
                "SW_STEP_EXAMPLE",
                f"{step_name(step)} requires an example of its arguments {signature}: {error}",
                location(step),
                "settings of the job are said as table__key, for example mesh__tp=2",
            ) from error
        values, keywords, is_left_out = {}, set[str](), False
        for name, parameter in signature.parameters.items():
            is_left_out |= name not in bound  # then those behind it are given by name
            if name not in bound:
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                values |= {f"{name}{n}": one for n, one in enumerate(bound[name])}
                continue
            own = bound[name] if parameter.kind is parameter.VAR_KEYWORD else {name: bound[name]}
            values |= own
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY) or is_left_out:
                keywords |= set(own)
        return cls(values, frozenset(keywords))


def _task(
    step: Callable[..., Any],
    settings: StepSettings,
    example: Callable[[Any], Call],
    base_dir: str | None,
) -> TrainTask:
    """The task of a step that an example is shown of."""
    _refuse_pmap(step)
    with called(f"the example of {step_name(step)}", base_dir):
        shown = _Shown.of(step, example)
    kinds = _kinds(step, shown, settings, base_dir)
    keys, constants, pieces = ([n for n in kinds if kinds[n] == k] for k in (KEY, CONSTANT, BATCH))
    parts = (*(n for n in kinds if kinds[n] == STATE), *keys)
    is_one = len(pieces) == 1

    def batch_of(values: Mapping[str, Any]) -> Any:
        return values[pieces[0]] if is_one else {name: values[name] for name in pieces}

    def init(key: Any) -> tuple[Any, ...]:
        values = shown.values(key)
        return tuple(values[name] for name in parts)

    def cycled(seed: int, count: int, data: str | None) -> Iterator[Any]:
        import jax

        values = shown.values(jax.random.key(0))
        return repeated(batch_of(values), count, settings.batch_dim)

    batch = batch_of(shown.abstract)
    source = {name: BATCH if is_one else f"{BATCH}/{name}" for name in pieces}
    return TrainTask(
        step=_positional(step, shown.arguments, {n: shown.arguments.values[n] for n in constants}),
        init=init if shown.has_values else None,
        state=tuple(shown.abstract[name] for name in parts),
        batch=lambda count: resized(batch, count, settings.batch_dim),
        batches=settings.batches or (cycled if shown.has_values else None),
        state_names=parts,
        arguments=tuple(source.get(name, name) for name in kinds if name not in constants),
        results=settings.results,
        loss=settings.loss,
        fresh_keys=tuple(keys),
        roles=settings.roles,
        batch_dim=settings.batch_dim,
        samples=_samples(batch, settings.batch_dim),
        tokens_per_sample=settings.tokens_per_sample or tokens_of(batch, settings.batch_dim),
        notes=tuple(f"{name} is a constant" for name in constants if shown.trees[name].leaves),
        name=settings.name or step_name(step),
    )


def _refuse_pmap(step: Callable[..., Any]) -> None:
    """Refuse a step under `jax.pmap`, before its arguments are those of too many devices. Raises:
    UsageError SW_PMAP."""
    codes = (getattr(layer, "__code__", None) for layer in layers(step))
    if any(code is not None and code.co_filename.endswith(PMAP_FILE) for code in codes):
        raise per_device(f"{step_name(step)} under jax.pmap", location(step))


def _positional(
    step: Callable[..., Any], arguments: _Arguments, constants: Mapping[str, Any]
) -> Callable[..., Any]:
    """The step as a function of its arguments in order, without the constants."""
    free = [name for name in arguments.values if name not in constants]

    @functools.wraps(step)
    def called_with(*args: Any) -> Any:
        given = dict(zip(free, args, strict=True)) | dict(constants)
        own = [given[name] for name in arguments.values if name not in arguments.keywords]
        return step(*own, **{name: given[name] for name in arguments.keywords})

    return called_with


@dataclass(frozen=True, slots=True)
class _Shown:
    """An example: its arguments as pytrees and the shapes of their arrays, whether they have
    values, and those of a key."""

    arguments: _Arguments  # whose arrays are tracers
    trees: Mapping[str, Pytree]
    shapes: Mapping[str, Any]
    has_values: bool
    values: Callable[[Any], Mapping[str, Any]]

    @classmethod
    def of(cls, step: Callable[..., Any], example: Callable[[Any], Call]) -> _Shown:
        """What an example makes, on shapes alone where its function can be traced."""
        import jax

        found: list[tuple[_Arguments, dict[str, Pytree]]] = []

        def values(key: Any) -> Mapping[str, Any]:
            return _Arguments.of(step, example(key)).values

        def arrays(key: Any) -> dict[str, Any]:
            arguments = _Arguments.of(step, example(key))
            split = {n: split_pytree(n, value) for n, value in arguments.values.items()}
            found.append((arguments, {name: tree for name, (tree, _) in split.items()}))
            return {name: jax.tree.map(_traced, own) for name, (_, own) in split.items()}

        try:
            shapes = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
            call = example(jax.random.key(0))  # its function looks at numbers
            return cls.of(step, lambda key: call)
        arguments, trees = found[-1]
        leaves = jax.tree.leaves(list(arguments.values.values()))
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        return cls(arguments, trees, shapes, not is_abstract, values)

    @property
    def abstract(self) -> dict[str, Any]:
        """The arguments with shapes for arrays."""
        return self.whole(self.shapes)

    def whole(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments around their arrays, in order; jax sorts the names of a dict."""
        return {n: tree.whole(arrays[n]) for n, tree in self.trees.items() if n in arrays}


def _traced(leaf: Any) -> Any:
    """A leaf of an example as something jax traces."""
    import jax
    import jax.numpy as jnp

    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return jnp.zeros(leaf.shape, leaf.dtype) if is_shape else leaf


def _kinds(
    step: Callable[..., Any], shown: _Shown, settings: StepSettings, base_dir: str | None
) -> dict[str, str]:
    """What every argument of a step is, by name. Raises UsageError where there is no state, or no
    batch."""
    import jax

    given = shown.arguments.values
    for name in settings.arguments:
        if name not in given:
            raise UsageError(
                "SW_TASK_ROLE",
                f"arguments of {step_name(step)} are {', '.join(given)}, got {name}",
                location(step),
                did_you_mean(name, given),
            )
    kinds = {name: CONSTANT for name, value in given.items() if _is_constant(value)}
    kinds |= settings.arguments
    fixed = {name: given[name] for name, kind in kinds.items() if kind == CONSTANT}
    maybe = [n for n in given if kinds.get(n, BATCH if n in _BATCH else STATE) == STATE]
    replaced: list[str] = []

    def probe(arrays: Mapping[str, Any]) -> None:
        whole = shown.whole(arrays)
        parts = [Part.of(name, whole[name]) for name in maybe]
        results = _positional(step, shown.arguments, fixed)(*whole.values())
        with at(step):
            state, _ = next_state(parts, results, settings.results)
        replaced.extend((*state, *(part.name for part in parts if part.is_mutable)))

    try:
        with called(f"the step {step_name(step)}", base_dir, _HINT):
            jax.eval_shape(probe, {name: shown.shapes[name] for name in given if name not in fixed})
    except UsageError as error:
        if error.code == "SW_TASK_RAISED":
            raise
        raise anew(error) from None
    kinds |= {name: STATE for name in replaced}
    rest = {name: shown.shapes[name] for name in given if name not in kinds}
    kinds |= {name: KEY for name, own in rest.items() if _is_key(name, shown.trees[name], own)}
    kinds |= _of_batch(shown, kinds, settings.batch_dim)
    _check(step, kinds)
    return {name: kinds[name] for name in given}


_HINT = "a step is traced by jax: no value of an array is known, shapes and types are"


def _is_constant(value: Any) -> bool:
    """Whether an argument has no array in it: numbers, flags, functions, optimizers."""
    import jax

    return not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value))


def _is_key(name: str, tree: Pytree, shapes: Any) -> bool:
    """Whether an argument is a key of random numbers: a typed one, or one by name and type."""
    import jax

    leaves = jax.tree.leaves(shapes)
    is_raw = all(str(leaf.dtype) == "uint32" and leaf.shape[-1:] == (2,) for leaf in leaves)
    return tree.is_key or bool(leaves and is_raw and is_key_name(name))


def _of_batch(shown: _Shown, kinds: Mapping[str, str], dim: int) -> dict[str, str]:
    """Which arguments are the batch, of those of which nothing is known: those called so, and those
    behind the state with as many rows as the first of them, more than one if any has; where there
    are none, those between the state. The others are state that is not returned."""
    import jax

    order = list(shown.trees)
    free = [name for name in order if name not in kinds]
    last = max((n for n, name in enumerate(order) if kinds.get(name) == STATE), default=-1)
    rows = {
        name: {(*leaf.shape, *[0] * dim, 0)[dim] for leaf in jax.tree.leaves(shown.shapes[name])}
        for name in free
    }
    batch = {name for name in free if name in _BATCH}
    like = [rows[name] for name in batch]
    likely = [name for name in free if len(rows[name]) == 1 and 0 not in rows[name]]
    behind = [name for name in likely if order.index(name) > last]
    if not like and BATCH not in kinds.values():
        behind = behind or likely
        like = [rows[name] for name in sorted(behind, key=lambda name: rows[name] == {1})[:1]]
    batch |= {name for name in behind if rows[name] in like}
    return {name: BATCH if name in batch else STATE for name in free}


def _check(step: Callable[..., Any], kinds: Mapping[str, str]) -> None:
    """Raises UsageError where nothing is state, or the batch."""
    found = ", ".join(f"{name}: {kind}" for name, kind in kinds.items()) or "none"
    for kind, code, cure in (
        (STATE, "SW_TASK_STATE", "a step returns its new state"),
        (
            BATCH,
            "SW_TASK_BATCH",
            "the arrays of a batch have as many rows as there are samples, and a list of numbers is"
            " no array (np.asarray)",
        ),
    ):
        if kind not in kinds.values():
            raise UsageError(
                code,
                f"{step_name(step)} requires an argument that is {kind}, got {found}",
                location(step),
                f'{cure}; train_step(arguments={{"name": "{kind}"}}) says which one is',
            )


def _samples(batch: Any, dim: int) -> int:
    """How many samples a batch has; 0 where that is not to be seen."""
    import jax

    shapes = [leaf.shape for leaf in jax.tree.leaves(batch)]
    return int(shapes[0][dim]) if shapes and len(shapes[0]) > dim else 0


def resized(batch: Any, count: int, dim: int) -> Any:
    """An abstract batch with another number of samples along `dim`."""
    import jax

    def one(leaf: Any) -> Any:
        shape = (*leaf.shape[:dim], count, *leaf.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape if len(leaf.shape) > dim else leaf.shape, leaf.dtype)

    return jax.tree.map(one, batch)


def repeated(batch: Any, count: int, dim: int) -> Iterator[Any]:
    """Batches of the samples of one, again and again."""
    import jax
    import numpy as np

    whole, first = jax.tree.map(np.asarray, batch), 0
    while True:
        rows = np.arange(first, first + count)
        yield jax.tree.map(lambda leaf, at=rows: leaf.take(at % leaf.shape[dim], dim), whole)
        first += count


def tokens_of(batch: Any, dim: int) -> int:
    """Tokens of a sample: those of the first array of whole numbers that has some; bytes are
    pixels and bits as well."""
    for _, leaf in named_leaves(BATCH, batch):
        if len(leaf.shape) == dim + 2 and "int" in str(leaf.dtype) and leaf.dtype.itemsize > 1:
            return int(leaf.shape[dim + 1])
    return 1
