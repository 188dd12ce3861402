"""Sizes of dims that a model leaves open: `batch=4,x=4x3x8x8` says named dims and whole inputs.

In an input of which a file says nothing, `?` is the samples of a training step: `x=?x3x8x8`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.diagnostics import ImportRuleError, Loc, UsageError, did_you_mean
from shardwright.compiler.frontend.graphs.errors import untyped
from shardwright.compiler.frontend.graphs.graph import Value
from shardwright.compiler.frontend.locations import MODULE_FILE

Shape = tuple[int, ...]
Open = tuple[int | None, ...]
_FORM = "name=size of a dim or name=4x3x8x8 of an input, with commas between them"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes by name: of a dim, or of all dims of an input."""

    given: Mapping[str, Open] = field(default_factory=dict)
    samples: int | None = None

    @classmethod
    def of(cls, text: str) -> Sizes:
        """Those that a user writes. Raises UsageError."""
        found = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, sizes = part.rpartition("=")
            numbers = sizes.split("x")
            if not equals or not name or not all(map(_is_size, numbers)):
                raise _refused(_FORM, repr(part))
            found[name.strip()] = tuple(None if n == "?" else int(n) for n in numbers)
        return cls(found)

    def but(self, samples: int, *names: str) -> Sizes:
        """With so many samples, which are also the size of some dims, where they are not said."""
        return Sizes({**dict.fromkeys(names, (samples,)), **self.given}, samples)

    def shapes(self, inputs: Sequence[Value]) -> dict[str, Shape]:
        """The shape of every input of a graph. Raises UsageError for sizes that do not fit, and
        ImportRuleError NCC_EMOD025 for dims without one."""
        names = {value.name for value in inputs} | set(open_dims(inputs))
        for name in self.given:
            if name not in names:
                hint = did_you_mean(name, names, "leave it out: every dim has a size")
                raise _refused(f"names of inputs or open dims, {_listed(names)},", name, hint)
        found = {value.name: self._shape(value) for value in inputs}
        missing = [value for value in inputs if _is_open(found[value.name])]
        if missing:
            raise _open(missing, found)
        return {name: tuple(d for d in dims or () if d is not None) for name, dims in found.items()}

    def _shape(self, value: Value) -> tuple[int | None, ...] | None:
        """The dims of an input, None where there is no size."""
        whole = self.given.get(value.name)
        if whole is not None and whole[0] is None:
            whole = (self.samples, *whole[1:])
        if value.shape is None:
            return whole
        if whole is None:
            return tuple(self._dim(dim) for dim in value.shape)
        fits = len(whole) == len(value.shape) and all(
            isinstance(own, str) or size in (own, None)
            for own, size in zip(value.shape, whole, strict=True)
        )
        if not fits:
            raise _refused(f"{value.name} of {_dims(value.shape)}", f"{_dims(whole)}")
        return whole

    def _dim(self, dim: int | str) -> int | None:
        if isinstance(dim, int):
            return dim
        sizes = self.given.get(dim)
        if sizes is not None and len(sizes) != 1:
            raise _refused(f"one size of dim {dim}", "x".join(str(n or "?") for n in sizes))
        return sizes[0] if sizes else None


def _is_open(dims: Sequence[int | None] | None) -> bool:
    return dims is None or None in dims


def open_dims(inputs: Sequence[Value]) -> Iterator[str]:
    """Names of dims without a size."""
    for value in inputs:
        yield from (dim for dim in value.shape or () if isinstance(dim, str) and dim)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _is_size(text: str) -> bool:
    return text == "?" or (text.isascii() and text.isdigit())


def _dims(shape: Sequence[int | str | None]) -> str:
    return "[" + ", ".join(str(dim) or "?" for dim in shape) + "]"


def _refused(required: str, given: str, hint: str = "") -> UsageError:
    return UsageError(
        "SW_MODEL_SHAPE",
        f"--input-shape requires {required}, got {given}".replace(",,", ","),
        hint=hint or "for example --input-shape batch=4,x=4x3x8x8",
    )


def _open(missing: Sequence[Value], found: Mapping[str, Sequence[int | None] | None]) -> Exception:
    """The error of dims without a size, with the words that give them one."""
    shown, words = [], dict[str, None]()
    for value in missing:
        if value.dtype is None:
            return untyped(f"input {value.name}", "a value without a type")
        shown.append(f"{value.name} {'of any rank' if value.shape is None else _dims(value.shape)}")
        named = [dim for dim in value.shape or () if isinstance(dim, str)]
        if value.shape is None or not all(named):
            sizes = found[value.name] or (None,)
            words[f"{value.name}={'x'.join(str(s or 1) for s in sizes)}"] = None
        else:
            sizes_of = zip(value.shape, found[value.name] or (), strict=True)
            words.update((f"{dim}=1", None) for dim, size in sizes_of if size is None)
    return ImportRuleError(
        "NCC_EMOD025",
        f"every dimension requires a static size, got input {', '.join(shown)}",
        Loc(MODULE_FILE),
        f"say the sizes: --input-shape {','.join(words)}; in a job model.input_shape",
    )
