"""Faults of hardware that end an execution, by their classes, with the runtime's status of each.

Sources: nrt_status.h of the runtime's API (codes, and what each means), the runtime's
troubleshooting page (classes). What a core does until it fails is inferred: one whose memory or DMA
fails, or that hangs, is never heard of again; one that hangs on collectives computes up to its
first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.sim_cluster.timing.macro import MacroOp, Send, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultClass:
    """The status of an execution on a core with the fault, what is said of it, and what helps."""

    code: int
    status: str
    says: str
    action: str
    computes: bool = False

    @property
    def text(self) -> str:
        """For messages."""
        return f"{self.says}, {self.status} ({self.code})"


_REPLACE = "stop and start the instance, which gives it other hardware, and resume"
FAULT_CLASSES: Mapping[str, FaultClass] = {
    "sram": FaultClass(
        code=1202,
        status="NRT_EXEC_HW_ERR_NC_UE",
        says="a parity error of on-chip memory",
        action=_REPLACE,
    ),
    "hbm": FaultClass(
        code=1201,
        status="NRT_EXEC_HW_ERR_HBM_UE",
        says="an uncorrectable error of HBM that cannot be repaired",
        action=_REPLACE,
    ),
    "hbm-repairable": FaultClass(
        code=1205,
        status="NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE",
        says="an uncorrectable error of HBM that can be repaired",
        action="reboot the instance, which repairs the rows, and resume",
    ),
    "dma": FaultClass(
        code=1203,
        status="NRT_EXEC_HW_ERR_DMA_ABORT",
        says="a DMA engine that aborted",
        action=_REPLACE,
    ),
    "collectives": FaultClass(
        code=1200,
        status="NRT_EXEC_HW_ERR_COLLECTIVES",
        says="a hang on collectives",
        action="look for a fault of hardware on another worker first, then " + _REPLACE,
        computes=True,
    ),
    "compute": FaultClass(
        code=5,
        status="NRT_TIMEOUT",
        says="a hang on compute",
        action="run the file on another core; where it hangs there too, it is the program",
    ),
}
"""By the words of `[faults] hardware`."""


def heard_of(kind: str, macros: Sequence[MacroOp]) -> Sequence[MacroOp]:
    """What a core with a fault does before it fails."""
    if not FAULT_CLASSES[kind].computes:
        return ()
    meets = (n for n, op in enumerate(macros) if isinstance(op, Start | Send))
    return macros[: next(meets, len(macros))]
