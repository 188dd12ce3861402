"""Every section of the screens, line by line, from a report that is written here."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from rich.text import Text

from shardwright.orchestrator.report import goal, sections
from shardwright.orchestrator.report.bars import EMPTY

MIB, GIB = 2**20, 2**30


def stream(number: int, kinds: list[str], packet: int, ps: int) -> dict[str, Any]:
    return {"stream": number, "collectives": kinds, "packet_bytes": packet, "time_ps": ps}


def staged(bubble: int) -> dict[str, Any]:
    return {"breakdown_ps": {"bubble": bubble}}


COMPILER = {"optlevel": 3, "model_type": "transformer", "attention": "fused"}
COMPILER |= {"auto_cast": "none", "auto_cast_type": "bf16"}
CAST = {"job": {"compiler": COMPILER | {"auto_cast": "matmult", "auto_cast_type": "tf32"}}}
JOB = (
    "job        7.1 G parameters on 1,024 cores (2 x trn1n.32xlarge), 2.5 PFLOP per step of"
    " 1,500 samples of 4,096 tokens, 3 micro-batches"
)
REPORT: dict[str, Any] = {
    "provenance": {},
    "mesh": {"dp": 4, "tp": 8},
    "graph": {"name": "llama", "params": 7.1e9, "flops_per_step": 2.5e15},
    "job": {
        "strategy": {"name": "fsdp"},
        "cluster": {"instances": 2, "target": "trn1n.32xlarge"},
        "compiler": COMPILER,
    },
    "batch": {"num_microbatches": 3, "tokens_per_sample": 4096, "global_batch": 1500},
    "cores": 1024,
    "context": "",
    "logical_cores": {
        "lnc": 2,
        "kernels_cut": 30,
        "kernels_alone": 10,
        "alone_ps": 500_000_000,
        "hypothetical": False,
        "per_instance": 64,
        "hbm_bytes": 24 * GIB,
    },
    "placement": {"name": "torus", "axes": {"tp": "a ring", "dp": "4 of them"}},
    "streams": {
        "compute_packet_bytes": 4096,
        "streams": [
            stream(0, ["all_gather dp", "all_reduce tp"], 65536, 400_000_000),
            stream(1, ["reduce_scatter dp"], 32768, 100_000_000),
        ],
    },
    "memory": {
        "limit_bytes": 8 * GIB,
        "peak_bytes": 4 * GIB,
        "fits": True,
        "categories": {"parameters": 3 * GIB, "activations": GIB - MIB, "other": MIB},
        "per_stage": [
            {"peak_bytes": 4 * GIB},
            {"peak_bytes": 3 * GIB},
            {"peak_bytes": 3 * GIB},
        ],
    },
    "timing": {
        "step_time_s": 2e-3,
        "step_time_ps": 2_000_000_000,
        "profile": "nominal",
        "band_s": [1e-3, 3.5e-3],
        "breakdown_ps": {"compute": 1_500_000_000, "memory": 499_500_000, "idle": 500_000},
        "tokens_per_s": 12_345.6,
        "mfu": 0.4,
        "hfu": 0.5125,
        "peak_flops_per_s": 6.08e15,
        "confidence": "extrapolated",
        "confidence_why": "no run like it",
        "per_stage": [staged(100_000_000), staged(50_000_000), staged(50_000_000)],
    },
    "cost": {"usd_per_hour": 49.56, "usd_per_step": 0.0275, "usd_per_1e6_tokens": 1.25},
    "price": {
        "machine": "trn1n.32xlarge",
        "kind": "on-demand",
        "given": False,
        "usd_per_hour": 24.78,
        "status": "documented",
        "region": "us-east-1",
        "date": "2025-11-30",
        "published": ["on-demand"],
    },
    "bottleneck": {"text": "compute: engines are busy"},
    "limits": {"assumed": ["a", "b", "c"]},
    "goodput": {
        "goodput": 0.9875,
        "checkpoint_s": 2.5,
        "interval_steps": 40,
        "mtbf_s": 7_200_000,
    },
    "pipeline": {
        "num_microbatches": 8,
        "schedule": "1f1b",
        "stages": [{"layers": [5, 3]}, {"layers": [4]}, {"layers": [4]}],
    },
    "findings": [],
}
"""A step of 2 ms; 4 GiB of 8 GiB."""


def report() -> dict[str, Any]:
    """A report of a test's own."""
    return deepcopy(REPORT)


