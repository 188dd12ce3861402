"""What became of a traced module: its parts, their operators, what crosses between them, and why
what stays on the CPU does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.compiler.frontend.pytorch.splitting import Kept, Part, Split, Traced

NEURON, CPU = "neuron", "cpu"
_MOST = 12  # kinds of operators, and operators on the CPU, that are shown (our choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """One part. Operators by how often they are called; bytes are those of tensors that come from
    and go to other parts or the caller, in each call; `weight_bytes` are there before."""

    where: str
    operators: Mapping[str, int]
    bytes_in: int
    bytes_out: int
    weight_bytes: int

    @property
    def count(self) -> int:
        """Operators."""
        return sum(self.operators.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow:
    """Operators of one kind and line that stay on the CPU."""

    operator: str
    module: str
    line: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """The parts of a module in the order in which they run, and what stays on the CPU."""

    parts: tuple[PartRow, ...]
    kept: tuple[KeptRow, ...]

    @property
    def operators(self) -> int:
        """All operators."""
        return sum(part.count for part in self.parts)

    @property
    def compiled(self) -> int:
        """Operators in NEFF files."""
        return sum(part.count for part in self.parts if part.where == NEURON)

    @property
    def bytes_crossed(self) -> int:
        """Bytes that go into and out of compiled parts in each call."""
        rows = (part for part in self.parts if part.where == NEURON)
        return sum(part.bytes_in + part.bytes_out for part in rows)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        counts = ("operators", "compiled", "bytes_crossed")
        return {**{name: getattr(self, name) for name in counts}, **asdict(self)}

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> PartitionReport:
        """Of its JSON form. Raises KeyError, TypeError for another."""
        parts = tuple(PartRow(**row) for row in data["parts"])
        return cls(parts=parts, kept=tuple(KeptRow(**row) for row in data["kept"]))

    def table(self) -> str:
        """Operators by kind: how many there are, and of how many the code is in NEFF files. Source
        of its columns: the check tools of Inferentia 1 (helper tools page)."""
        counts: dict[str, list[int]] = {}
        for part in self.parts:
            for operator, count in part.operators.items():
                row = counts.setdefault(operator, [0, 0])
                row[0] += count
                row[1] += count if part.where == NEURON else 0
        width = max(map(len, [*counts, "operator"]))
        lines = [f"{'operator':<{width}}  instances  compiled"]
        for operator, (count, compiled) in sorted(counts.items()):
            said = {count: "yes", 0: "no"}.get(compiled, str(compiled))
            lines.append(f"{operator:<{width}}  {count:>9}  {said}")
        return "\n".join(lines)

    def __str__(self) -> str:
        share = self.compiled / self.operators if self.operators else 1.0
        lines = [
            f"{self.compiled} of {self.operators} operators compiled ({share:.1%}),"
            f" {self.bytes_crossed:,} bytes in and out of compiled parts per call"
        ]
        for number, part in enumerate(self.parts):
            lines.append(
                f"part {number} {part.where:6} {part.count} operators, {part.bytes_in:,} bytes in,"
                f" {part.bytes_out:,} out, {part.weight_bytes:,} of weights: {_names(part)}"
            )
        lines += [f"cpu: {_sentence(row)}" for row in self.kept[:_MOST]]
        if len(self.kept) > _MOST:
            lines.append(f"cpu: {len(self.kept) - _MOST} more")
        return "\n".join(lines)


def _names(part: PartRow) -> str:
    ordered = sorted(part.operators.items(), key=lambda item: -item[1])
    shown = [f"{count} {name}" if count > 1 else name for name, count in ordered[:_MOST]]
    return ", ".join([*shown, "..."] if len(ordered) > _MOST else shown)


def _sentence(row: KeptRow) -> str:
    times = f" ({row.count} times)" if row.count > 1 else ""
    where = f"{row.module or 'forward'}" + (f" at {row.line}" if row.line else "")
    return f"{row.operator} in {where}: {row.reason}{times}"


def report_of(traced: Traced, split: Split) -> PartitionReport:
    """The report of a module in parts."""
    return PartitionReport(
        parts=tuple(_row(traced, part) for part in split.parts), kept=kept_rows(split.kept)
    )


def kept_rows(kept: tuple[Kept, ...]) -> tuple[KeptRow, ...]:
    """Rows of what stays on the CPU, each kind of a line once."""
    counts = Counter(kept)
    return tuple(
        KeptRow(
            operator=each.operator,
            module=each.module,
            line=str(each.loc or ""),
            reason=each.reason,
            count=count,
        )
        for each, count in counts.items()
    )


def _row(traced: Traced, part: Part) -> PartRow:
    def size(names: tuple[str, ...]) -> int:
        return sum(leaf.num_bytes for leaf in map(traced.leaf, names) if leaf is not None)

    return PartRow(
        where=NEURON if part.is_compiled else CPU,
        operators=dict(Counter(part.operators)),
        bytes_in=size(part.inputs),
        bytes_out=size(part.outputs),
        weight_bytes=size(part.weights),
    )
