"""How a traced module is called and what it returns, as plain data.

The tensors of a call have names, and so have all values of a graph. Structures around them are
pytrees of torch's, written as torch.export writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.compiler.diagnostics import LoadError, UsageError
from shardwright.compiler.frontend.pytorch.transformers import know_classes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor by name; `dtype` is the name of one of torch's, `shape` the example's."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Any) -> Leaf:
        """That of a tensor, which may be without values."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(int(n) for n in tensor.shape), dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def torch_type(self) -> Any:
        """Its `torch.dtype`. Raises ValueError where there is none of that name."""
        import torch

        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{self.dtype} is no type of tensors")
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, as torch has them."""
        return math.prod(self.shape) * int(self.torch_type.itemsize)

    def tensor(self, data: bytes) -> torch.Tensor:
        """The tensor of its elements (`bytes_of`). Raises ValueError for another number of them."""
        import torch

        if len(data) != self.num_bytes:
            raise ValueError(f"{self.name}, {self}, has {len(data)} bytes")
        if not data:
            return torch.empty(self.shape, dtype=self.torch_type)
        return torch.frombuffer(bytearray(data), dtype=self.torch_type).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument or result that is no tensor, and the same in every call."""

    value: Any


Entry = Leaf | Constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """`inputs` are the leaves of a call in order, `outputs` names of results or constants.
    `changed` are values that take the place of something: (name of the value, name of the input or
    buffer). `buffers` are those that change, and are kept from call to call."""

    inputs: tuple[Entry, ...]
    outputs: tuple[str | Constant, ...]
    changed: tuple[tuple[str, str], ...]
    buffers: tuple[Leaf, ...]
    call: Any
    result: Any
    """Structures (`TreeSpec`) of arguments, `((positional ...), {keyword ...})`, and of results."""

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a call by name. Raises UsageError for other shapes, types or structures
        than those of the example."""
        from torch.utils import _pytree

        given, found = _pytree.tree_flatten((tuple(args), self._ordered(kwargs)))
        if found != self.call:
            raise _refused(f"arguments of the structure {_shown(self.call)}", _shown(found))
        tensors = {}
        for place, (entry, value) in enumerate(zip(self.inputs, given, strict=True)):
            if isinstance(entry, Leaf):
                tensors[entry.name] = _checked(entry, value, place)
            elif value != entry.value:
                raise _refused(f"{entry.value!r} as argument {place}, as traced", repr(value))
        return tensors

    def _ordered(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments in the order of the example's."""
        from torch.utils import _pytree

        _, example = _pytree.tree_unflatten([None] * self.call.num_leaves, self.call)
        first = [name for name in example if name in kwargs]
        return {name: kwargs[name] for name in dict.fromkeys([*first, *kwargs])}

    def results(self, values: Mapping[str, Any]) -> Any:
        """What a call returns, of all values by name."""
        from torch.utils import _pytree

        leaves = [
            each.value if isinstance(each, Constant) else values[each] for each in self.outputs
        ]
        return _pytree.tree_unflatten(leaves, self.result)


def _checked(leaf: Leaf, value: Any, place: int) -> Any:
    """A tensor that is like the example's."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise _refused(f"{leaf} as argument {place} ({leaf.name})", type(value).__name__)
    given = Leaf.of(leaf.name, value)
    if given != leaf:
        raise _refused(f"{leaf} as argument {place} ({leaf.name})", str(given))
    return value.detach()


def _refused(required: str, given: str) -> UsageError:
    return UsageError(
        "SW_TORCH_INPUT",
        f"a traced module requires {required}, got {given}",
        hint="shapes, types and structures are those of the example: trace the module again for"
        " others, or pad",
    )


def _shown(structure: Any) -> str:
    from torch.utils import _pytree

    leaves = ["*"] * structure.num_leaves
    return str(_pytree.tree_unflatten(leaves, structure)).replace("'*'", "*")


def structure_text(structure: Any) -> str:
    """A structure of torch's as text. Raises UsageError for a class that has no name in files."""
    from torch.utils import _pytree  # what torch.export.save itself writes structures with

    try:
        return str(_pytree.treespec_dumps(structure))
    except (NotImplementedError, TypeError) as error:
        raise UsageError(
            "SW_TORCH_INPUT",
            f"arguments and results of classes with a name in files are required: {error}",
            hint="torch.export.register_dataclass(Class, serialized_type_name='name'), or return a"
            " tuple or a dict",
        ) from error


def structure_of(text: str) -> Any:
    """The structure of a text. Raises LoadError for a class that is not registered."""
    from torch.utils import _pytree

    know_classes(text)
    try:
        return _pytree.treespec_loads(text)
    except (NotImplementedError, KeyError, TypeError, ValueError) as error:
        raise LoadError(
            "SW_TORCH_FILE",
            f"a structure of classes that are imported is required, got {error}",
            hint="import what defines the module's arguments and results first: transformers",
        ) from error


def plain(signature: Signature) -> dict[str, Any]:
    """As lists and mappings that `of_plain` reads."""

    def entry(each: Entry | str) -> Any:
        if isinstance(each, Leaf):
            return row_of(each)
        return {"constant": each.value} if isinstance(each, Constant) else each

    return {
        "inputs": [entry(each) for each in signature.inputs],
        "outputs": [entry(each) for each in signature.outputs],
        "changed": [list(pair) for pair in signature.changed],
        "buffers": [entry(each) for each in signature.buffers],
        "call": structure_text(signature.call),
        "result": structure_text(signature.result),
    }


def row_of(leaf: Leaf) -> list[Any]:
    """A leaf as a row that `leaf_of` reads."""
    return [leaf.name, list(leaf.shape), leaf.dtype]


def leaf_of(row: Any) -> Leaf:
    """A leaf of its row. Raises ValueError, TypeError for another, and for a type that is none."""
    name, shape, dtype = row
    found = Leaf(str(name), tuple(int(n) for n in shape), str(dtype))
    if found.num_bytes < 0:
        raise ValueError(f"{name} has a size below 0")
    return found


def of_plain(data: Mapping[str, Any]) -> Signature:
    """Its inverse. Raises KeyError, ValueError, TypeError for something else."""

    def constant(each: Any) -> Constant | None:
        return Constant(each["constant"]) if isinstance(each, Mapping) else None

    made = Signature(
        inputs=tuple(constant(each) or leaf_of(each) for each in data["inputs"]),
        outputs=tuple(constant(each) or str(each) for each in data["outputs"]),
        changed=tuple((str(value), str(name)) for value, name in data["changed"]),
        buffers=tuple(map(leaf_of, data["buffers"])),
        call=structure_of(str(data["call"])),
        result=structure_of(str(data["result"])),
    )
    if (made.call.num_leaves, made.result.num_leaves) != (len(made.inputs), len(made.outputs)):
        raise ValueError("structures have other leaves than there are")
    return made
