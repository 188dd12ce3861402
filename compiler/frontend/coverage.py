"""Which operators of XLA this compiler takes, read off the tables it works with.

An operator is taken when every StableHLO name it arrives as has an import rule that does not always
refuse. Nothing is declared twice: a new rule shows here, in `list-operators` and in
`docs/op-coverage.md`.
"""

from __future__ import annotations

from shardwright.compiler.frontend.graphs.forms import FORMS
from shardwright.compiler.frontend.rules import RULES
from shardwright.compiler.frontend.rules.registry import REFUSALS
from shardwright.compiler.machine.target import NEURON_CC, NEURONX_CC
from shardwright.compiler.surface.framework_operators import LISTED
from shardwright.compiler.surface.operators import (
    DOCUMENTED,
    NEURON_CC_LISTED,
    OPERATORS,
    Operator,
)
from shardwright.compiler.surface.releases import Profile


def is_supported(operator: Operator) -> bool:
    """Whether every form of the operator is imported."""
    return all(_imported(name) for name in operator.hlo)


def _imported(hlo: str) -> bool:
    names = {f"stablehlo.{hlo}", f"chlo.{hlo}"}
    return bool(names & (RULES.keys() - REFUSALS))


def operator_names(profile: Profile, compiler: str = NEURONX_CC) -> list[str]:
    """Builder names of the supported operators: all of ours, those of a release's table, or those
    that neuron-cc lists."""
    rows = OPERATORS if profile.is_own else DOCUMENTED
    rows = NEURON_CC_LISTED if compiler == NEURON_CC else rows
    return [row.name for row in rows if profile.at_least(row.since) and is_supported(row)]


def framework_names(framework: str, compiler: str = NEURONX_CC) -> list[str]:
    """A framework's operators that have rows, whatever the release: none documents such models. Of
    neuron-cc those that it lists."""
    table = next(row for row in FORMS if row.form.name.lower() == framework)
    held = dict.fromkeys(row.operator for row in table.operators())
    if compiler == NEURON_CC:
        return sorted(name for name in LISTED[framework] if name in held)
    return list(held)
