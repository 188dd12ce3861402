"""The operators of XLA by their builder names: neuronx-cc's published table, and what it takes
beyond the table.

`hlo` are the StableHLO names an operator arrives as; `since` is the release that added the row, as
`timeline.py` has it; `note` is the restriction the table prints. What this compiler does with a
row is not written here: it follows from the import rules (`frontend/coverage.py`).
Source: release notes 2.6.0.19 and 2.13.68 (62 equal rows), rows by release from the history of that
page; extras from error pages, later release notes and the JAX notes.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.compiler.surface.releases import Profile
from shardwright.compiler.surface.timeline import Row, Subject, row_of, rows


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of XLA."""

    name: str
    hlo: tuple[str, ...]
    note: str = ""
    documented: bool = True
    error: str = ""  # the code of a documented refusal or restriction

    @property
    def since(self) -> str:
        """The release that added the row; empty: the first."""
        return row_of(Subject.OPERATOR, self.name).since


_NEVER = "not supported"  # by the documentation
_TAKEN_APART = "taken apart by the conversion to StableHLO"


def _rows(names: str, documented: bool = True) -> tuple[Operator, ...]:
    """Rows without restriction: `Name=hlo_name`, or the name alone where it is the same."""
    pairs = (item.partition("=") for item in names.split())
    return tuple(
        Operator(name, (hlo or name.lower(),), documented=documented) for name, _, hlo in pairs
    )


def _extra(name: str, *hlo: str, note: str = "", error: str = "") -> Operator:
    return Operator(name, hlo, note=note, documented=False, error=error)


_TABLE = (
    *_rows(
        "Abs Add Allgather=all_gather Allreduce=all_reduce Batchnorm=batch_norm_training"
        " Batchnormgrad=batch_norm_grad Batchnorminference=batch_norm_inference Broadcast"
        " BroadcastInDim=broadcast_in_dim Ceil Clamp Compare Concatenate Constant"
        " ConstantLiteral=constant ConvertElementType=convert Cos=cosine Customcall=custom_call"
        " Div=divide Dot DotGeneral=dot_general Eq=compare Exp=exponential Floor Ge=compare"
        " Gt=compare Iota Le=compare Log LogicalAnd=and Lt=compare"
        " Max=maximum Min=minimum Mul=multiply Ne=compare Neg=negate Pad Reshape RngUniform=rng"
        " Rsqrt Scatter Select ShiftRightLogical=shift_right_logical Sign Sin=sine Slice Sqrt"
        " Sub=subtract Tanh Transpose"
    ),
    # Added by later releases, or with a restriction.
    Operator("Atan2", ("atan2",)),
    Operator("LogicalNot", ("not",)),
    Operator("DynamicUpdateSlice", ("dynamic_update_slice",), "constant index only"),
    Operator("Rev", ("reverse",)),
    Operator("SelectAndScatter", ("select_and_scatter",)),
    Operator("BitcastConvertType", ("bitcast_convert",)),
    Operator("Tuple", (), note=_TAKEN_APART),
    Operator("GetTupleElement", (), note=_TAKEN_APART),
    Operator(
        "Gather",
        ("gather",),
        note="start_index_map and remapped offset dims must be disjoint",
        error="NCC_EVRF056",
    ),
    Operator("Pow", ("power",), note="exponent a compile-time integer constant (to 2.3.0.4)"),
    Operator("Reduce", ("reduce",), note="only min, max, add, mul with a constant init value"),
    Operator(
        "RngBitGenerator",
        ("rng_bit_generator",),
        note="ignores the user's seed (to 2.9.0.16)",
        error="NCC_EVRF006",
    ),
    # Beyond the published table.
    *_rows(
        "ReduceScatter=reduce_scatter AllToAll=all_to_all CollectivePermute=collective_permute"
        " PartitionId=partition_id ReplicaId=replica_id ShiftLeft=shift_left"
        " DynamicSlice=dynamic_slice OptimizationBarrier=optimization_barrier"
        " ReducePrecision=reduce_precision LogicalOr=or LogicalXor=xor Rem=remainder"
        " Expm1=exponential_minus_one Log1p=log_plus_one Logistic Cbrt Tan IsFinite=is_finite"
        " RoundNearestEven=round_nearest_even RoundNearestAfz=round_nearest_afz"
        " PopulationCount=popcnt Clz=count_leading_zeros",
        documented=False,
    ),
    _extra("Conv", "convolution", note="not both dilations", error="NCC_EVRF010"),
    _extra("ReduceWindow", "reduce_window", note="dilations must be 1", error="NCC_EVRF017"),
    _extra(
        "ShiftRightArithmetic",
        "shift_right_arithmetic",
        note="first operand of 32 bits",
        error="NCC_EVRF022",
    ),
    _extra("CollectiveBroadcast", "collective_broadcast", note="becomes an all-gather (SDK 2.29)"),
    _extra("RaggedAllToAll", "custom_call", note="AllToAll of variable sizes, in static buffers"),
    _extra("Send", "collective_permute", note="a permute, with the Recv of its channel"),
    _extra("Recv", "collective_permute", note="a permute, with the Send of its channel"),
    _extra("Sort", "sort", note="comparators LE, GE, LT, GT"),
    _extra("TopK", "sort", note="float only; legalised to a sort", error="NCC_EVRF013"),
    _extra("While", "while", note="static trip count"),
    _extra("Conditional", "case", "if", note="not supported (JAX notes)"),
    _extra("Composite", "composite", note="taken as its decomposition"),
    _extra("Complex", "complex", "real", "imag", note="complex types", error="NCC_EVRF004"),
    _extra("Fft", "fft", note=_NEVER),
    _extra("Cholesky", "cholesky", note=_NEVER),
    _extra("TriangularSolve", "triangular_solve", note=_NEVER, error="NCC_EUOC002"),
)
OPERATORS: tuple[Operator, ...] = tuple(sorted(_TABLE, key=lambda row: row.name.lower()))
DOCUMENTED = tuple(row for row in OPERATORS if row.documented)


