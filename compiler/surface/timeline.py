"""What each release of neuronx-cc has, as one table: flags, their values (targets, strategies and
cast types among them), defaults, operators, element types, calls and behaviours.

Every gate of the compiler reads a row of it (`Profile.holds`), so a fact of a release and its
source are written once. A row holds from `since` up to, not including, `until`; without them from
the first release on, and still. Sources: release notes of neuronx-cc (2022-10 to 2026-08), the
history of its command reference, error pages; "(inferred)" marks a release that no page names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any


class Subject(StrEnum):
    """What a row of the table is about."""

    FLAG = "flag"
    VALUE = "value"
    DEFAULT = "default"
    OPERATOR = "operator"
    CALL = "custom call"
    TYPE = "element type"
    BEHAVIOUR = "behaviour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fact: `name` is a flag, operator, type or behaviour, `value` that of a flag.

    From `deprecated` on the release still takes it, with a warning; `text` says what it means.
    """

    subject: Subject
    name: str
    value: Any = ""
    since: str = ""
    until: str = ""
    deprecated: str = ""
    text: str = ""
    source: str = "release notes"


_CLI = "command reference"
_ERRORS = "error pages"


def _flag(name: str, since: str, **rest: str) -> Row:
    return Row(subject=Subject.FLAG, name=name, since=since, **rest)


def _value(flag: str, value: str, since: str, **rest: str) -> Row:
    return Row(subject=Subject.VALUE, name=flag, value=value, since=since, **rest)


def _default(flag: str, value: Any, text: str, **rest: str) -> Row:
    return Row(subject=Subject.DEFAULT, name=flag, value=value, text=text, **rest)


def _operator(name: str, since: str) -> Row:
    return Row(subject=Subject.OPERATOR, name=name, since=since)


def _type(name: str) -> Row:
    source = "release notes 2.5.0.28, of the cast type (inferred)"
    return Row(subject=Subject.TYPE, name=name, since="2.5.0.28", source=source)


def _behaviour(name: str, since: str, text: str, **rest: str) -> Row:
    return Row(subject=Subject.BEHAVIOUR, name=name, since=since, text=text, **rest)