def changed(**tables: Any) -> dict[str, Any]:
    """The report with some entries of its tables changed, or tables that are no tables."""
    one = report()
    for name, value in tables.items():
        one[name] = one[name] | value if isinstance(value, dict) else value
    return one


def lines(section: sections.Section, one: dict[str, Any], width: int = 200) -> list[str]:
    found = sections.laid(section(one), width)
    assert all(len(line) <= width for line in found)
    return [line.plain for line in found]


SAID: list[tuple[sections.Section, dict[str, Any], str]] = [
    (sections.job, {}, JOB),
    (sections.job, {"graph": {"product_types": {}}}, JOB),
    (
        sections.job,
        {"graph": {"product_types": {"f32": 0.004, "bf16": 0.996}}} | CAST,
        JOB.replace("PFLOP", "PFLOP in bf16"),
    ),
    (
        sections.job,
        {"graph": {"product_types": {"f32": 0.9, "bf16": 0.1}}},
        JOB.replace("PFLOP", "PFLOP in f32 (90 %)"),
    ),
    (
        sections.job,
        {"graph": {"product_types": {"f32": 1.0}}} | CAST,
        JOB.replace("PFLOP", "PFLOP in f32 cast to tf32"),
    ),
    (
        sections.compiler,
        CAST,
        "compiler   -O3, model type transformer, attention fused, auto_cast matmult to tf32",
    ),
    (
        sections.job,
        {"batch": {"num_microbatches": 1, "tokens_per_sample": 1, "global_batch": 1}},
        "job        7.1 G parameters on 1,024 cores (2 x trn1n.32xlarge), 2.5 PFLOP per step of"
        " 1 sample, 1 micro-batch",
    ),
    (
        sections.job,
        {"batch": {"num_microbatches": 2, "tokens_per_sample": 2, "global_batch": 2}},
        "job        7.1 G parameters on 1,024 cores (2 x trn1n.32xlarge), 2.5 PFLOP per step of"
        " 2 samples of 2 tokens, 2 micro-batches",
    ),
    (
        sections.roles,
        {
            "job": {"model": {"preset": "", "config": "", "recipe": ""}},
            "graph": {
                "roles": [
                    {"role": "parameter", "paths": ["state/params"], "leaves": 3},
                    {"role": "optimizer", "paths": ["a", "b", "c", "d", "e"], "leaves": 6},
                    {"role": "rng", "paths": ["key"], "leaves": 1},
                ]
            },
        },
        "roles      parameters state/params; optimizer a, b, c and 2 more; random numbers key",
    ),
    # 500 of 2000 us are a quarter
    (
        sections.logical_cores,
        {},
        "cores      LNC 2: 64 cores of 24.00 GiB per instance; 10 of 40 kernels on one physical"
        " core alone, 25 % of the step",
    ),
    (
        sections.logical_cores,
        {"logical_cores": {"hypothetical": True, "alone_ps": 2_000_000_000}},
        "cores      hypothetical, LNC 2: 64 cores of 24.00 GiB per instance; 10 of 40 kernels on"
        " one physical core alone, 100 % of the step",
    ),
    (sections.compiler, {}, "compiler   -O3, model type transformer, attention fused"),
    (
        sections.compiler,
        {"context": "ring"},
        "compiler   -O3, model type transformer, attention fused; context ring",
    ),
    (sections.placement, {}, "placed     torus: tp on a ring; dp on 4 of them"),
    (
        sections.placement,
        {"placement": {"name": "dp,tp", "kind": "torus"}},
        "placed     dp,tp: tp on a ring; dp on 4 of them",
    ),
    (
        sections.placement,
        {"placement": {"name": "linear:dp,tp", "kind": "linear"}},
        "placed     linear:dp,tp: tp on a ring; dp on 4 of them",
    ),
    (
        sections.placement,
        {"placement": {"kind": "linear", "why": "cores by number: the chips form a ring"}},
        "placed     linear, since the chips form a ring: tp on a ring; dp on 4 of them",
    ),
    (
        sections.rates,
        {},
        "rates      12,346 tokens/s, MFU 40.0 % (HFU 51.2 %) of 6.08 PFLOP/s bf16 peak",
    ),
    (
        sections.rates,
        {"batch": {"tokens_per_sample": 1}},
        "rates      12,346 samples/s, MFU 40.0 % (HFU 51.2 %) of 6.08 PFLOP/s bf16 peak",
    ),
    (
        sections.rates,
        {"timing": {"mfu": 0.0042, "hfu": 0.00512}},
        "rates      12,346 tokens/s, MFU 0.42 % (HFU 0.51 %) of 6.08 PFLOP/s bf16 peak",
    ),
    (
        sections.cost,
        {},
        "cost       $0.0275 per step, $1.25 per million tokens, on demand, us-east-1, 2025-11-30"
        " ($49.56 per hour)",
    ),
    (
        sections.cost,
        {"price": {"kind": "own", "given": True, "status": "given", "region": "", "date": ""}},
        "cost       $0.0275 per step, $1.25 per million tokens, at your own price ($49.56 per"
        " hour)",
    ),
    (
        sections.cost,
        {"cost": {"usd_per_hour": None}, "price": {"usd_per_hour": None, "published": []}},
        "cost       no on-demand price is published for trn1n.32xlarge; give your own with --price",
    ),
    (sections.limited_by, {}, "limited by compute: engines are busy"),
    (
        sections.confidence,
        {},
        "confidence extrapolated: no run like it; 3 figures assumed, docs/model.md",
    ),
    # 7,200,000 s are 2000 h
    (
        sections.goodput,
        {},
        "goodput    98.75 %: 2.500 s to save every 40 steps, a failure every 2,000.0 h",
    ),
]


