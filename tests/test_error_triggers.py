"""Every documented code we say we raise is raised by its own trigger, at the user's line, and
explained by `errors`."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from shardwright.compiler.diagnostics import DiagnosticError
from shardwright.compiler.diagnostics.catalogue import catalogue
from shardwright.compiler.frontend import isolated
from shardwright.compiler.frontend.detect import AS_IT_IS, Asked, Module
from shardwright.compiler.ir.types import Graph
from shardwright.compiler.surface.releases import Profile
from shardwright.orchestrator.cli import main
from tests.support.error_triggers import TRIGGERS, Trigger
from tests.support.model_files import compile_line

DOCUMENTED = [code for code, entry in catalogue().items() if entry.who == "R"]


class InProcess(isolated.Reader):
    """The reader without its child: forty modules are read by one process."""

    def read(
        self,
        data: bytes,
        base_dir: str,
        profile: Profile,
        name: str = "",
        asked: Asked = AS_IT_IS,
    ) -> tuple[Graph, Module]:
        answer = isolated._answer(data, base_dir, profile.version, astuple(asked))
        if "error" in answer:
            raise isolated._error_of(answer["error"], name, answer["notes"])
        return isolated.read_answer(answer, name)


def test_every_documented_code_has_a_trigger() -> None:
    missing = sorted(set(DOCUMENTED) - set(TRIGGERS))
    assert not missing, f"no trigger in tests/support/error_triggers.py for {missing}"
    assert set(TRIGGERS) <= set(DOCUMENTED)


@pytest.mark.parametrize("code", TRIGGERS)
def test_trigger(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trigger = TRIGGERS[code]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(isolated, "Reader", InProcess)
    for name, value in trigger.patched:
        monkeypatch.setattr(name, value)
    if trigger.call is not None:
        with pytest.raises(DiagnosticError) as caught:
            trigger.call()
        assert (caught.value.code, str(caught.value.loc)) == (code, trigger.line)
    else:
        err = refusal(trigger, tmp_path, capsys)
        assert f"[{code}]" in err, err
        if trigger.line:
            assert f"Error location: {trigger.line}" in err, err
    assert main(["errors", code]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert code in out and catalogue()[code].advice.split()[0] in out


def refusal(trigger: Trigger, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says when it refuses."""
    (folder / "m.mlir").write_text(trigger.text)
    capsys.readouterr()
    target = "" if "--target" in trigger.flags else "--target trn1"
    status = compile_line(f"neuronx-cc compile m.mlir {target} {trigger.flags}")
    err = " ".join(capsys.readouterr().err.split())
    assert status in (2, 70), err
    return err
