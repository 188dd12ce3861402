"""Composite custom calls of the vendor's frameworks, against JAX at both levels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.compiler.diagnostics import ImportRuleError
from shardwright.compiler.frontend.stablehlo import import_module, import_partition
from tests.support.compiled import run_levels
from tests.support.error_triggers import TRACED, kernel

X = np.random.default_rng(3).normal(size=(6, 20)).astype(np.float32)
X[2, 5] = X[2, 11] = 9.0  # a tie: the first position counts
WEIGHT = np.linspace(0.5, 1.5, 20, dtype=np.float32)
EPS = np.float32(1e-3)
SOFT = np.asarray(jax.nn.softmax(X, 0))
IMAGE = np.random.default_rng(4).normal(size=(2, 5, 6, 3)).astype(np.float32)


def module(target: str, config: str, operands: tuple[Any, ...], results: str) -> str:
    types = ["tensor<" + "x".join([*map(str, np.shape(x)), "f32"]) + ">" for x in operands]
    names = [f"%a{i}" for i in range(len(operands))]
    arguments = ", ".join(f"{n}: {t}" for n, t in zip(names, types, strict=True))
    count = results.count("tensor")
    made = ", ".join(f"%y#{i}" for i in range(count)) if count > 1 else "%y"
    return f"""
    func.func @main({arguments}) -> ({results}) {{
      %y{f":{count}" if count > 1 else ""} = "stablehlo.custom_call"({", ".join(names)})
        {{call_target_name = "{target}", backend_config = "{config}"}}
        : ({", ".join(types)}) -> ({results}) loc("net.py":7:1)
      return {made} : {results}
    }}"""


def silu_slope(x: Any) -> Any:
    return jax.vjp(jax.nn.silu, x)[1](jnp.ones_like(x))[0]


def rms_norm(x: Any, w: Any, eps: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w


CASES: list[tuple[str, str, tuple[Any, ...], str, Callable[..., Any]]] = [
    ("AwsNeuronArgMax", "1", (X,), "tensor<6xui32>", lambda x: jnp.argmax(x, 1)),
    ("AwsNeuronArgMax", "0", (X,), "tensor<20xui32>", lambda x: jnp.argmax(x, 0)),
    ("AwsNeuronArgMax", "1", (X,), "tensor<6xi64>", lambda x: jnp.argmax(x, 1).astype("i4")),
    ("AwsNeuronArgMin", "-1", (X,), "tensor<6xui32>", lambda x: jnp.argmin(x, 1)),
    ("AwsNeuronRmsNorm", "1", (X, WEIGHT, EPS), "tensor<6x20xf32>", rms_norm),
    (
        "AwsNeuronSoftmaxBackward",
        "0",
        (X, SOFT),
        "tensor<6x20xf32>",
        lambda g, y: y * (g - jnp.sum(g * y, 0)),
    ),
    ("AwsNeuronSoftmax", "", (X,), "tensor<6x20xf32>", jax.nn.softmax),
    ("AwsNeuronSiluBackward", "", (X,), "tensor<6x20xf32>", lambda x: silu_slope(x)),
    ("AwsNeuronSiluBackward", "", (SOFT, X), "tensor<6x20xf32>", lambda g, x: g * silu_slope(x)),
    ("AwsNeuronDevicePrint", "", (X, SOFT), "tensor<6x20xf32>, tensor<6x20xf32>", lambda *x: x),
    (
        "AwsNeuronTopK",
        "3",
        (X,),
        "tensor<6x3xf32>, tensor<6x3xui32>",
        lambda x: jax.lax.top_k(x, 3),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_equal_to_jax(case: tuple[str, str, tuple[Any, ...], str, Callable[..., Any]]) -> None:
    target, config, operands, results, reference = case
    graph = import_module(module(target, config, operands, results))
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(reference)(*operands))]
    for given in run_levels(graph, list(operands)):
        for have, want in zip(given, wanted, strict=True):
            np.testing.assert_allclose(have, want, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize(
    ("target", "config", "results"),
    [
        ("AwsNeuronTopK", "many", "tensor<6x3xf32>, tensor<6x3xui32>"),
        ("AwsNeuronTopK", "21", "tensor<6x21xf32>, tensor<6x21xui32>"),
        ("AwsNeuronRmsNorm", "1", "tensor<6x20xf32>"),
        ("AwsNeuronSiluBackward", "", "tensor<120xf32>"),
        ("AwsNeuronIntMatmult", "", "tensor<6x20xf32>"),
        ("AwsNeuronCollectiveMatmul", "tp_degree=2", "tensor<6x20xf32>"),
    ],
)
def test_forms_that_make_no_sense(target: str, config: str, results: str) -> None:
    with pytest.raises(ImportRuleError) as caught:
        import_module(module(target, config, (X,), results))
    assert caught.value.code == "NCC_EVRF064"
    assert caught.value.loc is not None and caught.value.loc.line == 7


def points(size: int, count: int, config: str) -> np.ndarray:
    """Where the pixels of a resized dim lie in the image dim, in pixels from its first."""
    corners, centers = config[0] == "1", config[1] == "1"
    scale = (size - 1) / (count - 1) if corners else size / count
    return (np.arange(count) + 0.5 * centers) * scale - 0.5 * centers


def nearest(image: Any, shape: tuple[int, int], config: str) -> Any:
    """Pixels picked by position."""
    for dim, count in zip((1, 2), shape, strict=True):
        at = points(image.shape[dim], count, config) + 0.5 * (config[1] == "1")
        at = np.round(at + 1e-6) if config[0] == "1" else np.floor(at + 1e-6)
        image = jnp.take(image, at.astype(int), axis=dim)
    return image


def bilinear(image: Any, shape: tuple[int, int], config: str) -> Any:
    """Between the two pixels on either side, the border pixel beyond the border."""
    for dim, count in zip((1, 2), shape, strict=True):
        at = np.clip(points(image.shape[dim], count, config), 0, image.shape[dim] - 1)
        low = np.floor(at).astype(int)
        high = np.minimum(low + 1, image.shape[dim] - 1)
        part = (at - low).reshape([-1 if d == dim else 1 for d in range(4)])
        image = jnp.take(image, low, dim) * (1 - part) + jnp.take(image, high, dim) * part
    return image


@pytest.mark.parametrize("config", ["00", "01", "10"])
@pytest.mark.parametrize("shape", [(10, 12), (7, 4), (5, 13)])
@pytest.mark.parametrize("target", ["ResizeNearest", "ResizeBilinear", "ResizeNearestGrad"])
def test_resized_images(target: str, shape: tuple[int, int], config: str) -> None:
    large = (2, *shape, 3)
    if target == "ResizeNearestGrad":
        grad = np.random.default_rng(5).normal(size=large).astype(np.float32)
        (wanted,) = jax.vjp(lambda x: nearest(x, shape, config), IMAGE)[1](grad)
        given = grad
    else:
        wanted = (nearest if target == "ResizeNearest" else bilinear)(IMAGE, shape, config)
        given = IMAGE
    result = "tensor<" + "x".join(map(str, wanted.shape)) + "xf32>"
    graph = import_module(module(target, f"\\22{config}\\22", (given,), result))
    exact = target == "ResizeNearest"
    for (have,) in run_levels(graph, [given]):
        if exact:
            np.testing.assert_array_equal(have, wanted)
        np.testing.assert_allclose(have, wanted, rtol=1e-5, atol=1e-5)


def test_half_pixel_centers_are_those_of_jax_image() -> None:
    for target, method in (("ResizeNearest", "nearest"), ("ResizeBilinear", "bilinear")):
        graph = import_module(module(target, "01", (IMAGE,), "tensor<2x11x12x3xf32>"))
        wanted = jax.image.resize(IMAGE, (2, 11, 12, 3), method, antialias=False)
        for (have,) in run_levels(graph, [IMAGE]):
            np.testing.assert_allclose(have, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "result"), [("11", "2x10x12x3xf32"), ("00", "2x10x12x4xf32"), ("00", "2x9x3xf32")]
)
def test_resizes_that_make_no_sense(config: str, result: str) -> None:
    with pytest.raises(ImportRuleError, match="NCC_EVRF064"):
        import_module(module("ResizeNearest", config, (IMAGE,), f"tensor<{result}>"))


def test_a_call_without_a_public_form_says_so() -> None:
    with pytest.raises(ImportRuleError, match="is not public") as caught:
        import_module(module("AwsNeuronDropoutMaskV1", "", (X,), "tensor<6x20xf32>"))
    assert caught.value.code == "NCC_EHCA005" and caught.value.loc is not None


@pytest.mark.filterwarnings("ignore:.*integer dot")
def test_a_product_of_integers() -> None:
    rng = np.random.default_rng(6)
    lhs, rhs = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((6, 40), (40, 5)))
    graph = import_module("""
    func.func @main(%a: tensor<6x40xi8>, %b: tensor<40x5xi8>) -> tensor<6x5xi32> {
      %y = stablehlo.custom_call @AwsNeuronIntMatmult(%a, %b)
        : (tensor<6x40xi8>, tensor<40x5xi8>) -> tensor<6x5xi32>
      return %y : tensor<6x5xi32>
    }""")
    for (have,) in run_levels(graph, [lhs, rhs]):
        np.testing.assert_array_equal(have, lhs.astype(np.int32) @ rhs.astype(np.int32))


@pytest.mark.parametrize("results", ["", "tensor<4xf32>"])
def test_a_print_of_a_device_is_left_out_with_a_warning(results: str) -> None:
    made, used = (f"%y = {PRINT}", "%y") if results else (PRINT, "%a")
    text = f"""func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {{
      {made} : (tensor<4xf32>) -> ({results}) loc("net.py":7:1)
      return {used} : tensor<4xf32>
    }}"""
    _, facts = import_partition(text)
    assert [str(found.loc) for found in facts.findings] == ["net.py:7"]
    assert "AwsNeuronDevicePrint prints nothing" in facts.findings[0].message


PRINT = "stablehlo.custom_call @AwsNeuronDevicePrint(%a) {has_side_effect = true}"


@pytest.mark.parametrize("says_release", ["call", "artifact", ""])
@pytest.mark.parametrize("place", ["path", "launch folder"])
def test_a_kernel_whose_artifact_is_there_is_said_to_be_no_graph(
    place: str, says_release: str, tmp_path: Path
) -> None:
    """Checked as the vendor does, in its order; then refused for what it is."""
    folder = tmp_path / "71ad"
    folder.mkdir()
    given = folder / "kernel.json"
    given.write_text('{"nki_version": "0.3.0"}' if says_release == "artifact" else "\0binary")
    path = given if place == "path" else Path("/elsewhere/71ad/kernel.json")
    fields = {"kernel_file": str(path)}
    fields |= {"nki_version": "0.3.0"} if says_release == "call" else {}
    call = kernel("mine.attend", "4xf32", **fields)
    with pytest.raises(ImportRuleError, match="mine") as caught:
        import_module(call.text, base_dir=str(tmp_path))
    assert caught.value.code == ("NCC_EUOC002" if says_release else "NCC_EVRF065")
    given.unlink()
    with pytest.raises(ImportRuleError, match="NCC_EVRF059"):
        import_module(call.text, base_dir=str(tmp_path))


def test_a_kernel_that_is_traced_into_the_call_is_of_an_old_release() -> None:
    with pytest.raises(ImportRuleError, match=r"NCC_EVRF065.*names no artifact"):
        import_module(kernel("attend", "4xf32").text)
    wide = kernel("mlp", "8x64xf32", "64x4096xf32", **TRACED).text
    with pytest.raises(ImportRuleError, match="NCC_EUOC002"):
        import_module(wide)  # 4096 is not above the limit


def test_an_operator_in_a_library_is_refused_for_what_it_is() -> None:
    with pytest.raises(ImportRuleError, match=r"NCC_EUOC002.*library"):
        import_module(module("AwsNeuronCustomOp", "", (X,), "tensor<6x20xf32>"))


def test_a_transfer_with_a_static_ring_passes_its_operand_on() -> None:
    graph = import_module(module("AwsNeuronTransferWithStaticRing", "", (X,), "tensor<6x20xf32>"))
    for (have,) in run_levels(graph, [X]):
        np.testing.assert_array_equal(have, X)