ROWS: tuple[Row, ...] = (
    _flag("enable-experimental-o1", "2.4.0.21", deprecated="2.10.0.34"),
    _flag("num-parallel-jobs", "2.4.0.21"),
    _flag("neuroncore-pipeline-cores", "", deprecated="2.4.0.21", text="removed in 2.4.0.21"),
    _flag("distribution-strategy", "2.6.0.19"),
    _flag("enable-saturate-infinity", "2.7.0.40"),
    _flag("optlevel", "2.10.0.34"),
    _flag("enable-mixed-precision-accumulation", "2.13.66"),
    _flag("disable-dge", "2.15.128"),
    _flag("logical-nc-config", "2.16.345", source=f"{_CLI}, SDK 2.21 of 12/03/2024 (inferred)"),
    _flag("disable-mixed-precision-accumulation", "2.22.12471"),
    _flag("native-int64", "2.27.5334"),
    _flag("implicit-integer-downcast", "2.27.5334"),
    # Values: machines, model types, casts, strategies.
    _value("target", "inf2", "2.4.0.21", text="in the usage text since 2.5.0.28"),
    _value("target", "trn1n", "2.5.0.28"),
    _value("target", "trn2", "2.16.345", source=f"{_CLI}, SDK 2.21 of 12/03/2024 (inferred)"),
    _value(
        "target",
        "trn3",
        "2.22.12471",
        text="never in the list of targets",
        source=f"{_ERRORS} EVRF051 and EVRF052, first with SDK 2.27 (inferred)",
    ),
    _value("model-type", "unet-inference", "2.6.0.19"),
    _value("auto-cast", "matmul", "", deprecated="2.5.0.28", source=f"{_CLI} of 03/21/2023"),
    _value("auto-cast-type", "fp8_e4m3", "2.5.0.28"),
    _value(
        "distribution-strategy",
        "fsdp",
        "2.6.0.19",
        until="2.7.0.40",
        text="withdrawn from the command reference on 06/14/2023",
        source=f"release notes 2.6.0.19, {_CLI} of 05/01 and 06/14/2023",
    ),
    _value(
        "distribution-strategy",
        "nemo",
        "2.8.0.25",
        deprecated="2.11.0.34",
        text="its support ended with SDK 2.15 (2.11.0.35)",
        source="release notes 2.8.0.25, end-of-support notice of 10/26/2023",
    ),
    _value("distribution-strategy", "llm-training", "2.11.0.34"),
    # Defaults that a release changed.
    _default(
        "auto-cast",
        "matmult",
        "operands of fp32 products are cast, to bf16 unless --auto-cast-type says otherwise",
        until="2.22.12471",
        source="release notes 2.20.9961 and 2.22.12471",
    ),
    _default(
        "auto-cast",
        "none",
        "types are the model's",
        since="2.22.12471",
        source="release notes 2.20.9961 and 2.22.12471",
    ),
    _default(
        "enable-mixed-precision-accumulation",
        False,
        "intermediates of reductions are rounded to the declared type",
        until="2.22.12471",
        source="release notes 2.13.66 and 2.22.12471",
    ),
    _default(
        "enable-mixed-precision-accumulation",
        True,
        "intermediates of reductions of short types stay fp32",
        since="2.22.12471",
        source="release notes 2.13.66 and 2.22.12471",
    ),
    # Operators of the published table that are younger than it.
    *(_operator(name, "2.2.0.73") for name in ("Atan2", "LogicalNot", "DynamicUpdateSlice")),
    _operator("Rev", "2.3.0.4"),
    _operator("SelectAndScatter", "2.4.0.21"),
    _operator("BitcastConvertType", "2.6.0.19"),
    Row(
        subject=Subject.CALL,
        name="TopK",
        since="2.6.0.19",
        text="TopK in sampling mode; the table never got a row",
    ),
    Row(
        subject=Subject.CALL,
        name="QuantizeMX",
        since="2.27.5334",
        text="microscaling: QuantizeMX and block-scaled dots, on trn3",
        source=f"{_ERRORS} EVRF036 to 058, first in 07/2026 (inferred)",
    ),
    *map(_type, ("f8E4M3", "f8E4M3FN", "f8E5M2")),
    # What graphs mean and where they are refused.
    _behaviour("pow_any_exponent", "2.3.0.4", "Pow takes any integer or float exponent"),
    _behaviour("rng_seed_used", "2.9.0.16", "RngBitGenerator honours 32 bits of its seed"),
    _behaviour(
        "index_check",
        "2.12.54",
        "indices of gather and scatter are checked while a program runs",
    ),
    _behaviour(
        "constant_index_check",
        "2.24.5133",
        "constant indices and those of an iota are checked by the compiler",
        source="release notes of SDK 2.29; error pages EVRF056 and ESMP002",
    ),
    _behaviour(
        "indirect_access_refused",
        "2.13.66",
        "indirect loads and saves that are not contiguous per partition are refused",
        source="release notes of 04/2024, known issues; no later notes withdraw it (inferred)",
    ),
    _behaviour(
        "dynamic_update_index",
        "2.14.213",
        "DynamicUpdateSlice takes a computed index",
        source="the table's note is last repeated by the release notes of 04/2024 (inferred)",
    ),
    _behaviour(
        "output_over_4gb_refused",
        "2.22.12471",
        "an output tensor over 4 GB is refused (EVRF024)",
        until="2.24.5133",
        source="error page EVRF024, withdrawn 04/11/2026",
    ),
    _behaviour(
        "saturate_any_operation",
        "2.7.0.40",
        "--enable-saturate-infinity acts in front of every operation that may give NaN",
        until="2.13.66",
        source="release notes 2.7.0.40 and 2.13.66 (narrowed to transposes)",
    ),
    _behaviour(
        "coalesced_reductions",
        "2.27.5334",
        "small reduce-scatters that follow each other are one",
        source="notes of SDK 2.30",
    ),
    _behaviour(
        "one_hot_gather",
        "2.27.5334",
        "a one-hot matrix times a table is a gather",
        source="notes of SDK 2.32",
    ),
    _behaviour("bool_add_is_or", "2.27.5334", "boolean add is OR", source="notes of SDK 2.30"),
)
"""Every fact, by subject."""


@cache
def rows(subject: Subject) -> Mapping[str, tuple[Row, ...]]:
    """The rows of a subject by name, in order of release."""
    found: dict[str, tuple[Row, ...]] = {}
    for row in ROWS:
        if row.subject is subject:
            found[row.name] = (*found.get(row.name, ()), row)
    return found


def row_of(subject: Subject, name: str, value: str = "") -> Row:
    """The row of a name and value; one that always holds where the table has none."""
    found = rows(subject).get(name, ())
    always = Row(subject=subject, name=name, value=value)
    return next((row for row in found if row.value == value), always)


def behaviour(name: str) -> Row:
    """The row of a behaviour. Raises KeyError for one the table does not have."""
    (row,) = rows(Subject.BEHAVIOUR)[name]
    return row
