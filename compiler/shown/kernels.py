"""Kernels as text: what each computes, and why it is neither larger nor smaller."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiler.isa.kernel import Tensor
from shardwright.compiler.isa.kernel_text import to_text
from shardwright.compiler.lower.explain import KernelStory, stories_of
from shardwright.compiler.lower.function import Fixpoint
from shardwright.compiler.lower.write_out import Lowered
from shardwright.compiler.shown.charts import bytes_text, tensor_text


def kernels_text(lowered: Lowered) -> str:
    """The tensors of a function as comments, and its kernels as `kernel_text.parse` reads them."""
    head = "// `loc N` is the N-th op, from 0, of the function's graph before its passes\n"
    tensors = "".join(_tensor(number, tensor) for number, tensor in enumerate(lowered.tensors))
    calls = "".join(
        f"// collective {number}: {call.kind} over {'+'.join(call.axes) or 'the host link'}\n"
        for number, call in enumerate(lowered.collectives)
    )
    return head + tensors + calls + to_text(*lowered.kernels)


def _tensor(number: int, tensor: Tensor) -> str:
    alias = f", memory of tensor {tensor.alias}" if tensor.alias >= 0 else ""
    return f"// tensor {number}: {tensor_text(tensor)}{alias}\n"


def fusion_text(fixpoint: Fixpoint) -> str:
    """Every kernel: operators, what it moves, what fusing saved, and merges that rules refused."""
    lines = [
        "Operators that share a kernel keep what passes between them on chip. `moves`: bytes",
        "through HBM, every input read once and every output written once; `saves`: what the",
        "operators one at a time would have moved besides.",
    ]
    for number, story in enumerate(stories_of(fixpoint)):
        lines += _story(number, story)
    return "\n".join(lines) + "\n"


def _story(number: int, story: KernelStory) -> Iterator[str]:
    yield ""
    yield (
        f"compute kernel {number} {story.name}: {story.operators} operators, moves"
        f" {bytes_text(story.moved_bytes)}, saves {bytes_text(story.avoided_bytes)}"
    )
    for merge in sorted(story.refused, key=lambda m: -m.num_bytes):
        refusal = merge.refusal
        yield (
            f"  {bytes_text(merge.num_bytes)} go to {merge.reader} through HBM:"
            f" {refusal.rule}: {refusal.detail}"
        )
