"""The function that a path leads to: a SavedModel's signature, a Keras model, a function of the
user's, or what that makes. Runs in the child, where alone TensorFlow is loaded.

Every function is one of flat tensors, `inputs` say which. A model that is compiled with a loss and
an optimizer, and comes with a batch, is a training step.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.compiler.diagnostics import ImportRuleError, Loc, UsageError, did_you_mean
from shardwright.compiler.frontend.graphs.graph import Value
from shardwright.compiler.frontend.tensorflow.raised import calling
from shardwright.compiler.frontend.tensorflow.start import KERAS
from shardwright.compiler.frontend.user_code import location

SAMPLES = "batch"
"""What an open first dim is called."""
_CALLED, _BATCH = ("model", "function", "step"), "batch"
"""Keys of a mapping that a function of the user's may return."""
_SHOWN = 300  # letters of a message of TensorFlow's (our choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A function of flat tensors, with what is known about it.

    `inputs` are its arguments; a dim without a size is called `batch` where it is the first.
    `named` are variables with names, `example` are values of the inputs, where the user gave some.
    `trains` says that a call is a training step. `prepare` is called once with the types of the
    inputs before the function is traced.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[Value, ...]
    named: tuple[Any, ...] = ()
    example: tuple[Any, ...] = ()
    trains: bool = False
    prepare: Callable[..., Any] | None = None

    @property
    def samples(self) -> int:
        """How many samples the example has."""
        sizes = [value.shape[0] for value in self.example if len(value.shape)]
        return int(sizes[0]) if sizes else 0


def find(path: str, name: str, training: bool) -> Found:
    """What a path leads to; `name` is a signature, or a function of a Python file. `training` asks
    for the model as it is trained.

    Raises: UsageError, ImportRuleError.
    """
    if path.endswith(".py"):
        return _of_file(Path(path), name, training)
    if path.endswith(KERAS):
        with _reading(path):
            model = tf.keras.models.load_model(path)
        return _of_keras(model, Path(path).stem, training)
    return _of_saved(path, name)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """What TensorFlow raises while it reads a file, as our error."""
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        raise ImportRuleError(
            "SW_TF_MODEL",
            f"a whole model that TensorFlow {tf.__version__} reads is required, got"
            f" {type(error).__name__}: {words}",
            Loc(path),
            "save it again: model.save('mine.keras'), model.export('folder'), or"
            " tf.saved_model.save(model, 'folder')",
        ) from error


def _of_saved(path: str, name: str) -> Found:
    """A signature of a SavedModel: the one of that name, `serving_default`, or the first."""
    with _reading(path):
        loaded = tf.saved_model.load(path)
        signatures = dict(loaded.signatures)
    usual = [n for n in signatures if n == "serving_default"] or list(signatures)
    wanted = name or "".join(usual[:1])
    if wanted not in signatures:
        raise UsageError(
            "SW_TF_SIGNATURE",
            f"{path} requires a signature {name or 'to compile'}, got"
            f" {', '.join(signatures) or 'none'}",
            hint=did_you_mean(name, signatures, "name one: FOLDER:signature")
            if signatures
            else "save it with one: tf.saved_model.save(model, folder, signatures=function)",
        )
    signature = signatures[wanted]
    specs: Mapping[str, Any] = signature.structured_input_signature[1]
    names = list(specs)

    def function(*values: Any) -> Any:
        return signature(**dict(zip(names, values, strict=True)))

    return Found(
        name=Path(path).resolve().name,
        function=function,
        inputs=tuple(_value(n, spec) for n, spec in specs.items()),
        named=tuple(getattr(loaded, "variables", None) or signature.variables),
        prepare=lambda *_: loaded,  # which its functions do not keep
    )


def _value(name: str, spec: Any) -> Value:
    """An input by its type. Raises UsageError for what is no tensor."""
    if not isinstance(spec, tf.TensorSpec | tf.Tensor):
        raise UsageError(
            "SW_TF_ENTRY",
            f"input {name} requires a tensor, got {type(spec).__name__}",
            hint="make ragged and sparse values tensors of one shape first: x.to_tensor(shape=...)",
        )
    dims: tuple[int | str, ...] | None = None
    if spec.shape.rank is not None:
        opened = (SAMPLES if not n else "" for n in range(spec.shape.rank))
        dims = tuple(o if d is None else d for d, o in zip(spec.shape, opened, strict=True))
    kind = spec.dtype
    is_number = kind.is_floating or kind.is_integer or kind.is_bool or kind.is_complex
    return Value(name, np.dtype(kind.as_numpy_dtype) if is_number else None, dims)


