"""What a kernel means, as bytes that are equal for equal kernels, NaN included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.compiler.isa.encode import pack_attrs
from shardwright.compiler.isa.kernel import KernelProgram


def pack_kernel(program: KernelProgram) -> bytes:
    """See the module."""
    nodes = [[n.op, n.inputs, n.iter_dims, n.dtype, _sorted(n.attrs)] for n in program.nodes]
    head = [program.kind, program.name, program.iter_dims, program.loc, _sorted(program.attrs)]
    return pack_attrs([*head, nodes])


def _sorted(attrs: Mapping[str, Any]) -> bytes:
    return pack_attrs({key: attrs[key] for key in sorted(attrs)})