_LATER_THAN_NEURON_CC = ("Rev", "SelectAndScatter", "BitcastConvertType")
NEURON_CC_LISTED = tuple(row for row in DOCUMENTED if row.name not in _LATER_THAN_NEURON_CC)
"""neuron-cc's list of XLA operators: the table of neuronx-cc without three rows that came later."""
_CPU_NODES = ("Gather",)
_BESIDE = ("Conv", "ReduceWindow", "Sort", "TopK", "While", "Composite")
_OF_LISTED = ("Logistic", "Expm1", "Log1p", "LogicalOr", "LogicalXor", "Rem", "IsFinite", "Tan")


def neuron_cc_reason(hlo: str) -> str:
    """Why neuron-cc leaves an operator to the CPU, as the end of a sentence; empty for one that it
    compiles, and for what is no operator of XLA.

    Beside its list of XLA operators count those that its documents name in other words
    (convolutional networks, static control flow, sort, top-k) and those that are made of listed
    ones (logistic of exp and add).
    Gather ran as a CPU node of the runtime inside of the file.
    Source: release notes of neuron-cc, and their operator lists; the part about what is made of
    listed ones is ours.
    """
    rows = [row for row in OPERATORS if hlo in row.hlo]
    if any(row.name in _CPU_NODES for row in rows):
        return "runs as a CPU node of the runtime"
    if any(row.name in _LATER_THAN_NEURON_CC for row in rows):
        return "came with neuronx-cc"
    named = (*_BESIDE, *_OF_LISTED)
    if not rows or any(row.documented or row.name in named for row in rows):
        return ""
    return "is in no list of neuron-cc"


def added_later(profile: Profile) -> dict[str, Operator]:
    """StableHLO name -> row, for rows that the release of `profile` does not have yet."""
    return {name: row for row in DOCUMENTED if not profile.at_least(row.since) for name in row.hlo}


_CALLS = {
    "TopK": ("chlo.top_k", "AwsNeuronTopK", "ApproxTopK"),
    "QuantizeMX": ("QuantizeMX", "__op$block_scaled_dot"),
}
"""Call of the time line -> operators and targets of custom calls it arrives as."""


def calls_added_later(profile: Profile) -> dict[str, Row]:
    """Operator or target of a custom call -> its row, for those that the release of `profile` does
    not have yet."""
    later = [row for (row,) in rows(Subject.CALL).values() if not profile.holds(row)]
    return {name: row for row in later for name in _CALLS[row.name]}


def refusal_code(hlo: str) -> str:
    """The code for a StableHLO operator without an import rule."""
    codes = [row.error for row in OPERATORS if row.note == _NEVER and hlo in row.hlo and row.error]
    return codes[0] if codes else "NCC_EVRF001"
