"""Modules whose activations are computed again in the backward pass: activation checkpointing.

A call of such a module is a stretch of neighbouring nodes of the graph, which is run as one
function under `jax.checkpoint`: what enters it is kept, what it makes inside is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwright.compiler.frontend.pytorch.distribution import Recompute

if TYPE_CHECKING:
    import torch

Modules = Mapping[str, Recompute]
"""Paths of modules that are computed again, and what they keep."""


def stretches(
    nodes: Sequence[torch.fx.Node], path_of: Callable[[torch.fx.Node], str], modules: Modules
) -> Iterator[tuple[str, list[torch.fx.Node]]]:
    """The nodes in order, those of a call of one of `modules` together under its path, others
    under ""."""
    path = ""
    held: list[torch.fx.Node] = []
    for node in nodes:
        own = _around(path_of(node), modules) if node.op == "call_function" else ""
        if held and (own != path or not own):
            yield path, held
            held = []
        path = own
        held.append(node)
    if held:
        yield path, held


def _around(path: str, modules: Modules) -> str:
    """The outermost of `modules` that a path is in, "" for none."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        if (outer := ".".join(parts[:end])) in modules:
            return outer
    return ""


def computed_again(
    nodes: Sequence[torch.fx.Node],
    keeps: Recompute,
    known: dict[Any, Any],
    run: Callable[[torch.fx.Node, dict[Any, Any]], None],
) -> None:
    """Enter what `nodes` make into `known`; `run` enters what one makes into what it is given."""
    import jax

    inside = set(nodes)
    read = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    made = [node for node in nodes if any(user not in inside for user in node.users)]

    def again(given: Sequence[Any]) -> list[Any]:
        own = dict(zip(read, given, strict=True))
        for node in nodes:
            run(node, own)
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
