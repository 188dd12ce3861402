"""Modules whose activations are computed again in the backward pass: activation checkpointing.

A call of such a module is a stretch of neighbouring nodes of the graph, which is run as one
function under `jax.checkpoint`: what enters it is kept, what it makes inside is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwright.compiler.frontend.pytorch.distribution import Recompute
from shardwright.compiler.frontend.pytorch.places import module_path

if TYPE_CHECKING:
    import torch

Modules = Mapping[str, Recompute]
"""Paths of modules that are computed again, and what they keep."""


def recomputed_around(node: torch.fx.Node, modules: Modules) -> str:
    """The outermost of `modules` that a node is in, "" for none."""
    if not modules or node.op != "call_function":
        return ""
    parts = module_path(node).split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((path for path in paths if path in modules), "")


def computed_again(
    nodes: Sequence[torch.fx.Node],
    keeps: Recompute,
    known: dict[Any, Any],
    run: Callable[[Sequence[torch.fx.Node], dict[Any, Any]], None],
) -> None:
    """Enter what `nodes` make into `known`; `run` does that without computing them again."""
    import jax

    inside = set(nodes)
    read = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    made = [node for node in nodes if any(user not in inside for user in node.users)]

    def again(given: Sequence[Any]) -> list[Any]:
        own = dict(zip(read, given, strict=True))
        run(nodes, own)
        return [own[node] for node in made]

    results = jax.checkpoint(again, policy=_policy(keeps))([known[node] for node in read])
    known.update(zip(made, results, strict=True))


def _policy(keeps: Recompute) -> Any:
    """What `jax.checkpoint` saves: products with weights, in HBM or in the memory of the host."""
    from jax import checkpoint_policies

    if keeps is Recompute.SELECTIVE:
        return checkpoint_policies.dots_with_no_batch_dims_saveable
    if keeps is Recompute.OFFLOAD:
        return checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return None


def layer_lists(module: torch.nn.Module) -> dict[str, int]:
    """Paths of modules that hold several of one class in a row, with how many."""
    found = {}
    for path, holder in module.named_modules():
        names = [name for name, _ in holder.named_children()]
        kinds = {type(child) for child in holder.children()}
        if len(names) > 1 and len(kinds) == 1 and all(map(str.isdigit, names)):
            found[path] = len(names)
    return found


def layers_of(module: torch.nn.Module, remat: str) -> dict[str, Recompute]:
    """The layers of a model as `strategy.remat` has them: the items of its outermost lists."""
    if remat not in [*Recompute]:
        return {}
    lists = layer_lists(module)
    before = {f"{path}." if path else "": count for path, count in lists.items()}
    paths = [f"{start}{n}" for start, count in before.items() for n in range(count)]
    outer = [path for path in paths if not any(path.startswith(f"{one}.") for one in paths)]
    return dict.fromkeys(outer, Recompute(remat))
