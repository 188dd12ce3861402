"""Where a node of a graph comes from: the user's lines, and the path of the module."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.compiler.diagnostics import Loc, UsageError
from shardwright.compiler.frontend.locations import LocationReader

if TYPE_CHECKING:
    import torch

WRAPPED = "module"
"""What the user's module is called in ours that computes its loss (`training.py`)."""
MOST_FRAMES = 6  # of a node's stack, the innermost ones (JAX keeps ten)


def module_path(node: torch.fx.Node) -> str:
    """The path of the module that a node is in, `layers.0.attention`; "" of the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return path.removeprefix(WRAPPED).removeprefix(".")


_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@cache
def _torch_folder() -> str:
    import torch

    return str(Path(torch.__file__).parent)


def frames(node: torch.fx.Node) -> tuple[tuple[str, int], ...]:
    """(file, line) of the calls that led to a node, the innermost first, without torch's own."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    nobodys = (_torch_folder(), "<eval_with_key>")  # torch's own, and code that it wrote
    own = [(file, int(line)) for file, line, _ in found if not file.startswith(nobodys)]
    return tuple(own[::-1][:MOST_FRAMES])


def raised_at(error: BaseException) -> Loc | None:
    """The innermost line that an error came through of code that is not torch's, nor made by it."""
    traced = traceback.extract_tb(error.__traceback__)[::-1]
    own = [
        (frame.filename, frame.lineno or 0)
        for frame in traced
        if not frame.filename.startswith((_torch_folder(), "<"))
    ]
    return LocationReader().innermost(own) if own else None


def user_line(node: torch.fx.Node) -> Loc | None:
    """The user's innermost line of a node."""
    found = frames(node)
    return LocationReader().innermost(found) if found else None


@contextmanager
def at_line(node: torch.fx.Node) -> Iterator[None]:
    """Say the user's line of a node where an error has none."""
    try:
        yield
    except UsageError as error:
        d = error.diagnostic
        if d.loc is not None:
            raise
        raise UsageError(d.code, d.message, user_line(node), d.hint) from error
    except NotImplementedError as error:  # JAX's, of a gradient
        raise UsageError(
            "SW_TORCH_OPERATOR",
            f"an operator with a gradient is required, got {node.target}: {error}",
            user_line(node),
            "detach what goes in, or write it with other operators",
        ) from error
