"""`report.html`, `report` and `compare`: pages that need nothing from outside, in words as well as
in colours, bounded, with every text escaped; and what they say is what the reports say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from shardwright.orchestrator.cli import main
from shardwright.orchestrator.report.compare import change, compare, tables
from shardwright.orchestrator.report.page import charts, page
from shardwright.orchestrator.report.page.page import compare_page, report_page
from shardwright.orchestrator.report.plan_screen import whats_next
from tests.support.html_page import Page
from tests.support.small_job import SIZES

CHROMIUM = next((p for n in ("chromium", "google-chrome") if (p := shutil.which(n))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
MOST_BYTES = 2_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plans of the small llama on two stages, with and without recomputation."""
    path = tmp_path_factory.mktemp("page")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    sets = (
        *("model.seq_len=8", "run.executor=inline", "run.tries=0"),
        *("mesh.pp=2", "mesh.dp_shard=16", "strategy.global_batch=64"),
        *("goal.tokens=1T", "goal.deadline=30d"),
    )
    flags = ["--model", str(path / "config.json"), "--out", str(path)]
    words = ["plan", *flags, *(word for text in sets for word in ("--set", text)), "--json"]
    capture = pytest.MonkeyPatch()
    for name, remat in (("a", "full"), ("b", "none")):
        lines: list[str] = []
        capture.setattr("builtins.print", lambda text, into=lines, **_: into.append(text))
        try:
            html = str(path / f"{name}.html")
            assert main([*words, "--remat", remat, "--html", html]) == 0
        finally:
            capture.undo()
        (path / f"{name}.json").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "a.json").read_text())
    return found


def with_values(report: dict[str, Any]) -> dict[str, Any]:
    """The report as `run` would extend it."""
    numerics = {
        "steps": 3,
        "losses": [5.0, None, 4.0],
        "worst_loss": {"step": "step 1", "error": 1e-6, "allowed": 1e-5, "note": ""},
        "worst_param_error": {"leaf": "w", "error": 1e-6, "allowed": 1e-5, "note": ""},
        "worst_l0": {"program": "p", "value": "x", "error": 0.0, "allowed": 1e-5, "note": ""},
        "undecided": [],
        "rounding": None,
        "parts": None,
        "bound": 1e-5,
        "passed": True,
    }
    findings = [{"code": "SW_X", "severity": "error", "message": "m", "loc": None, "hint": "h"}]
    return report | {"numerics": numerics, "findings": findings}


def changed(value: Any, text: Callable[[str], str]) -> Any:
    """A report with every text replaced."""
    if isinstance(value, dict):
        return {key: changed(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item, text) for item in value]
    return text(value) if isinstance(value, str) else value


def test_the_pages_are_well_formed(folder: Path, report: dict[str, Any]) -> None:
    other = json.loads((folder / "b.json").read_text())
    found = compare(report, other)
    plans = [(folder / name).read_text() for name in ("a.html", "b.html")]
    for text in (*plans, report_page(with_values(report)), compare_page(found, tables(found))):
        assert Page(text).problems == []
        assert len(text.encode()) < MOST_BYTES


def test_the_page_has_every_section_and_its_numbers(report: dict[str, Any]) -> None:
    found = Page(report_page(with_values(report)))
    headings = {e.attrs["aria-labelledby"].removesuffix("-h") for e in found.all("section")}
    assert headings == {
        *("summary", "time", "memory", "layers", "collectives", "pipeline", "engines"),
        *("findings", "limits", "config", "provenance"),
    }
    links = {e.attrs["href"][1:] for nav in found.all("nav") for e in nav.find("a")}
    assert links == headings
    text = re.sub(r"\s+", " ", found.root.text)
    assert f"{report['timing']['tokens_per_s']:,.0f}" in text
    assert "SW_X m" in text and "decoder.py:" in text
    for name in ("[model]", "[strategy]", "[mesh]", "[cluster]", "[compiler]", "[goodput]"):
        assert name in text
    (loss,) = (e for e in found.all("figure") if "Loss over" in e.text)
    assert [e.text for e in loss.find("span")] == ["step 1", "step 3"]
    (layers,) = (e for e in found.all("section") if e.attrs["id"] == "layers")
    rows = [e.text.strip() for row in layers.find("table")[0].find("tbody") for e in row.find("th")]
    assert [name.rpartition(" ")[2] for name in rows] == [
        row["function"].rpartition(" ")[2] for row in report["functions"]
    ]