@pytest.mark.parametrize(("section", "tables", "line"), SAID)
def test_a_section_of_one_line(
    section: sections.Section, tables: dict[str, Any], line: str
) -> None:
    assert lines(section, changed(**tables)) == [line]


BEST = {
    "mfu": 0.25,
    "times": 1.6,
    "id": "T9",
    "model": "Llama2-13B",
    "machines": ["trn1.32xlarge", "trn1n.32xlarge"],
    "cores": 1024,
    "release": "2.18.0",
}


def test_what_is_published_stands_beside_what_is_predicted() -> None:
    told = {"attention": "causal", "mfu_causal": 0.385, "published": BEST}
    assert lines(sections.rates, changed(timing=told)) == [
        "rates      12,346 tokens/s, MFU 40.0 % (attention in full; causal 38.5 %), HFU 51.2 % of"
        " 6.08 PFLOP/s bf16 peak",
        "           best published: 25.0 % (Llama2-13B on 1,024 cores, SDK 2.18.0, T9)",
    ]


@pytest.mark.parametrize(
    ("attention", "kind"),
    [
        ("causal", "causal attention"),
        ("full", "attention in full"),
        ("none", "models without attention"),
    ],
)
def test_that_nothing_is_published_is_said(attention: str, kind: str) -> None:
    one = changed(timing={"attention": attention, "mfu_causal": 0.4, "published": None})
    found = lines(sections.rates, one)
    assert found[1] == f"           none published of {kind} on trn1n.32xlarge"
    assert ("attention in full; causal" in found[0]) is (attention == "causal")


def test_sections_that_have_nothing_to_say() -> None:
    assert lines(sections.logical_cores, changed(logical_cores={"lnc": 1})) == []
    assert lines(sections.placement, changed(placement={"axes": {}})) == []
    assert lines(sections.faults, report()) == []
    assert lines(sections.findings, report()) == []
    assert lines(sections.verdict, report()) == []
    one = changed(timing={"per_stage": [staged(5)]})
    assert lines(sections.stages, one) == []


def test_faults_cost_the_time_over_a_healthy_step() -> None:
    one = report() | {"faults": {"slowdown": 1.25, "healthy_step_time_ps": 1_600_000_000}}
    (line,) = lines(sections.faults, one)
    assert line == "faults     1.250 times the step of a healthy cluster, 1.600 ms"


