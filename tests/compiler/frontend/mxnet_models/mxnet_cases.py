"""Nodes that are computed by our rows and by MXNet: for every operator several shapes, special
values, and the forms that its attributes have. `tests/fixtures/mxnet_models.py` keeps what MXNet
computes of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

F = np.float32


@dataclass(frozen=True, slots=True)
class Case:
    """A node: operands are arrays, attributes what a user says; `results` is how many."""

    operator: str
    operands: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    results: int = 1
    most: float = 2e-6
    """How far results may be apart, relative to the largest of them."""

    @property
    def is_plain(self) -> bool:
        """Whether MXNet has the form in kernels of its own alone, not in those of oneDNN."""
        return self.operator == "amp_multicast" or "target_shape" in self.attributes

    def __str__(self) -> str:
        shapes = ",".join(str(list(a.shape)) for a in self.operands)
        said = ",".join(f"{key}={value}" for key, value in self.attributes.items())
        return f"{self.operator}-{shapes}-{said}"[:120]


def words(text: str) -> list[str]:
    return text.split()


def normal(*shape: int, seed: int = 0, dtype: Any = F) -> Any:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(dtype)


def positive(*shape: int, seed: int = 0) -> Any:
    return np.abs(normal(*shape, seed=seed)) + F(0.1)


def whole(*shape: int, low: int = -9, high: int = 10, dtype: Any = F) -> Any:
    return np.random.default_rng(sum(shape)).integers(low, high, shape).astype(dtype)


FINITE = np.asarray([0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.25, -1.5], F)
SPECIAL = np.asarray([0.0, 1.0, -1.0, 0.5, -2.5, np.inf, -np.inf, np.nan], F)
SHAPES = ((5,), (2, 3, 4))


def unary() -> Iterator[Case]:
    names = words("abs arctan arcsinh cbrt ceil cos cosh degrees erf exp expm1 fix floor negative")
    names += words("radians relu rint round sigmoid sign sin sinh softsign square tan tanh trunc")
    names += words("hard_sigmoid identity _copy BlockGrad stop_gradient logical_not")
    for name in names:
        yield Case(name, (FINITE,))
        yield from (Case(name, (normal(*shape),)) for shape in SHAPES)
    for name in words("abs exp relu sigmoid tanh floor negative square"):
        yield Case(name, (SPECIAL,))
    for name in words("log log10 log1p log2 sqrt rsqrt reciprocal rcbrt gamma gammaln"):
        yield from (Case(name, (positive(*shape),), most=2e-5) for shape in SHAPES)
    for name in words("log sqrt"):
        yield Case(name, (np.asarray([0.0, 1.0, 4.0, np.inf], F),))
    yield Case("gamma", (np.asarray([-0.5, -1.5, 2.5], F),), most=1e-5)
    for name in words("arccos arcsin arctanh erfinv"):
        yield from (Case(name, (np.tanh(normal(*shape)),), most=1e-5) for shape in SHAPES)
    yield Case("arccosh", (1 + positive(2, 3),))
    yield Case("_contrib_div_sqrt_dim", (normal(2, 3, 8),))
    yield Case("_contrib_quadratic", (normal(2, 3),), {"a": 0.5, "b": -1.0, "c": 2.0})
    yield from (Case("smooth_l1", (normal(2, 9),), {"scalar": by}) for by in (1.0, 2.0))
    yield Case("clip", (SPECIAL[:7],), {"a_min": -1.0, "a_max": 0.75})
    yield Case("clip", (normal(2, 3, 4),), {"a_min": -0.5, "a_max": 0.5})
    for kind in words("relu sigmoid softrelu softsign tanh"):
        yield from (Case("Activation", (x,), {"act_type": kind}) for x in (FINITE, normal(2, 3, 4)))
    for kind in words("leaky elu selu gelu"):
        yield from (Case("LeakyReLU", (x,), {"act_type": kind}) for x in (FINITE, normal(2, 3, 4)))
    yield Case("LeakyReLU", (normal(2, 3),), {"act_type": "leaky", "slope": 0.1})
    yield Case("LeakyReLU", (normal(2, 3),), {"act_type": "elu", "slope": 0.7})
    yield Case("LeakyReLU", (normal(2, 3, 4), positive(3)), {"act_type": "prelu"})
    yield Case("LeakyReLU", (normal(2, 3, 4, 2), positive(1)), {"act_type": "prelu"})
    yield Case("LeakyReLU", (normal(2, 3),), {"act_type": "rrelu"})
    yield Case("Dropout", (normal(2, 3),), {"p": 0.5})
    for to in words("float16 int32 uint8 float32 int8"):
        yield Case("Cast", (np.abs(whole(2, 3)),), {"dtype": to})
        yield Case(
            "amp_cast",
            (np.abs(FINITE) * 3,),
            {"dtype": to} if to[0] == "f" else {"dtype": "float32"},
        )
    pair = normal(2, 3), normal(2, 3, dtype=np.float64)
    yield Case("amp_multicast", pair, {"num_outputs": 2}, 2)
    yield Case("amp_multicast", pair, {"num_outputs": 2, "cast_narrow": True}, 2, 1e-3)


JUDGED = words("equal not_equal greater greater_equal lesser lesser_equal")


def binary() -> Iterator[Case]:
    a, b = normal(2, 3, 4), normal(2, 3, 4, seed=7)
    counts = np.round(a), np.round(b)
    for name in words("add sub mul div"):
        yield Case(f"elemwise_{name}", (a, b))
    yield Case("elemwise_add", (whole(4, 2, dtype=np.int32), whole(4, 2, dtype=np.int32)))
    spelled = "_plus _minus _sub _mul _div _maximum _minimum _hypot _add _grad_add"
    for name in words(spelled):
        yield Case(name, (a, b))
    yield Case("_power", (positive(2, 3), normal(2, 3)), most=1e-5)
    yield Case("_mod", (a, positive(2, 3, 4)), most=1e-5)
    for name in JUDGED:
        yield Case(f"_{name}", counts)
    for name in words("add sub mul div plus minus maximum minimum hypot"):
        yield Case(f"broadcast_{name}", (a, normal(1, 3, 1)))
        yield Case(f"broadcast_{name}", (normal(3, 1), normal(1, 4)))
    for name in (*JUDGED, *words("logical_and logical_or logical_xor")):
        yield Case(f"broadcast_{name}", (whole(2, 5, low=-1, high=2), whole(1, 5, low=-1, high=2)))
    for name in words("_logical_and _logical_or _logical_xor"):
        yield Case(name, (whole(2, 5, low=-1, high=2), whole(2, 5, low=-1, high=2)[::-1].copy()))
    yield Case("broadcast_mod", (a * 3, np.asarray([[[1.5], [-0.7], [2.0]]], F)), most=1e-5)
    yield Case("broadcast_power", (positive(2, 3), normal(1, 3)), most=1e-5)
    yield Case("add_n", (a, b, a), {"num_args": 3})
    yield Case("ElementWiseSum", (a, b), {"num_args": 2})
    yield Case("where", (whole(2, 3, 4, low=0, high=2), a, b))
    yield Case("where", (np.asarray([0, 1], F), a, b))


def scalars() -> Iterator[Case]:
    a = normal(2, 3, 4)
    for name in words("_plus _minus _rminus _mul _div _rdiv _maximum _minimum _hypot"):
        yield from (Case(f"{name}_scalar", (x,), {"scalar": 1.5}) for x in (FINITE[1:], a))
    for name in words("_plus _minus _rminus _mul _maximum _minimum"):
        yield Case(f"{name}_scalar", (whole(3, 3, dtype=np.int32),), {"scalar": 2})
    for by in (2.0, 3.0, 0.5, -1.0, 1.7):
        yield Case("_power_scalar", (positive(2, 3),), {"scalar": by}, most=1e-5)
    yield Case("_power_scalar", (FINITE,), {"scalar": 2.0})
    yield Case("_rpower_scalar", (normal(2, 3),), {"scalar": 2.5}, most=1e-5)
    for by in (1.5, -0.75):
        yield Case("_mod_scalar", (a * 3,), {"scalar": by}, most=1e-5)
        yield Case("_rmod_scalar", (positive(2, 3),), {"scalar": by}, most=1e-5)
    for name in (*JUDGED, *words("logical_and logical_or logical_xor")):
        yield Case(f"_{name}_scalar", (whole(2, 5, low=-1, high=2),), {"scalar": 1.0})


def shapes() -> Iterator[Case]:
    x = normal(2, 3, 4)
    for shape in ((4, 6), (0, -1), (-1,), (0, 0, 2, 2), (-2,), (-3, 0), (-4, 1, 2, -2), (0, -3)):
        yield Case("Reshape", (x,), {"shape": shape})
    yield Case("Reshape", (x,), {"shape": (0, -4, -1, 3, -2)})
    yield Case("reshape", (normal(10, 5, 4),), {"shape": (-1, 0), "reverse": True})
    yield Case("reshape_like", (x, normal(6, 4)))
    said = {"lhs_begin": 0, "lhs_end": 2, "rhs_begin": 0, "rhs_end": 1}
    yield Case("reshape_like", (x, normal(6, 5)), said)
    yield from (Case(name, (x,)) for name in words("Flatten flatten"))
    yield from (Case("expand_dims", (x,), {"axis": axis}) for axis in (0, 1, 3, -1))
    yield Case("squeeze", (normal(1, 3, 1),))
    yield from (Case("squeeze", (normal(1, 3, 1),), {"axis": axis}) for axis in (0, -1, (0, 2)))
    yield Case("squeeze", (normal(1, 1),))
    yield Case("transpose", (x,))
    yield Case("transpose", (x,), {"axes": (1, 0, 2)})
    yield Case("SwapAxis", (x,), {"dim1": 0, "dim2": 2})
    yield from (Case(name, (x, x + 1), {"num_args": 2}) for name in words("Concat concat"))
    yield Case("Concat", (x, normal(2, 3, 1)), {"num_args": 2, "dim": -1})
    yield Case("_rnn_param_concat", (normal(4), normal(6)), {"num_args": 2, "dim": 0})
    yield from (Case("stack", (x, -x), {"num_args": 2, "axis": axis}) for axis in (0, 1, -1))
    yield Case("SliceChannel", (x,), {"num_outputs": 3}, 3)
    yield Case("split", (x,), {"num_outputs": 2, "axis": -1}, 2)
    yield Case("SliceChannel", (x,), {"num_outputs": 3, "squeeze_axis": True}, 3)
    yield Case("_split_v2", (x,), {"indices": (0, 1, 3), "axis": 2, "sections": 0}, 3)
    yield Case(
        "_split_v2", (x,), {"indices": (), "axis": 1, "sections": 3, "squeeze_axis": True}, 3
    )
    for begin, end, step in (
        ((0, 1), (2, 3), None),
        ((None, 1), (None, None), None),
        ((0, 2, None), (2, 0, None), (1, -1, 2)),
        ((-1,), (None,), None),
    ):
        rest = {} if step is None else {"step": step}
        yield Case("slice", (x,), {"begin": begin, "end": end, **rest})
    for axis, begin, end in ((0, 1, 2), (2, -3, -1), (1, 1, None), (-1, 0, 3)):
        yield Case("slice_axis", (x,), {"axis": axis, "begin": begin, "end": end})
    yield Case("slice_like", (x, normal(1, 2, 3)))
    yield Case("slice_like", (x, normal(5, 2, 9)), {"axes": (1,)})
    image = normal(1, 2, 6, 5)
    yield Case("Crop", (image,), {"num_args": 1, "offset": (1, 2), "h_w": (3, 2)})
    yield Case("Crop", (image, normal(1, 1, 4, 3)), {"num_args": 2, "center_crop": True})
    yield from (Case("tile", (x,), {"reps": reps}) for reps in ((2,), (1, 2, 3), (2, 1, 1, 2)))
    yield from (Case("repeat", (x,), {"repeats": 2, "axis": axis}) for axis in (0, 1, -1))
    yield Case("repeat", (x,), {"repeats": 3})
    width = (0, 0, 0, 0, 1, 2, 2, 1)
    for mode in words("constant edge reflect"):
        yield Case("Pad", (image,), {"mode": mode, "pad_width": width, "constant_value": 0.5})
    for axis in (0, 1, (0, 2)):
        yield Case("reverse", (x,), {"axis": axis})
        yield Case("flip", (x,), {"axis": axis})
    row = normal(1, 3, 1)
    yield Case("broadcast_to", (row,), {"shape": (2, 0, 4)})
    yield Case("broadcast_axis", (row,), {"axis": (0, 2), "size": (2, 3)})
    yield Case("broadcast_axis", (row,), {"axis": 2, "size": 5})
    yield Case("broadcast_like", (row, x))
    yield Case("broadcast_like", (row, normal(9, 2)), {"lhs_axes": (0,), "rhs_axes": (-1,)})
    yield Case("depth_to_space", (normal(1, 8, 2, 3),), {"block_size": 2})
    yield Case("space_to_depth", (normal(1, 2, 4, 6),), {"block_size": 2})
    yield from (Case("diag", (normal(3, 4),), {"k": k}) for k in (0, 1, -1))
    yield Case("diag", (normal(3),))
    yield from (Case(name, (x,)) for name in words("zeros_like ones_like shape_array size_array"))
    yield from (Case(name, (), {"shape": (2, 3)}) for name in words("_zeros _ones"))
    yield Case("_zeros", (), {"shape": (4,), "dtype": "int32"})
    yield Case("_full", (), {"shape": (2, 2), "value": 1.5})
    for start, stop, step in ((0, 5, 1), (1, 4, 0.5), (5, 0, -2)):
        yield Case("_arange", (), {"start": start, "stop": stop, "step": step})
    yield Case("_arange", (), {"start": 0, "stop": 3, "repeat": 2, "dtype": "int32"})
    yield Case("_linspace", (), {"start": 0, "stop": 2, "num": 5})
    yield Case("_eye", (), {"N": 3, "M": 4, "k": 1})
    yield Case("_contrib_arange_like", (x,), {"axis": 1})
    yield Case("_contrib_arange_like", (normal(2, 3),), {"start": 1.0, "step": 0.5})
    yield Case("moments", (x,), {"axes": (0, 2)}, 2)
    yield Case("moments", (x,), {"axes": (1,), "keepdims": True}, 2)


def reductions() -> Iterator[Case]:
    x = normal(2, 3, 4)
    for name in words("sum mean prod max min nansum nanprod"):
        yield Case(name, (x,))
        yield Case(name, (x,), {"axis": 1})
        yield Case(name, (x,), {"axis": (0, -1), "keepdims": True})
        yield Case(name, (x,), {"axis": (1,), "exclude": True})
    yield Case("nansum", (SPECIAL[[0, 1, 7]],))
    yield Case("sum", (whole(3, 4, dtype=np.int32),), {"axis": 0})
    yield Case("norm", (x,))
    yield from (Case("norm", (x,), {"ord": n, "axis": 1, "keepdims": True}) for n in (1, 2))
    yield Case("cumsum", (x,), {"axis": 1})
    yield Case("cumsum", (x,))
    for name in words("argmax argmin"):
        yield Case(name, (whole(3, 5),), {"axis": 1})
        yield Case(name, (x,), {"axis": 0, "keepdims": True})
        yield Case(name, (x,))
    yield Case("argmax_channel", (normal(4, 5),))
    for ascends in (True, False):
        yield Case("sort", (x,), {"axis": 1, "is_ascend": ascends})
        yield Case("argsort", (x,), {"axis": -1, "is_ascend": ascends})
    yield Case("sort", (x,))
    yield Case("argsort", (x,), {"axis": None})
    yield Case("argsort", (x,), {"axis": 0, "dtype": "int32"})
    for how, count in (("value", 1), ("indices", 1), ("both", 2), ("mask", 1)):
        yield Case("topk", (x,), {"k": 2, "axis": -1, "ret_typ": how}, count)
        yield Case("topk", (x,), {"k": 2, "axis": 1, "ret_typ": how, "is_ascend": True}, count)
    for name in words("softmax log_softmax softmin"):
        yield Case(name, (x,))
        yield Case(name, (x,), {"axis": 1})
    yield Case("softmax", (x,), {"temperature": 2.0})
    lengths = np.asarray([2, 4], np.int32)
    yield Case("softmax", (normal(2, 4), lengths), {"use_length": True, "axis": -1})
    yield Case("SoftmaxActivation", (normal(3, 5),))
    yield Case("SoftmaxActivation", (normal(2, 3, 2, 2),), {"mode": "channel"})
    for mode in words("instance channel spatial"):
        yield Case("L2Normalization", (normal(2, 3, 2, 2),), {"mode": mode})
    yield Case("softmax_cross_entropy", (normal(3, 4), np.asarray([0, 3, 1], F)))


def indexing() -> Iterator[Case]:
    table, x = normal(6, 4), normal(3, 5)
    at = np.asarray([[0, 5, 2], [1, 1, 3]], F)
    yield Case("Embedding", (at, table), {"input_dim": 6, "output_dim": 4})
    yield Case("Embedding", (at.astype(np.int32), table), {"input_dim": 6, "output_dim": 4})
    yield Case("take", (table, at))
    yield Case("take", (table, at), {"axis": 1, "mode": "wrap"})
    yield Case("take", (table, at * 3 - 4), {"mode": "clip"})
    yield Case("batch_take", (x, np.asarray([0, 4, 2], np.int32)))
    yield Case("pick", (x, np.asarray([0, 4, 2], F)))
    yield Case("pick", (x, np.asarray([0, 2, 2, 1, 1], F)), {"axis": 0, "keepdims": True})
    yield Case("pick", (x, np.asarray([0, 9, -3], F)), {"mode": "wrap"})
    yield Case("one_hot", (at,), {"depth": 6})
    yield Case("one_hot", (at,), {"depth": 4, "on_value": 2.0, "off_value": -1.0, "dtype": "int32"})
    places = np.asarray([[0, 2, 1], [1, 4, 0]], F)
    yield Case("gather_nd", (x, places))
    yield Case("gather_nd", (x, places[:1]))
    yield Case("scatter_nd", (normal(3), places), {"shape": (3, 5)})
    times, lengths = normal(4, 3, 2), np.asarray([1, 4, 2], F)
    for name in words("SequenceMask SequenceLast SequenceReverse"):
        yield Case(name, (times, lengths), {"use_sequence_length": True})
        yield Case(name, (times,))
    for name in words("SequenceMask SequenceLast"):
        turned = np.swapaxes(times, 0, 1).copy()
        yield Case(name, (turned, lengths), {"use_sequence_length": True, "axis": 1})
    masked = {"use_sequence_length": True, "value": -1.5}
    yield Case("SequenceMask", (times, lengths), masked)


def products() -> Iterator[Case]:
    x, w, b = normal(4, 2, 3), normal(5, 6), normal(5)
    yield Case("FullyConnected", (x, w, b), {"num_hidden": 5})
    yield Case("FullyConnected", (x, w), {"num_hidden": 5, "no_bias": True})
    said = {"num_hidden": 5, "flatten": False}
    yield Case("FullyConnected", (x, normal(5, 3), b), said)
    yield Case("dot", (normal(3, 4), normal(4, 5)))
    yield Case("dot", (normal(3, 4), normal(5, 4)), {"transpose_b": True})
    yield Case("dot", (normal(4, 3), normal(4, 5)), {"transpose_a": True})
    yield Case("dot", (normal(2, 3, 4), normal(4, 5)))
    yield Case("dot", (normal(4), normal(4)))
    a, c = normal(2, 3, 4), normal(2, 4, 5)
    for name in words("batch_dot linalg_gemm2"):
        yield Case(name, (a, c))
        yield Case(name, (a, np.swapaxes(c, 1, 2).copy()), {"transpose_b": True})
        yield Case(name, (np.swapaxes(a, 1, 2).copy(), c), {"transpose_a": True})
    yield Case("linalg_gemm", (a, c, normal(2, 3, 5)), {"alpha": 0.5, "beta": 2.0})
    packed = normal(3, 2, 24)
    yield Case("_contrib_interleaved_matmul_selfatt_qk", (packed,), {"heads": 2})
    att = np.abs(normal(4, 3, 3))
    yield Case("_contrib_interleaved_matmul_selfatt_valatt", (packed, att), {"heads": 2})
    queries, pairs = normal(3, 2, 8), normal(5, 2, 16)
    yield Case("_contrib_interleaved_matmul_encdec_qk", (queries, pairs), {"heads": 2})
    att = np.abs(normal(4, 3, 5))
    yield Case("_contrib_interleaved_matmul_encdec_valatt", (pairs, att), {"heads": 2})


def windows() -> Iterator[Case]:
    x, w, b = normal(2, 4, 7, 6), normal(6, 4, 3, 3), normal(6)
    base = {"kernel": (3, 3), "num_filter": 6}
    for said in ({}, {"stride": (2, 2), "pad": (1, 1)}, {"dilate": (2, 1), "pad": (0, 2)}):
        yield Case("Convolution", (x, w, b), base | said, most=5e-6)
    yield Case("Convolution", (x, w), base | {"no_bias": True}, most=5e-6)
    grouped = base | {"num_group": 2, "pad": (1, 1)}
    yield Case("Convolution", (x, normal(6, 2, 3, 3), b), grouped, most=5e-6)
    one = {"kernel": (3,), "num_filter": 3, "pad": (1,)}
    yield Case("Convolution", (normal(2, 4, 9), normal(3, 4, 3), normal(3)), one, most=5e-6)
    three = {"kernel": (2, 2, 2), "num_filter": 2}
    cube = normal(1, 2, 3, 4, 3), normal(2, 2, 2, 2, 2), normal(2)
    yield Case("Convolution", cube, three, most=5e-6)
    back = {"kernel": (3, 3), "num_filter": 5}
    weight = normal(4, 5, 3, 3)
    for said in (
        {},
        {"stride": (2, 2), "pad": (1, 1), "adj": (1, 1)},
        {"dilate": (2, 2), "stride": (2, 1)},
    ):
        yield Case("Deconvolution", (x, weight), back | said, most=5e-6)
    for said in ({"target_shape": (18,)}, {"target_shape": (17,)}):
        line = {"kernel": (3,), "num_filter": 5, "stride": (2,)}
        yield Case("Deconvolution", (normal(2, 4, 9), normal(4, 5, 3)), line | said, most=5e-6)
    biased = back | {"no_bias": False}
    yield Case("Deconvolution", (x, weight, normal(5)), biased, most=5e-6)
    parts = {"kernel": (2, 2), "num_filter": 6, "num_group": 2, "stride": (2, 2)}
    yield Case("Deconvolution", (x, normal(4, 3, 2, 2)), parts, most=5e-6)
    for kind in words("max avg sum"):
        yield Case("Pooling", (x,), {"kernel": (2, 2), "pool_type": kind})
        yield Case("Pooling", (x,), {"pool_type": kind, "global_pool": True, "kernel": (1, 1)})
        for convention in words("valid full"):
            said = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "pool_type": kind}
            yield Case("Pooling", (x,), said | {"pooling_convention": convention})
    without = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "pool_type": "avg"}
    for convention in words("valid full"):
        said = without | {"count_include_pad": False, "pooling_convention": convention}
        yield Case("Pooling", (x,), said)
    lp = {"kernel": (2, 2), "stride": (2, 2), "pool_type": "lp", "p_value": 2}
    yield Case("Pooling", (x,), lp)
    yield Case("Pooling", (normal(2, 3, 9),), {"kernel": (3,), "stride": (2,), "pool_type": "max"})
    for size in ((1, 1), (3, 2), (4, 5)):
        yield Case("_contrib_AdaptiveAvgPooling2D", (x,), {"output_size": size})
    yield Case("UpSampling", (x,), {"scale": 2, "sample_type": "nearest", "num_args": 1})
    pair = normal(1, 2, 4, 4), normal(1, 3, 2, 2)
    yield Case("UpSampling", pair, {"scale": 2, "sample_type": "nearest", "num_args": 2})
    alone = normal(1, 2, 4, 4), normal(1, 2, 2, 2)
    said = {"scale": 1, "sample_type": "nearest", "num_args": 2, "multi_input_mode": "sum"}
    yield Case("UpSampling", alone, said)
    said = {"scale": 2, "sample_type": "bilinear", "num_args": 2, "num_filter": 2}
    yield Case("UpSampling", (normal(1, 2, 3, 4), normal(2, 1, 4, 4)), said, most=5e-6)
    for said in ({}, {"align_corners": False}):
        size = {"height": 9, "width": 4}
        yield Case("_contrib_BilinearResize2D", (x,), size | said, most=2e-5)
    like = {"mode": "like"}
    yield Case("_contrib_BilinearResize2D", (x, normal(2, 4, 5, 5)), like, most=2e-5)


def normalised() -> Iterator[Case]:
    x, image = normal(2, 4, 3), normal(2, 4, 3, 3)
    scale, shift, mean, spread = positive(4), normal(4), normal(4, seed=3), positive(4, seed=5)
    for said in ({}, {"fix_gamma": False}, {"fix_gamma": False, "eps": 1e-5}):
        yield Case("BatchNorm", (image, scale, shift, mean, spread), said, most=5e-6)
    last = {"axis": -1, "fix_gamma": False}
    rows = normal(3, 4), scale, shift, mean, spread
    yield Case("BatchNorm", rows, last, most=5e-6)
    yield Case("LayerNorm", (x, positive(3), normal(3)), most=5e-6)
    yield Case("LayerNorm", (x, scale, shift), {"axis": 1, "eps": 1e-3}, most=5e-6)
    yield Case("InstanceNorm", (image, scale, shift), {"eps": 1e-5}, most=5e-6)
    yield Case("GroupNorm", (image, scale[:2], shift[:2]), {"num_groups": 2}, most=5e-6)
    yield Case("LRN", (image,), {"nsize": 3, "alpha": 0.01}, most=5e-6)


def recurrent() -> Iterator[Case]:
    time, batch, inputs, hidden = 3, 2, 4, 5
    gates = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 3}
    for mode, count in gates.items():
        for layers, ways in ((1, 1), (2, 1), (2, 2)):
            size = 0
            for layer in range(layers):
                width = inputs if layer == 0 else ways * hidden
                size += ways * count * hidden * (width + hidden + 2)
            flat = normal(size) / F(3)
            states = [normal(layers * ways, batch, hidden, seed=n) for n in range(2)]
            states = states[: 1 + (mode == "lstm")]
            said = {"mode": mode, "state_size": hidden, "num_layers": layers}
            said |= {"bidirectional": ways == 2, "state_outputs": True}
            given = normal(time, batch, inputs), flat, *states
            yield Case("RNN", given, said, 1 + len(states), 5e-6)


def heads() -> Iterator[Case]:
    x, label = normal(3, 4), np.asarray([0, 3, 1], F)
    yield from (Case(name, (x, label)) for name in words("SoftmaxOutput SVMOutput"))
    image = normal(2, 3, 2, 2), np.zeros((2, 2, 2), F)
    yield Case("SoftmaxOutput", image, {"multi_output": True})
    kept = normal(2, 3, 4), np.zeros((2, 3), F)
    yield Case("SoftmaxOutput", kept, {"preserve_shape": True})
    for name in words("LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput"):
        yield Case(name, (x, normal(3, 4, seed=9)))
    yield from (Case(name, (positive(3, 2),)) for name in words("MakeLoss make_loss"))


def cases() -> list[Case]:
    kinds = unary, binary, scalars, shapes, reductions, indexing, products, windows
    return [case for kind in (*kinds, normalised, recurrent, heads) for case in kind()]


def losses() -> list[Case]:
    """Heads in training: what MXNet gives as the gradient of their first operand."""
    x, label = normal(4, 3), np.asarray([0, 2, 1, 1], F)
    found = [
        Case("SoftmaxOutput", (x, label), said)
        for said in (
            {},
            {"grad_scale": 0.5},
            {"normalization": "batch"},
            {"normalization": "valid"},
            {"use_ignore": True, "ignore_label": 1},
            {"use_ignore": True, "ignore_label": 1, "normalization": "valid"},
            {"smooth_alpha": 0.1},
        )
    ]
    image = normal(2, 3, 2, 2), whole(2, 2, 2, low=0, high=3)
    found.append(Case("SoftmaxOutput", image, {"multi_output": True}))
    valid = {"multi_output": True, "normalization": "valid"}
    found.append(Case("SoftmaxOutput", image, valid))
    kept = normal(2, 3, 4), whole(2, 3, low=0, high=4)
    found.append(Case("SoftmaxOutput", kept, {"preserve_shape": True}))
    for name in words("LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput"):
        found.append(Case(name, (x, normal(4, 3, seed=9))))
        found.append(Case(name, (x, normal(4, 3, seed=9)), {"grad_scale": 2.0}))
    hinges = {}, {"use_linear": True}, {"margin": 0.5, "regularization_coefficient": 2.0}
    found += [Case("SVMOutput", (x, label), said) for said in hinges]
    made = {}, {"grad_scale": 3.0}, {"normalization": "batch"}, {"normalization": "valid"}
    found += [Case("MakeLoss", (x,), said) for said in made]
    found.append(Case("make_loss", (x,)))
    found.append(Case("softmax_cross_entropy", (x, label)))
    return found
