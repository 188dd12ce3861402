"""Damaged, truncated, foreign and mixed-up files are refused with their code, by the loader and by
`shardwright neff verify`; nothing crashes and nothing is accepted."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError, LoadError
from shardwright.compiler.neff.bundle import Bundle, load_bundle, read_program
from shardwright.compiler.neff.format import HEADER_BYTES
from shardwright.compiler.neff.reader import Container
from shardwright.compiler.neff.writer import pack
from shardwright.orchestrator.cli import main
from shardwright.sim_cluster.values.functions import L0
from shardwright.sim_cluster.values.programs import ProgramCode
from tests.support.small_job import TARGET

FUZZ_SEED, FUZZ_FLIPS, NONSENSE = 7, 300, 40
KINDS = ("program", "manifest", "core")
# A flipped byte of the header's own fields says what it broke; anywhere else it is a checksum.
FLIP_CODES = {
    *("SW_NEFF_CHECKSUM", "SW_NEFF_MAGIC", "SW_NEFF_VERSION", "SW_NEFF_TRUNCATED"),
    *("SW_NEFF_KIND", "SW_NEFF_CONTENT"),
}


def file_of(bundle: Path, kind: str) -> Path:
    """One file of a kind; of the programs the largest."""
    if kind == "manifest":
        return bundle / "manifest.neff"
    if kind == "core":
        return bundle / "cores" / "core-00002.neff"
    return max((bundle / "programs").iterdir(), key=lambda p: p.stat().st_size)


def flip(path: Path, position: int, bits: int = 0x20) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(bytes(data))


def refused(path: Path, target: str | None = None) -> str:
    """The code with which the loader refuses a bundle."""
    with pytest.raises(LoadError) as caught:
        load_bundle(path, target)
    return caught.value.code


def verify_refuses(path: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["neff", "verify", str(path)]) == 72
    out, err = capsys.readouterr()
    assert f"error[{code}]" in err, err
    assert not out


def test_a_sound_bundle_is_accepted(
    small_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["neff", "verify", str(small_bundle.path)]) == 0
    for kind in KINDS:
        assert main(["neff", "verify", str(file_of(small_bundle.path, kind))]) == 0
    assert "3 programs and 4 cores is sound" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["magic", "version", "header", "middle", "end"])
def test_a_flipped_byte(
    kind: str, where: str, bundle_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(bundle_copy, kind)
    size = path.stat().st_size
    position, code = {
        "magic": (0, "SW_NEFF_MAGIC"),
        "version": (8, "SW_NEFF_VERSION"),
        "header": (40, "SW_NEFF_CHECKSUM"),
        "middle": ((HEADER_BYTES + size) // 2, "SW_NEFF_CHECKSUM"),
        "end": (size - 1, "SW_NEFF_CHECKSUM"),
    }[where]
    flip(path, position)
    assert refused(bundle_copy) == code
    verify_refuses(path, code, capsys)
    verify_refuses(bundle_copy, code, capsys)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file(kind: str, bundle_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(bundle_copy, kind)
    data = path.read_bytes()
    for size in (0, 100, HEADER_BYTES, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert refused(bundle_copy) == "SW_NEFF_TRUNCATED"
    verify_refuses(path, "SW_NEFF_TRUNCATED", capsys)
    path.write_bytes(data + b"\0")
    assert refused(bundle_copy) == "SW_NEFF_TRUNCATED"


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file(kind: str, bundle_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file_of(bundle_copy, kind).unlink()
    assert refused(bundle_copy) == "SW_NEFF_MISSING"
    verify_refuses(bundle_copy, "SW_NEFF_MISSING", capsys)


def test_another_target(bundle_copy: Path) -> None:
    assert refused(bundle_copy, "trn1.32xlarge") == "SW_NEFF_TARGET"
    assert load_bundle(bundle_copy, TARGET).manifest.target == TARGET


def swap(a: Path, b: Path) -> None:
    first = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(first)


def test_swapped_programs(bundle_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both files are sound, only not what the manifest names."""
    one, two, *_ = sorted((bundle_copy / "programs").iterdir())
    swap(one, two)
    assert refused(bundle_copy) == "SW_NEFF_CHECKSUM"
    verify_refuses(bundle_copy, "SW_NEFF_CHECKSUM", capsys)