def test_the_rule_of_the_headline_fills_the_width() -> None:
    (line,) = sections.headline(report(), 40)
    assert line.plain == "llama  fsdp  dp=4,tp=8 " + "─" * 17
    assert [(span.start, span.end, span.style) for span in line.spans] == [
        (0, 5, "bold"),
        (23, 40, "dim"),
    ]
    (cut,) = sections.headline(report(), 20)
    assert cut.plain == "llama  fsdp  dp=4,…─"
    assert "  one core " in sections.headline(changed() | {"mesh": {}}, 60)[0].plain


def test_streams_where_there_are_several_or_packets_are_chosen() -> None:
    """400 and 100 of 2000 us."""
    first = "           0: all_gather dp, all_reduce tp, packets 64 KiB, busy 20 %"
    head = "streams    DMA packets of compute 4 KiB"
    second = "1: reduce_scatter dp, packets 32 KiB, busy 5.0 %"
    assert lines(sections.streams, report()) == [head, f"{first}  {second}"]
    assert lines(sections.streams, report(), 80) == [head, first, " " * 11 + second]
    one = report()["streams"]
    alone = one | {"streams": one["streams"][:1]}
    assert lines(sections.streams, changed(streams=alone)) == []
    assert lines(sections.streams, changed(streams=alone | {"compute_packet_bytes": 512})) == [
        "streams    DMA packets of compute 0.5 KiB",
        first,
    ]
    assert lines(sections.streams, changed(streams=one | {"streams": one["streams"][1:]})) == [
        head,
        " " * 11 + second,
    ]


def test_memory_against_its_limit() -> None:
    """Of 80 cells 3 GiB of 8 are 30, 1023 MiB 10; 1 MiB of 4 GiB has no cell."""
    assert lines(sections.memory, report(), 91) == [
        "memory     fits: 4.00 GiB of 8.00 GiB per core, 50 %",
        " " * 11 + "█" * 30 + "▓" * 10 + EMPTY * 40,
        " " * 11 + "█ parameters 3.00 GiB  ▓ activations 1023.00 MiB",
    ]
    over = lines(sections.memory, changed(memory={"limit_bytes": 3 * GIB, "fits": False}), 90)
    assert over[0] == (
        "memory     does not fit, 1.00 GiB over: 4.00 GiB of 3.00 GiB per core, 133 %"
    )


def test_time_and_where_it_goes() -> None:
    """1500 and 499.5 of 2000 us; 0.5 us are less than the 1 us that is shown."""
    found = lines(sections.timing, report(), 91)
    assert found == [
        "time       2.000 ms per step (nominal), band 1.000 ms .. 3.500 ms",
        " " * 11 + "█" * 60 + "▓" * 20,
        " " * 11 + "█ compute 75.0 %  ▓ memory 25.0 %",
    ]
    first, last = {"compute": 1_000_000_000, "bubble": 1_000_000_000}, {"compute": 2_000_000_000}
    rows = [{"stage": n, "breakdown_ps": parts} for n, parts in enumerate((last, first))]
    shown = lines(sections.timing, changed(timing={"breakdown_ps": first, "per_stage": rows}), 91)
    assert shown[2].strip() == "█ compute 50.0 %  ▓ bubble 50.0 %  (stage 1, the last to finish)"
    parts = {"compute": 1_998_000_000, "idle": 1_000_000}
    shown = lines(sections.timing, changed(timing={"breakdown_ps": parts}), 91)
    assert shown[2].strip() == "█ compute 99.9 %  ▓ idle 0.1 %"


def test_shares_of_time_are_those_of_the_step_whatever_is_left_out() -> None:
    """1640.4 and 359.2 of 2000 us are 82.02 and 17.96 %; 0.4 us have no cell."""
    parts = {"compute": 1_640_400_000, "memory": 359_200_000, "idle": 400_000}
    shown = lines(sections.timing, changed(timing={"breakdown_ps": parts}), 91)
    assert shown[2].strip() == "█ compute 82.0 %  ▓ memory 18.0 %"


@pytest.mark.parametrize("text", ["a 1.3 %", "fits, 6.50 GiB", "every 6,300.0 h", "takes 2.5 ms"])
def test_a_number_and_its_unit_are_on_one_line(text: str) -> None:
    number, unit = text.split()[-2:]
    for before in range(26):
        told = "x " * before + text
        found = [line.plain[sections.TITLE :] for line in sections.titled("t", told, 51)]
        assert any(f"{number} {unit}" in line for line in found), found
        assert " ".join(found) == told