def test_the_page_tells_what_became_of_an_imported_file(report: dict[str, Any]) -> None:
    fields = {
        "read": [{"field": "lr", "line": 3, "value": "<1", "means": "model.learning_rate"}],
        "without": [{"field": "seed", "line": 1, "value": "7", "why": "a seed"}],
        "unknown": [{"field": "new", "line": 2, "value": "x"}],
    }
    section = {"project": "torchtitan", "file": "a.json", "assumed": ["a rank is a core"], **fields}
    found = Page(report_page({**report, "imported": section}))
    assert found.problems == []
    (table,) = (e for e in found.all("table") if "a.json" in e.text)
    rows = [[cell.text for cell in (*row.find("th"), *row.find("td"))] for row in table.find("tr")]
    assert rows[1:] == [
        ["seed", "1", "7", "nothing: a seed"],
        ["new", "2", "x", "unknown"],
        ["lr", "3", "<1", "model.learning_rate"],
    ]
    assert [e.text for e in found.all("li") if e.text == "a rank is a core"]
    assert "a.json" not in report_page(report)


def test_page_and_screen_say_the_same_of_what_was_tried(report: dict[str, Any]) -> None:
    """One change that is worth it, two that are not, and one that was refused."""
    gains = {"mesh.tp=2": (-0.2, True), "strategy.zero=0": (-0.002, False), "lnc=2": (0.25, False)}
    tried = [
        {
            "change": name,
            "status": "fits",
            "helps": helps,
            "peak_bytes": 2**30,
            "global_batch": 64,
            "same_batch": True,
            "step_time_s": 1.0,
            "time_change": change,
            "cost_change": None,
        }
        for name, (change, helps) in gains.items()
    ]
    refused = {"change": "mesh.tp=3", "status": "refused", "helps": False, "code": "SW_X"}
    tried.append(refused | {"message": "no"})
    told = report | {"whatif": {"tried": tried, "left": []}}
    (table,) = (
        t for t in Page(report_page(told)).all("table") if "were tried" in t.find("caption")[0].text
    )
    rows = [
        [cell.text.strip() for cell in (row.find("td")[0], *row.find("th"), row.find("td")[1])]
        for row in table.find("tbody")[0].find("tr")
    ]
    assert [row[0] for row in rows] == ["next", "gains <1 %", "no gain", "no gain"]
    assert [(name, f"{change}: {effect}") for name, change, effect in rows] == [*whats_next(told)]


def test_what_was_imported_is_at_the_top_of_a_page(report: dict[str, Any]) -> None:
    """With a link, as on the screen, and the counts of it."""
    none: dict[str, Any] = {"read": [], "without": [], "unknown": []}
    section = {"project": "nxdt", "file": "b/a.yaml", "assumed": ["a rank is a core"], **none}
    found = Page(report_page({**report, "imported": section}))
    ids = [e.attrs["id"] for e in found.all("section")]
    links = [e.attrs["href"][1:] for nav in found.all("nav") for e in nav.find("a")]
    assert found.problems == [] and ids[:2] == links[:2] == ["imported", "summary"]
    told = "From nxdt a.yaml: 0 fields read, 0 without counterpart, 0 unknown."
    assert [e.text for e in found.all("p") if e.text == told]
    links = [e.text for nav in Page(report_page(report)).all("nav") for e in nav.find("a")]
    assert links[0] == "Summary"


def test_sentences_begin_with_a_capital(report: dict[str, Any]) -> None:
    """Also where a text of the screen, which follows a word there, is a sentence of its own."""
    pieces = re.findall(r"<caption[^>]*>(.*?)</caption>|<p[^>]*>(.*?)</p>", report_page(report))
    texts = [unescape(re.sub("<[^>]+>", "", a or b)) for a, b in pieces]
    assert any(". " in text for text in texts)
    assert not [text for text in texts if re.search(r"[a-z]{2}\. [a-z]", text)]


