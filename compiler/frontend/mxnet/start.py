"""The form of MXNet's symbols, and how one begins; importing this loads nothing."""

from __future__ import annotations

from shardwright.compiler.frontend.graphs.form import Form


def is_model(data: bytes) -> bool:
    """Whether a file begins as the JSON of a symbol does: no other form begins with a brace."""
    return data[:64].lstrip()[:1] == b"{"


FORM = Form(
    name="MXNet",
    page="docs/mxnet.md",
    check="check it: mxnet.model.load_checkpoint(prefix, epoch)",
    is_model=is_model,
)
"""MXNet's symbols."""