def test_a_finding_that_is_there_twice_is_said_once() -> None:
    row = {"code": "SW_A", "severity": "warning", "message": "too large", "hint": "less"}
    found = lines(sections.findings, changed() | {"findings": [row, row, row | {"message": "b"}]})
    assert found == [
        "warning    SW_A: too large",
        " " * 11 + "SW_A: b",
        " " * 11 + "less",
    ]


def test_stages_of_a_pipeline() -> None:
    """100 and 50 of 2000 us; stages 1 and 2 are alike."""
    head = "pipeline   3 stages, 8 micro-batches, 1f1b"
    first = "0: 5+3 layers, bubble 5.0 %, 4.00 GiB"
    assert lines(sections.stages, report()) == [
        head,
        " " * 11 + first + "  1-2: 4 layers, bubble 2.5 %, 3.00 GiB",
    ]
    one = changed(pipeline={"num_microbatches": 1})
    assert lines(sections.stages, one)[0] == "pipeline   3 stages, 1 micro-batch, 1f1b"


def finding(number: int, severity: str, hint: str = "") -> dict[str, Any]:
    return {"severity": severity, "code": f"SW_{number}", "message": f"m{number}", "hint": hint}


def test_errors_are_first_and_refusals_are_a_verdict() -> None:
    found = [
        finding(1, "note"),
        finding(2, "warning", "do"),
        finding(3, "error"),
        finding(4, "warning") | {"code": "NCC_EXTP004"},
        finding(2, "warning", "do") | {"message": "another"},
        finding(2, "warning", "do otherwise"),
    ]
    assert lines(sections.findings, report() | {"findings": found}) == [
        "error      SW_3: m3",
        "note       SW_1: m1",
        "warning    SW_2: m2",
        "           SW_2: another",
        "           do",
        "warning    SW_2: m2",
        "           do otherwise",
    ]


def test_titles_and_wrapped_text() -> None:
    """31 columns leave 20 for the text, which has no fewer on narrower screens."""
    text = "[one] two three four five six seven"
    found = sections.titled("title", text, 31)
    assert [line.plain for line in found] == [
        "title      [one] two three four",
        "           five six seven",
    ]
    narrow = sections.titled("t", text, 5)
    assert narrow[0].plain == "t          [one] two three four"
    assert found[0].spans[0].style == "bold" and found[0].no_wrap


def test_parts_share_lines_while_they_fit() -> None:
    """20 columns hold 9 + 2 + 9, and no more; what is longer is broken."""
    two = [Text(letter * 9) for letter in "abcd"]
    assert [line.plain.strip() for line in sections.parts_of(two, 31)] == [
        "a" * 9 + "  " + "b" * 9,
        "c" * 9 + "  " + "d" * 9,
    ]
    parts = [Text("a" * 9), Text("b" * 9), Text("c" * 10), Text("d" * 9), Text("e" * 12 + " f" * 8)]
    assert [line.plain for line in sections.parts_of(parts, 31)] == [
        " " * 11 + "a" * 9 + "  " + "b" * 9,
        " " * 11 + "c" * 10,
        " " * 11 + "d" * 9,
        " " * 11 + "e" * 12 + " f f f f",
        " " * 11 + "f f f f",
    ]


HOUR = 3600.0