def _of_file(path: Path, name: str, training: bool) -> Found:
    """A function, a model, or what a function makes, of a Python file."""
    module = _module(path)
    found = getattr(module, name, None)
    if found is None:
        known = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
        raise UsageError(
            "SW_ENTRY",
            f"{path.name} requires a function or a model {name}, got none",
            Loc(path.name),
            did_you_mean(name, known, "name what the file defines at its top"),
        )
    if _is_keras(found):
        return _of_keras(found, name, training)
    if isinstance(found, type) or not (_is_traced(found) or _required(found)):
        with calling(f"{name}()"):
            made = found() if callable(found) else found
        return _of_made(made, name, training)
    return _of_function(found, name)


def _module(path: Path) -> Any:
    """The module of a file. Raises UsageError at its line."""
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    os.chdir(folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    with calling(f"importing {path.stem}"):
        spec.loader.exec_module(module)
    return module


def _is_keras(found: Any) -> bool:
    return isinstance(found, tf.keras.Model | tf.keras.layers.Layer)


def _is_traced(found: Any) -> bool:
    """Whether something is a `tf.function`, or one of its traces."""
    return hasattr(found, "get_concrete_function") or hasattr(found, "structured_input_signature")


def _required(function: Any) -> list[str]:
    """Parameters that a call has to give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of something that says nothing
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def _of_made(made: Any, name: str, training: bool) -> Found:
    """What a function of the user's returned: a model or a function, with a batch or without."""
    parts = dict(made) if isinstance(made, Mapping) else {_CALLED[0]: made}
    if isinstance(made, tuple | list) and made:
        rest = made[1] if len(made) == 2 else tuple(made[1:])
        parts = {_CALLED[0]: made[0], _BATCH: rest}
    model = next((parts[key] for key in _CALLED if key in parts), None)
    batch = parts.get(_BATCH, ())
    if not callable(model) or not set(parts) <= {*_CALLED, _BATCH}:
        shown = ", ".join(map(str, parts)) if isinstance(made, Mapping) else type(made).__name__
        raise UsageError(
            "SW_TF_ENTRY",
            f"{name} requires to return a Keras model or a tf.function, and a batch beside it, got"
            f" {shown}",
            hint="return model, (x, y), or a mapping: {'model': ..., 'batch': ...}",
        )
    if isinstance(batch, tf.data.Dataset):
        batch = next(iter(batch))
    if not isinstance(batch, tuple | list) or batch:
        return _with_batch(model, name, batch, training)
    return _of_keras(model, name, training) if _is_keras(model) else _of_function(model, name)


def _with_batch(model: Any, name: str, batch: Any, training: bool) -> Found:
    """A model or a function with values to show it by."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if not _is_keras(model):
        return _flat(model, name, parts)
    if len(parts) == 2 and getattr(model, "optimizer", None) is not None and training:
        return _fit(model, name, parts)
    forward = _forward(model, training)
    with calling(f"{name} of its batch"):  # which makes its variables
        forward(parts[0])
    return _flat(forward, name, parts[:1], named=_weights(model))


def _flat(function: Any, name: str, args: Sequence[Any], **rest: Any) -> Found:
    """A function of nested arguments as one of their tensors, by names of their places."""
    own = _required(function)
    names = [own[n] if n < len(own) else f"x{n}" for n in range(len(args))]
    tree = tuple(args)
    example = tuple(np.asarray(leaf) for leaf in tf.nest.flatten(tree))
    rows = zip(_paths(tree, names), example, strict=True)
    return Found(
        name=name,
        function=_packed(function, tree),
        inputs=tuple(Value(path, array.dtype, array.shape) for path, array in rows),
        example=example,
        prepare=_first_trace(function, tree),
        **rest,
    )


def _packed(function: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    """A function of nested arguments as one of their tensors."""

    def flat(*values: Any) -> Any:
        return function(*tf.nest.pack_sequence_as(tree, list(values)))

    return flat


def _first_trace(function: Any, tree: Any) -> Callable[..., Any] | None:
    """What traces a `tf.function` by itself, where it may make its variables."""
    if not hasattr(function, "get_concrete_function"):
        return None
    return _packed(function.get_concrete_function, tree)


def _paths(tree: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Names of the leaves of arguments, in the order of `tf.nest`."""

    def walk(path: str, part: Any) -> Iterator[str]:
        if isinstance(part, Mapping):
            for key in sorted(part):
                yield from walk(f"{path}/{key}", part[key])
        elif isinstance(part, tuple | list):
            for n, one in enumerate(part):
                yield from walk(f"{path}/{n}", one)
        else:
            yield path

    return [one for name, part in zip(names, tree, strict=True) for one in walk(name, part)]


def _of_function(function: Any, name: str) -> Found:
    """A function without an example: its own signature says the inputs, or their sizes are said."""
    names, signature = _required(function), _signature(function)
    if signature is None and not names:
        raise UsageError(
            "SW_TF_ENTRY",
            f"{name} requires arguments, or to return a model or a function, got neither",
            location(getattr(function, "python_function", function)),
            "give it the values that it is a function of",
        )
    tree: Any = tuple(names)
    inputs = tuple(Value(n, np.dtype(np.float32), None) for n in names)
    if signature is not None:
        tree, own = signature, [*names, *(f"x{n}" for n in range(len(names), len(signature)))]
        rows = zip(tf.nest.flatten(tree), _paths(tree, own[: len(tree)]), strict=True)
        inputs = tuple(_value(getattr(leaf, "name", "") or path, leaf) for leaf, path in rows)
    return Found(
        name=name,
        function=_packed(function, tree),
        inputs=inputs,
        prepare=_first_trace(function, tree),
    )


def _signature(function: Any) -> tuple[Any, ...] | None:
    """The types of the arguments that a function says itself; None where it says none."""
    if hasattr(function, "structured_input_signature"):
        args, named = function.structured_input_signature
        return (*args, *named.values())
    own = getattr(function, "input_signature", None)
    return None if own is None else tuple(own)


def _weights(model: Any) -> tuple[Any, ...]:
    """Variables of a Keras model and its optimizer, by their paths."""
    optimizer = getattr(model, "optimizer", None)
    return (*model.variables, *(optimizer.variables if optimizer is not None else ()))


def _forward(model: Any, training: bool) -> Callable[..., Any]:
    """A call of a model; one whose layers are other ones in training is told."""
    is_told = isinstance(model, tf.keras.Model) or "training" in _all_parameters(model.call)
    told = {"training": training} if is_told else {}

    def call(x: Any) -> Any:
        return model(x, **told)

    return call


def _all_parameters(function: Any) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _of_keras(model: Any, name: str, training: bool) -> Found:
    """A Keras model that knows its inputs. Raises UsageError for one that has none yet."""
    given = getattr(model, "inputs", None)
    if given:
        tree = getattr(model, "_inputs_struct", given[0] if len(given) == 1 else given)
        leaves = tf.nest.flatten(tree)
        specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
        names = ["x"] if len(specs) == 1 else [leaf.name for leaf in leaves]
    else:
        shapes = getattr(model, "_build_shapes_dict", None) or {}
        if len(shapes) != 1:
            raise UsageError(
                "SW_TF_ENTRY",
                f"{name} requires a Keras model that knows its inputs, or a batch to show it by,"
                f" got {type(model).__name__} that was not built",
                hint="return model, batch, or give it a keras.Input",
            )
        specs = [tf.TensorSpec(shape, model.compute_dtype) for shape in shapes.values()]
        tree, names = specs[0], ["x"]
    return Found(
        name=name,
        function=_packed(_forward(model, training), (tree,)),
        inputs=tuple(_value(key, spec) for key, spec in zip(names, specs, strict=True)),
        named=_weights(model),
    )


def _fit(model: Any, name: str, batch: Sequence[Any]) -> Found:
    """What `model.fit` does with a batch, of a model with a loss and an optimizer."""
    optimizer = model.optimizer
    with calling(f"the loss of {name}"):  # which makes its variables when it is first called
        first = model(batch[0])
        model.compute_loss(x=batch[0], y=tf.convert_to_tensor(batch[1]), y_pred=first)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            result = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=result, training=True)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": loss}

    return _flat(step, name, batch, trains=True, named=_weights(model))
