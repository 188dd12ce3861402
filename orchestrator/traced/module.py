"""A module that was traced: compiled parts run on the simulator, the others in torch."""

from __future__ import annotations

import io
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardwright.compiler.frontend.pytorch.types import without_gradients
from shardwright.orchestrator.traced import files
from shardwright.orchestrator.traced.parts import Content
from shardwright.orchestrator.traced.report import PartitionReport


class TracedModule(Content):
    """A callable that takes and returns tensors as the module does that was traced, in evaluation
    mode, with the shapes and types of its example. Buffers that the module changes are kept from
    call to call.

    `trace` makes it, `save` writes it as one file, `load` reads that.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. Raises UsageError for arguments unlike the example's."""
        given = self.signature.leaves(args, kwargs)
        values: dict[str, Any] = {**self.tensors, **given}
        with without_gradients():
            for part in self.parts:
                values |= part.run(values)
            for value, name in self.signature.changed:
                if name in given:
                    given[name].copy_(values[value])
                else:
                    self.tensors[name] = values[value]
            return self.signature.results(values)

    def report(self) -> PartitionReport:
        """Its parts, and what stays on the CPU."""
        return self.summary

    def save(self, path: Path | str) -> None:
        """Write it as one file. Raises UsageError where it cannot be written."""
        files.save(self, Path(path))

    def __reduce__(self) -> tuple[Any, ...]:
        """As its file: for copies, other processes and `torch.save`."""
        return loads, (files.content(self),)

    def __repr__(self) -> str:
        made = ", ".join(f"{key} {value}" for key, value in self.made_by.items())
        return f"TracedModule {self.name} ({made})\n{self.summary}"


def load(path: Path) -> TracedModule:
    """The traced module of a file. Raises LoadError, as `files.load`."""
    return _of(files.load(path))


def loads(data: bytes) -> TracedModule:
    """The traced module of the bytes of a file. Raises LoadError, as `files.load`."""
    return _of(files.load(io.BytesIO(data)))


def _of(found: Content) -> TracedModule:
    return TracedModule(**{field.name: getattr(found, field.name) for field in fields(found)})