def test_drawings_sum_to_what_they_show(report: dict[str, Any]) -> None:
    timing = report["timing"]
    bar = charts.bar(timing["breakdown_ps"], timing["step_time_ps"], str)
    assert sum(r.width for r in bar.rects) == pytest.approx(charts.WIDTH)
    drawn = charts.memory(report["memory"])
    tallest = report["memory"]["peak_bytes"] * 1.05
    by_column: dict[float, float] = {}
    for rect in drawn.strip.rects:
        by_column[rect.left] = by_column.get(rect.left, 0) + rect.height
    live = [row["live_bytes"] for row in report["memory"]["timeline"]]
    heights = [100 * size / tallest for size in live]
    assert list(by_column.values()) == pytest.approx(heights)
    assert sum(mark.width for mark in drawn.programs) == pytest.approx(charts.WIDTH)
    stages = charts.pipeline(report)
    assert [s.name for s in stages] == ["stage 0", "stage 1"]
    assert stages[0].label.startswith("stage 0: 4 x forward, 4 x backward, 1 x update;")
    last = max(r.left + r.width for s in stages for r in s.rects)
    assert last == pytest.approx(charts.WIDTH, abs=1)


def test_a_limit_that_is_near_is_drawn(report: dict[str, Any]) -> None:
    section = report["memory"]
    assert charts.memory(section).limit is None
    near = charts.memory(section | {"limit_bytes": section["peak_bytes"] // 2})
    assert near.limit == pytest.approx(100 * (1 - 0.5 / 1.05), abs=0.1)


def test_every_text_is_escaped(report: dict[str, Any]) -> None:
    evil = '"><script>alert(1)</script><img src="https://example.com/x" onerror=x>&lt;'
    page_text = report_page(changed(with_values(report), lambda text: f"{text}{evil}"))
    found = Page(page_text)
    assert found.problems == []
    assert found.root.text.count("<script>alert(1)</script>") > 100
    both = compare(report, changed(report, lambda text: f"{text}{evil}"))
    assert Page(compare_page(both, tables(both))).problems == []


def test_the_largest_report_stays_below_the_limit(report: dict[str, Any]) -> None:
    functions = [
        {**report["functions"][0], "kernels": report["functions"][0]["kernels"][:1] * 40}
    ] * 100
    run = ["backward.12", 100, 1, 10**12, 2 * 10**12]
    track = {"name": "dma_in", "slices": [["dot_general_exponential_reduce", 0, 10**9]] * 1200}
    big = {
        "functions": functions,
        "step_chart": [{"stage": n, "runs": [run] * 100} for n in range(40)],
        "timelines": [{**report["timelines"][0], "tracks": [track]}] * 2,
        "collectives": report["collectives"][:1] * 1000,
        "memory": report["memory"] | {"timeline": report["memory"]["timeline"][:1] * 600},
    }
    assert len(report_page(report | big).encode()) < MOST_BYTES


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """WCAG 2.1."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_have_the_contrast_of_wcag_aa() -> None:
    css = (Path(page.__file__).parent / "templates" / "report.css").read_text()
    light, dark = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", css, re.S)[:2]
    )
    for theme in (light, dark):
        for ground in (theme["page"], theme["panel"]):
            for name in ("ink", "soft", "link", "good", "bad"):
                assert contrast(theme[name], ground) >= 4.5, name
            for name in {*charts._KINDS.values(), *charts._COLLECTIVES}:
                least = 2.5 if name == "pale" else 3  # always beside its name in words
                assert contrast(theme[name], ground) >= least, name


def test_report_writes_the_page_beside_the_file(folder: Path, tmp_path: Path, capsys: Any) -> None:
    stored = tmp_path / "report.json"
    stored.write_text((folder / "a.json").read_text())
    assert main(["report", str(tmp_path), "--html"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == (folder / "a.html").read_text()
    assert main(["report", str(stored)]) == 0
    assert "MFU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "requires schema 1, got none"),
        ('{"schema": 7}', "requires schema 1, got 7"),
        ('{"schema": 1}', "lacks job"),
        (None, "No such file"),
    ],
)
def test_what_is_no_report_is_refused(
    text: str | None, message: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    for words in (["report", str(path)], ["compare", str(path), str(path)]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "SW_REPORT" in error and message in error


def test_a_report_of_an_older_release_has_no_page(report: dict[str, Any], tmp_path: Path) -> None:
    old = {key: value for key, value in report.items() if key != "step_chart"}
    (tmp_path / "report.json").write_text(json.dumps(old))
    assert main(["report", str(tmp_path), "--html"]) == 2


def test_compare_says_what_changed(folder: Path, capsys: Any) -> None:
    a, b = (json.loads((folder / f"{name}.json").read_text()) for name in "ab")
    assert main(["compare", str(folder / "a.json"), str(folder / "b.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == [{"key": "strategy.remat", "a": "full", "b": "none"}]
    for row in found["time_ps"]:
        name = row["name"]
        assert (row["a"], row["b"]) == tuple(r["timing"]["breakdown_ps"][name] for r in (a, b))
    for side, whole in (("a", a), ("b", b)):
        assert sum(row[side] for row in found["time_ps"]) == whole["timing"]["step_time_ps"]
        assert sum(row[side] for row in found["memory_bytes"]) == whole["memory"]["peak_bytes"]
    (flops,) = [row for row in found["summary"] if row["name"] == "hfu"]
    assert flops["a"] != flops["b"]


def test_compare_of_the_same_has_no_changes(report: dict[str, Any]) -> None:
    found = compare(report, report)
    assert not found["settings"] and not found["collectives"]
    for caption, columns, rows in tables(found):
        assert columns[-1] == "change", caption
        assert {row[-1] for row in rows} == {""}


def test_what_came_and_went_is_said() -> None:
    found = [("new", 0, 5), ("-100.0 %", 5, 0), ("+50.0 %", 2, 3), ("x 1,000", 1, 1000), ("", 4, 4)]
    for text, first, second in found:
        assert change({"a": first, "b": second}) == text


def browser(path: Path, *flags: str) -> tuple[str, list[str]]:
    """(the DOM after loading, lines of the console)."""
    assert CHROMIUM is not None
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    home = f"--user-data-dir={path.parent / 'browser'}"
    done = subprocess.run(
        [CHROMIUM, *quiet, home, *flags, path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
def test_the_browser_has_nothing_to_complain_about(folder: Path, tmp_path: Path) -> None:
    """The page forbids every request, so one that is tried is an error on the console."""
    dom, console = browser(folder / "a.html")
    assert "Where the time goes" in dom and console == []
    bad = tmp_path / "bad.html"
    text = (folder / "a.html").read_text()
    bad.write_text(text.replace("</main>", '<img src="https://example.com/x.png"></main>'))
    assert any("Content Security Policy" in line for line in browser(bad)[1])


@needs_browser
@pytest.mark.parametrize("width", [400, 1600])
def test_no_width_makes_the_page_scroll_sideways(width: int, folder: Path, tmp_path: Path) -> None:
    """In a frame of that width nothing but tables, which scroll in themselves, is wider."""
    text = (folder / "a.html").read_text()
    outer = tmp_path / "frame.html"
    script = (
        "onload = () => { const d = document.querySelector('iframe').contentDocument;"
        " const wide = [...d.querySelectorAll('body *')].filter(e => !e.closest('.scroll *, .skip')"
        " && e.getBoundingClientRect().right > innerWidthOf(d)).map(e => e.outerHTML.slice(0, 80));"
        " document.title = JSON.stringify([d.documentElement.scrollWidth, wide]); };"
        " const innerWidthOf = d => d.documentElement.clientWidth + 1;"
    )
    frame = (
        f'<iframe width="{width}" height="900" style="border:0" srcdoc="{escape(text)}"></iframe>'
    )
    outer.write_text(f"<!doctype html><title>-</title>{frame}<script>{script}</script>")
    dom, _ = browser(outer, "--window-size=1700,1000")
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None
    scroll_width, wide = json.loads(unescape(title[1]))
    assert wide == [] and scroll_width <= width


@pytest.mark.parametrize("option", ["optlevel", "model_type", "attention", "auto_cast"])
def test_a_report_without_an_option_that_screens_show_is_refused(
    option: str, report: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    options = {k: v for k, v in report["job"]["compiler"].items() if k != option}
    job = report["job"] | {"compiler": options}
    (tmp_path / "report.json").write_text(json.dumps(report | {"job": job}))
    assert main(["report", str(tmp_path)]) == 2
    assert f"job: compiler requires {option}" in capsys.readouterr().err
