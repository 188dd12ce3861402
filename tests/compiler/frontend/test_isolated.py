"""A model file cannot end the process that reads it: crashes and hangs have codes."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import DiagnosticError, ImportRuleError
from shardwright.compiler.frontend.context import make_context
from shardwright.compiler.frontend.isolated import Reader
from shardwright.compiler.ir.reference import evaluate
from shardwright.compiler.surface.releases import Profile

OWN = Profile()
LOWERED = jax.jit(lambda x: jnp.tanh(x) @ x.T).lower(jnp.ones((3, 4)))
TEXT = LOWERED.as_text().encode()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with Reader() as made:
        yield made


def test_one_child_reads_every_form(reader: Reader) -> None:
    proto = LOWERED.compiler_ir("hlo").as_serialized_hlo_module_proto()
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for data, form in ((TEXT, "stablehlo text"), (proto, "hlo proto")):
        graph, module = reader.read(data, ".", OWN)
        assert module.form == form
        assert np.allclose(evaluate(graph, [x])[0], np.tanh(x) @ x.T)


def test_refusals_keep_code_and_class(reader: Reader) -> None:
    with pytest.raises(ImportRuleError) as caught:
        reader.read(b"no model at all \0\1\2", ".", OWN)
    assert caught.value.code == "SW_MODEL_FORM"
    bad = b"func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }"
    with pytest.raises(DiagnosticError) as located:
        reader.read(bad, ".", OWN)
    assert located.value.code == "NCC_EMOD025"


def test_a_name_that_is_no_text_is_refused(reader: Reader) -> None:
    from jaxlib.mlir import ir

    text = """
    func.func private @helper(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }
    func.func @main(%x: tensor<f32>) -> tensor<f32> {
      %y = func.call @helper(%x) : (tensor<f32>) -> tensor<f32>
      return %y : tensor<f32>
    }"""
    with make_context():
        stream = io.BytesIO()
        ir.Module.parse(text).operation.write_bytecode(stream)
    code = stream.getvalue()
    assert b"helper" in code
    with pytest.raises(ImportRuleError, match=r"SW_STABLEHLO_PARSE.*UTF-8"):
        reader.read(code.replace(b"helper", b"h\xffl\xfeer"), ".", OWN)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(signal.SIGSEGV, r"SIGSEGV \(F139\)", id="crashed"),
        pytest.param(signal.SIGKILL, r"SIGKILL \(F137, which is mostly", id="killed"),
    ],
)
def test_a_crash_is_refused_and_the_next_file_is_read(
    number: signal.Signals, said: str, reader: Reader
) -> None:
    child = reader._start().process
    child.send_signal(number)
    child.wait()
    with pytest.raises(ImportRuleError, match=rf"SW_READER_CRASH.*{said}"):
        reader.read(TEXT, ".", OWN)
    assert reader.read(TEXT, ".", OWN)[1].form == "stablehlo text"


def test_a_hang_is_refused(reader: Reader) -> None:
    with Reader(timeout_s=0.2) as hasty:
        hasty._start().process.send_signal(signal.SIGSTOP)
        with pytest.raises(ImportRuleError, match="SW_READER_TIMEOUT"):
            hasty.read(TEXT, ".", OWN)


def test_a_file_that_takes_too_long_is_refused_with_what_took_long() -> None:
    """The functions at work, innermost first, with their lines."""
    ops = "\n".join(f"%{i + 1} = stablehlo.abs %{i} : tensor<f32>" for i in range(100_000))
    head = (
        "func.func @main(%x: tensor<f32>) -> tensor<f32> {\n%0 = stablehlo.abs %x : tensor<f32>\n"
    )
    module = f"{head}{ops}\nreturn %100000 : tensor<f32>\n}}"
    with Reader() as reader:
        reader.read(TEXT, ".", OWN)  # the child has started
        reader._timeout_s = 0.1
        with pytest.raises(ImportRuleError, match=r"got no answer: it was in \w+ \(compiler/"):
            reader.read(module.encode(), ".", OWN)
