"""The status that a run ends with, in the Neuron runtime's numbers.

Names and numbers are those of the runtime's API page (nrt_status). Which of our errors ends a run
with which of them is decided here, once.
"""

from __future__ import annotations

import re
from enum import IntEnum

from shardwright.compiler.diagnostics import DiagnosticError, UsageError


class Status(IntEnum):
    """What an execution, or a load, returns."""

    NRT_SUCCESS = 0
    NRT_FAILURE = 1
    NRT_INVALID = 2
    NRT_INVALID_HANDLE = 3
    NRT_RESOURCE = 4
    NRT_TIMEOUT = 5
    NRT_HW_ERROR = 6
    NRT_QUEUE_FULL = 7
    NRT_LOAD_NOT_ENOUGH_NC = 9
    NRT_UNSUPPORTED_NEFF_VERSION = 10
    NRT_FAIL_HOST_MEM_ALLOC = 11
    NRT_UNINITIALIZED = 13
    NRT_CLOSED = 14
    NRT_QUEUE_EMPTY = 15
    NRT_EXEC_UNIT_UNRECOVERABLE = 101
    NRT_EXEC_BAD_INPUT = 1002
    NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003
    NRT_EXEC_COMPLETED_WITH_ERR = 1004
    NRT_EXEC_NC_BUSY = 1005
    NRT_EXEC_OOB = 1006
    NRT_COLL_PENDING = 1100
    NRT_EXEC_HW_ERR_COLLECTIVES = 1200
    NRT_EXEC_HW_ERR_HBM_UE = 1201
    NRT_EXEC_HW_ERR_NC_UE = 1202
    NRT_EXEC_HW_ERR_DMA_ABORT = 1203
    NRT_EXEC_SW_NQ_OVERFLOW = 1204
    NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205
    NRT_NETWORK_PROXY_FAILURE = 1206

    def __str__(self) -> str:
        return f"{self.name} ({self.value})"


_SAID = re.compile(r"NRT_\w+ \((\d+)\)")
_OF_CODES = {
    "SW_SIM_NAN": Status.NRT_EXEC_COMPLETED_WITH_NUM_ERR,
    "SW_NEFF_INPUTS": Status.NRT_EXEC_BAD_INPUT,
    "SW_INPUTS": Status.NRT_EXEC_BAD_INPUT,
    "SW_SIM_SHAPE": Status.NRT_EXEC_BAD_INPUT,
    "SW_SIM_INDEX": Status.NRT_EXEC_OOB,
    "SW_SIM_MEMORY": Status.NRT_FAIL_HOST_MEM_ALLOC,
    "SW_SIM_LOCK_STEP": Status.NRT_EXEC_HW_ERR_COLLECTIVES,
    "SW_SIM_DEADLOCK": Status.NRT_EXEC_HW_ERR_COLLECTIVES,
    "SW_TIME_DEADLOCK": Status.NRT_EXEC_HW_ERR_COLLECTIVES,
    "SW_DEAD_CORE": Status.NRT_EXEC_HW_ERR_COLLECTIVES,
    "SW_EXEC_TIMEOUT": Status.NRT_TIMEOUT,
    "SW_LOAD_ARCHITECTURE": Status.NRT_UNSUPPORTED_NEFF_VERSION,
    "SW_LOAD_LNC": Status.NRT_INVALID,
    "SW_LOAD_PAGE": Status.NRT_INVALID,
    "SW_LOAD_CORES": Status.NRT_LOAD_NOT_ENOUGH_NC,
    "SW_LOAD_MEMORY": Status.NRT_RESOURCE,
    "SW_NEFF_VERSION": Status.NRT_UNSUPPORTED_NEFF_VERSION,
}
"""What ends with a status of its own; any other damage of a file is NRT_INVALID, any other end of
an execution NRT_EXEC_COMPLETED_WITH_ERR."""


def status_of(error: DiagnosticError) -> Status:
    """The status of an error of loading or running a file: the one that it says, else that of its
    code."""
    if found := _SAID.search(error.diagnostic.message):
        return Status(int(found[1]))
    if error.code in _OF_CODES:
        return _OF_CODES[error.code]
    if error.code.startswith(("SW_NEFF_", "SW_LOAD_", "SW_USAGE", "SW_ENVIRONMENT")):
        return Status.NRT_INVALID
    return Status.NRT_EXEC_COMPLETED_WITH_ERR


def with_status(error: DiagnosticError) -> DiagnosticError:
    """The error with its status in the message, where that does not say one."""
    found = error.diagnostic
    is_typed = isinstance(error, UsageError) and error.code not in _OF_CODES
    if is_typed or "NRT_" in found.message:
        return error
    text = f"{found.message}; {status_of(error)}"
    made: DiagnosticError = type(error)(found.code, text, found.loc, found.hint)
    return made