def test_that_an_answer_is_a_stored_one_stands_in_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else there is room for: it has 35 columns, the model 23 where it may."""
    monkeypatch.setattr(sections, "age_text", lambda since_s: f"{since_s / HOUR:g} h old")
    one = report() | {"provenance": {"stored_s": 5 * HOUR}}
    mark = " stored, 5 h old: --fresh asks anew"
    (line,) = sections.headline(one, 80)
    assert line.plain == "llama  fsdp  dp=4,tp=8 " + "─" * (80 - 23 - len(mark)) + mark
    (cut,) = sections.headline(one, 50)
    assert cut.plain == "llama  fsdp  …─" + mark
    # The older of its two parts; what was computed now is not stored, whatever it tried.
    tried = {"whatif": {"stored_s": 2 * HOUR}}
    assert " 2 h old" in sections.headline(one | tried, 80)[0].plain
    assert sections._stored_s(one | {"whatif": {"stored_s": 9 * HOUR}}) == 5 * HOUR
    assert sections._stored_s(report() | tried) == 0.0 == sections._stored_s(report())


def test_answers_and_units_that_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many of how many, the oldest, and the command that asks anew; of a stored answer nothing
    is said about its units."""
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sections, "counted_text", lambda *given: told.append(given) or "told")
    rows = [{"stored_s": 7.0}, {"stored_s": 0.0}, {"stored_s": 5.0}, {}]
    plan = "shardwright plan --fresh job.toml"
    one = report() | {"units": rows, "provenance": {"again": plan}}
    assert lines(sections.stored_units, one) == ["stored     told"]
    assert told.pop() == (2, 4, "partition, compile and timing tasks", 5.0, plan)
    one["provenance"] = {"stored_s": 3.0}
    assert lines(sections.stored_units, one) == [] == told
    assert lines(sections.stored, one) == ["stored     told"]
    assert told.pop() == (1, 1, "answer", 3.0, sections.AGAIN)
    monkeypatch.setattr(sections, "counted_text", lambda *given: "")
    assert (
        lines(sections.stored, one) == [] == lines(sections.stored_units, report() | {"units": []})
    )


@pytest.mark.parametrize(
    ("resolved", "config", "told"),
    [
        ({"model.seq_len": 4096}, "a.json", " of 4,096 tokens (the config's), 3"),
        ({"model.seq_len": 4096}, "", " of 4,096 tokens, 3"),
        ({}, "a.json", " of 4,096 tokens, 3"),
    ],
)
def test_whose_the_length_of_a_sample_is(resolved: Any, config: str, told: str) -> None:
    one = changed(job={"model": {"config": config}}) | {"resolved": resolved}
    (line,) = lines(sections.job, one)
    assert told in line
    one["batch"] |= {"tokens_per_sample": 1}
    assert "token" not in lines(sections.job, one)[0]


@pytest.mark.parametrize(
    ("named", "is_own"),
    [("entry", 1), ("hlo", 1), ("", 1), ("preset", 0), ("config", 0), ("recipe", 0)],
)
def test_roles_are_those_of_a_step_of_the_users_own(named: str, is_own: int) -> None:
    """Three paths are named, of more the number of the others. A task in a process has no name."""
    paths = ["a", "b", "c", "d"]
    rows = [{"role": "optimizer", "paths": paths}, {"role": "rng", "paths": paths[:3]}]
    names = ("entry", "hlo", "preset", "config", "recipe")
    model = {name: "one" if name == named else "" for name in names}
    one = changed(job={"model": model}, graph={"roles": rows, "name": "s", "told": ["x", "y"]})
    assert lines(sections.own_step, one) == ["step       s: x; y"]
    assert lines(sections.own_step, changed(graph={"name": "s", "told": []})) == []
    told = "roles      optimizer a, b, c and 1 more; random numbers a, b, c"
    assert lines(sections.roles, one) == [told] * is_own


def test_what_was_chosen_and_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a job that leaves nothing open and names no goal."""
    assert lines(sections.auto, report()) == lines(sections.goal, report()) == []
    monkeypatch.setattr(sections, "decided", lambda one: one["auto"])
    monkeypatch.setattr(sections, "auto_text", lambda auto, limit: f"{auto} of {limit}")
    assert lines(sections.auto, report() | {"auto": "two"}) == [f"auto       two of {8 * GIB}"]
    monkeypatch.setattr(goal, "doubts", lambda one: "but")
    monkeypatch.setattr(goal, "rests_on", lambda one: "so")
    asked: list[tuple[Any, ...]] = []
    for needs, shown in (("more", ["it needs   more"]), ("", [])):
        told = "9 days", needs
        monkeypatch.setattr(goal, "goal_texts", lambda *a, told=told: asked.append(a) or told)
        assert lines(sections.goal, report() | {"goal": {"days": 9}}) == [
            "goal       9 days",
            *shown,
        ]
    assert asked == [({"days": 9}, "token", "on demand", "but", "so")] * 2


def test_a_step_without_collectives_has_no_streams() -> None:
    none = report()["streams"] | {"streams": []}
    assert lines(sections.streams, changed(streams=none)) == []
