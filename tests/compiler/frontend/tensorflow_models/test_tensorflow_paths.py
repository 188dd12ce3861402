"""What is no model of TensorFlow, and children that fail, without TensorFlow: paths are judged
before a child starts, and a package of that name fails as the real one may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.frontend.tensorflow.asking import Asked, Tracer
from tests.support.model_files import compile_line


def _loop(folder: Path) -> str:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return "a"


def _file(name: str, content: bytes) -> Callable[[Path], str]:
    def made(folder: Path) -> str:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        return name

    return made


def _folder(*names: str) -> Callable[[Path], str]:
    def made(folder: Path) -> str:
        (folder / "saved").mkdir()
        for name in names:
            (folder / "saved" / name).mkdir(parents=True)
        return "saved"

    return made


PATHS: dict[str, tuple[Callable[[Path], str], str, str]] = {
    "nothing there": (lambda folder: "none", "SW_MODEL", "No such file"),
    "a function of no file": (lambda folder: "none.py:make", "SW_MODEL", "No such file"),
    "an empty folder": (_folder(), "SW_TF_MODEL", "nothing in it"),
    "a folder of others": (_folder("variables"), "SW_TF_MODEL", "a folder with variables"),
    "a folder in place of the graph": (_folder("saved_model.pb"), "SW_TF_MODEL", "saved_model.pb"),
    "links in a circle": (_loop, "SW_MODEL", "symbolic links"),
    "a file of HLO": (_file("x.hlo", b"HloModule x"), "SW_TF_MODEL", "a file of 11 bytes"),
    "an empty file": (_file("x.pb", b""), "SW_TF_MODEL", "a file of 0 bytes"),
    "Python without a function": (_file("x.py", b"y = 1"), "SW_TF_MODEL", "without a function"),
    "a name that is none": (_file("x.py", b"y = 1"), "SW_TF_MODEL", "without a function"),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_leads_to_no_model(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make, code, words = PATHS[case]
    path = make(tmp_path)
    assert compile_line(f"neuronx-cc compile {path} --framework TENSORFLOW --target trn1") == 2
    told = capsys.readouterr().err
    assert code in told and words in " ".join(told.split()) and "Traceback" not in told


FAILS = {
    "missing": ("raise ModuleNotFoundError('No module named tensorflow', name='tensorflow')", 60.0),
    "killed": ("import os; os.kill(os.getpid(), 9)", 60.0),
    "ends": ("import os; os._exit(3)", 60.0),
    "hangs": ("import time; time.sleep(600)", 1.5),
    "breaks": ("raise RuntimeError('two libraries of one name')", 60.0),
}
CODES = {
    "missing": ("SW_NEEDS_PACKAGE", "pip install -e '.[tensorflow]'"),
    "killed": ("SW_READER_CRASH", "TensorFlow ended with SIGKILL"),
    "ends": ("SW_READER_CRASH", "TensorFlow ended with status 3"),
    "hangs": ("SW_READER_TIMEOUT", "at most 1.5 s"),
    "breaks": ("SW_TASK_RAISED", "two libraries of one name"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", FAILS)
def test_a_child_that_fails(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, timeout_s = FAILS[case]
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(package)
    (tmp_path / "model.py").write_text("import tensorflow\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    tracer = Tracer(timeout_s)
    with pytest.raises(DiagnosticError) as caught:
        tracer.traced(Asked(model=f"{tmp_path / 'model.py'}:make"))
    tracer.stop()
    code, words = CODES[case]
    assert caught.value.code == code and words in str(caught.value)
