"""Leaves of users' pytrees by path: the names that arguments and results have from the capture to
the NEFFs, and what a pytree is recognised by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Leaf = tuple[str, Any, Any]
"""Path of a leaf in its pytree, its shape and its element type; both None where it is no array."""
Signature = tuple[Leaf, ...]


def named_leaves(
    prefix: str, tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Leaves of a pytree with their paths: dict keys, field names and positions joined by '/'."""
    import jax

    def text(key: Any) -> str:
        return str(jax.tree_util.keystr((key,), simple=True))

    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]
    return [("/".join(filter(None, (prefix, *map(text, path)))), leaf) for path, leaf in leaves]


def signature(tree: Any) -> Signature:
    """Paths, shapes and element types of a pytree's leaves."""
    return tuple((name, *form(leaf)) for name, leaf in named_leaves("", tree))


def form(leaf: Any) -> tuple[Any, Any]:
    """Shape and element type of a leaf as it is traced; None for what is no array."""
    import jax

    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type):
        return tuple(leaf.shape), str(leaf.dtype)
    if isinstance(leaf, bool | int | float | complex):
        return (), str(jax.numpy.result_type(leaf))
    return None, None
