"""Code that is renamed for other tensors and registers is the code that would be made for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwright.compiler.codegen.generate import Codes, generate
from shardwright.compiler.codegen.relocate import relocated
from shardwright.compiler.fusion import autotuner
from shardwright.compiler.fusion.autotuner import Autotuner
from shardwright.compiler.isa.kernel import KernelProgram, Tensor, View
from shardwright.compiler.machine.target import load_target
from shardwright.compiler.options import CompileOptions
from tests.compiler.codegen.kernel_harness import F32, TARGET, Maker
from tests.compiler.codegen.row_cases import backward
from tests.compiler.codegen.test_contractions import matmul
from tests.compiler.codegen.test_indexed import scatter
from tests.compiler.codegen.test_search import softmax

CASES: dict[str, Callable[[], Maker]] = {
    "loops": softmax,
    "a sum over chunks": lambda: matmul(300, 5000, 200),
    "rows": lambda: backward((2, 256, 256, 64, 64), F32, "causal"),
    "indices": lambda: scatter(200, 64, 32),
}
REGISTER = 11


def behind_another(maker: Maker) -> tuple[KernelProgram, list[Tensor]]:
    """The same kernel in a function with one more tensor in front."""

    def moved(value: object) -> object:
        return replace(value, tensor=value.tensor + 1) if isinstance(value, View) else value

    program = maker.program()
    nodes = tuple(
        replace(n, attrs={k: moved(v) for k, v in n.attrs.items()}) for n in program.nodes
    )
    aliased = [replace(t, alias=t.alias + (t.alias >= 0)) for t in maker.tensors]
    return replace(program, nodes=nodes), [Tensor("more", (3,), F32, "input"), *aliased]


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_renamed_code_is_the_code_that_would_be_made(make: Callable[[], Maker]) -> None:
    maker = make()
    program, tensors = behind_another(maker)
    renamed = {n: n + 1 for n in range(len(maker.tensors))}
    made = generate(maker.program(), maker.tensors, TARGET, 1000)
    wanted = generate(program, tensors, TARGET, REGISTER)
    assert relocated(made.kernel, program, renamed, 1000, REGISTER) == wanted.kernel


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_what_was_timed_is_what_is_made(make: Callable[[], Maker], level: int) -> None:
    maker, options = make(), CompileOptions(optlevel=level)
    program, tensors = behind_another(maker)
    tuner = Autotuner(load_target(TARGET), options)
    assert tuner(maker.program(), maker.tensors) > 0
    made = tuner.generate(program, tensors, REGISTER)
    wanted = generate(program, tensors, TARGET, REGISTER, options)
    assert made.kernel == wanted.kernel and made.next_register == wanted.next_register


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_what_another_function_has_found_is_not_searched_again(
    make: Callable[[], Maker], is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same code and time, wherever tensors and registers are."""
    autotuner._memo.cache_clear()
    maker, target, options = make(), load_target(TARGET), CompileOptions()
    searched = Autotuner(target, options)
    wanted = [searched(maker.program(), maker.tensors)] if is_timed else []
    searched.generate(maker.program(), maker.tensors, 0)
    program, tensors = behind_another(maker)
    alone = generate(program, tensors, TARGET, REGISTER, options)
    monkeypatch.setattr(Codes, "_fastest", lambda *_: pytest.fail("a search"))
    tuner = Autotuner(target, options)
    assert ([tuner(program, tensors)] if is_timed else []) == wanted
    made = tuner.generate(program, tensors, REGISTER)
    assert made.kernel == alone.kernel and made.next_register == alone.next_register
    with pytest.raises(pytest.fail.Exception, match="a search"):
        Autotuner(target, replace(options, model_type="transformer")).generate(program, tensors, 0)
