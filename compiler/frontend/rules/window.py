"""`reduce_window` and `select_and_scatter`: bodies become kinds, start values become identities.

A start value that is not the identity counts once per window, in an op of its own; as in XLA,
padding takes no part whatever the start value is. Other bodies, and those that mix several
operands, are folded (`fold.py`). Dilated windows are refused as neuronx-cc does.
"""

from __future__ import annotations

from shardwright.compiler.frontend.mlir import direction, producer, results_of
from shardwright.compiler.frontend.rules.convolution import ints_or_ones, paddings
from shardwright.compiler.frontend.rules.fold import fold_windows
from shardwright.compiler.frontend.rules.reduce import body_kind, combine, known_kinds
from shardwright.compiler.frontend.rules.registry import Site, Values, imports, refuse
from shardwright.compiler.ir.ops import ReduceWindowAttrs, SelectAndScatterAttrs
from shardwright.compiler.ir.ops.window import SELECTIONS


@imports("stablehlo.reduce_window")
def reduce_window(site: Site) -> Values:
    """One `reduce_window` per operand, where the body is a reduction of each."""
    rank, count = site.operands[0].type.rank, len(site.operands) // 2
    for name, code in (("base_dilations", "NCC_EVRF017"), ("window_dilations", "NCC_EVRF018")):
        given = ints_or_ones(site, name, rank)
        if max(given, default=1) > 1:
            refuse(
                code,
                f"reduce_window requires {name} of 1, got {given}",
                "pad with interior padding, or take a strided slice, before the window",
            )
    windows, results = _windows(site, rank), []
    kinds = known_kinds(site, count)
    if kinds is None:
        padding = windows["low"], windows["high"]
        return fold_windows(site, windows["sizes"], windows["strides"], padding)
    for kind, operand, init in zip(
        kinds, site.operands[:count], site.operands[count:], strict=True
    ):
        attrs = ReduceWindowAttrs(kind, **windows)
        result = site.make.op("reduce_window", operand, attrs=attrs)
        results.append(combine(site, kind, result, init))
    return results


@imports("stablehlo.select_and_scatter")
def select_and_scatter(site: Site) -> Values:
    """Selection by a comparison, sources added up."""
    operand, source, init = site.operands
    if body_kind(site, region=1) != "add":
        refuse(
            "NCC_EVRF001", f"select_and_scatter requires sources to add up, got {body_kind(site)}"
        )
    attrs = SelectAndScatterAttrs(_selection(site), **_windows(site, operand.type.rank))
    result = site.make.op("select_and_scatter", operand, source, attrs=attrs)
    return [combine(site, "add", result, init)]


def _windows(site: Site, rank: int) -> dict[str, tuple[int, ...]]:
    """The fields of attributes that say how windows move; sizes and steps are 1 unless given."""
    sizes = ints_or_ones(site, "window_dimensions", rank)
    strides = ints_or_ones(site, "window_strides", rank)
    return {"sizes": sizes, "strides": strides, **paddings(site, rank)}


def _selection(site: Site) -> str:
    """The direction of the comparison that keeps the selected element."""
    found, what = _direction(site)
    if found not in SELECTIONS:
        refuse(
            "NCC_EVRF001",
            f"select_and_scatter requires compare(selected, current) by {' '.join(SELECTIONS)},"
            f" got {what} {found}".rstrip(),
        )
    return found


def _direction(site: Site) -> tuple[str, str]:
    """(direction, op name) of the selection body; no direction when it compares something else."""
    block = site.op.regions[0].blocks[0]
    made = producer(*results_of(block))
    if made is None:
        return "", "an argument"
    in_order = list(made.operands) == list(block.arguments)
    if made.name != "stablehlo.compare" or not in_order:
        return "", made.name
    return direction(made.attributes["comparison_direction"]), made.name