def test_swapped_cores(bundle_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swap(bundle_copy / "cores" / "core-00000.neff", bundle_copy / "cores" / "core-00001.neff")
    assert refused(bundle_copy) == "SW_NEFF_BINDING"
    verify_refuses(bundle_copy, "SW_NEFF_BINDING", capsys)


def test_a_file_of_another_kind(bundle_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(file_of(bundle_copy, "core"), bundle_copy / "manifest.neff")
    assert refused(bundle_copy) == "SW_NEFF_KIND"
    verify_refuses(bundle_copy, "SW_NEFF_KIND", capsys)


def test_the_manifest_of_another_bundle(bundle_copy: Path, small_bundle: Bundle) -> None:
    """Sound files of two jobs do not mix: the same programs, another step."""
    other = replace(small_bundle.manifest, num_microbatches=4)
    (bundle_copy / "manifest.neff").write_bytes(pack("manifest", other.to_meta(), {}))
    assert refused(bundle_copy) == "SW_NEFF_BINDING"


def test_what_is_no_file_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.neff"
    path.write_bytes(b"\x7fELF" * 200)
    verify_refuses(path, "SW_NEFF_MAGIC", capsys)
    verify_refuses(tmp_path / "absent.neff", "SW_NEFF_MISSING", capsys)
    verify_refuses(tmp_path, "SW_NEFF_MISSING", capsys)


@pytest.mark.matrix
def test_random_flips_anywhere_are_refused(bundle_copy: Path) -> None:
    """Positions are drawn over the bytes of all files, so that large files get most of them, and
    every second one over the files, so that small ones get some.
    """
    rng = random.Random(FUZZ_SEED)
    files = sorted(bundle_copy.rglob("*.neff"))
    sizes = [path.stat().st_size for path in files]
    choose: list[Callable[[], Path]] = [
        lambda: rng.choices(files, sizes)[0],
        lambda: rng.choice(files),
    ]
    codes: set[str] = set()
    for number in range(FUZZ_FLIPS):
        path = choose[number % 2]()
        position, bits = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        flip(path, position, bits)
        code = refused(bundle_copy)
        assert code in FLIP_CODES, (path, position, bits, code)
        codes.add(code)
        flip(path, position, bits)
    assert load_bundle(bundle_copy)  # every flip was taken back
    print(f"{FUZZ_FLIPS} flips over {len(files)} files: {sorted(codes)}")


def test_nonsense_behind_good_checksums_is_refused_or_harmless(small_bundle: Bundle) -> None:
    """Sections with one flipped bit, packed again with checksums that hold: the reader, and L0 when
    it prepares the code, answer with a code or take it; nothing else is ever raised.
    """
    rng = random.Random(FUZZ_SEED)
    containers = [Container.open(p) for p in sorted((small_bundle.path / "programs").iterdir())]
    tally: Counter[str] = Counter()
    for _ in range(NONSENSE):
        container = rng.choice(containers)
        sections = {name: container.read(name) for name in container.sections}
        name = rng.choice([n for n, content in sections.items() if len(bytes(content))])
        sections[name] = with_flipped_bit(sections[name], rng)
        try:
            program = read_program(Container(pack("program", container.meta, sections)))
            ProgramCode(program, L0)
            tally["taken"] += 1
        except DiagnosticError as error:
            tally[error.code] += 1
    print(dict(tally))
    assert tally["SW_NEFF_CONTENT"] > NONSENSE // 5


def with_flipped_bit(content: Any, rng: random.Random) -> Any:
    raw = bytearray(content.tobytes() if isinstance(content, np.ndarray) else content)
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    if isinstance(content, np.ndarray):
        return np.frombuffer(bytes(raw), content.dtype).reshape(content.shape)
    return bytes(raw)
