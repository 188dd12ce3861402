"""docs/mxnet.md lists every row of the table, and the table is what was promised."""

from __future__ import annotations

from shardwright.compiler.frontend.mxnet.operators import MXNET
from tests.support.graph_pages import DOCS, page

PROMISED = """
Activation BatchNorm BilinearResize2D Cast Concat Convolution Deconvolution Dropout Embedding
Flatten FullyConnected GroupNorm InstanceNorm L2Normalization LRN LayerNorm LeakyReLU
LinearRegressionOutput MakeLoss Pad Pooling RNN Reshape SequenceLast SequenceMask SequenceReverse
SliceChannel SoftmaxActivation SoftmaxOutput SwapAxis UpSampling arange_like argmax argsort
batch_dot clip div_sqrt_dim dot erf expand_dims flip gather_nd interleaved_matmul_encdec_qk
interleaved_matmul_encdec_valatt interleaved_matmul_selfatt_qk interleaved_matmul_selfatt_valatt
log_softmax norm one_hot ones_like pick repeat reshape_like slice slice_axis slice_like smooth_l1
softmax sort split squeeze stack take tile topk transpose where zeros_like
"""


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "mxnet.md").read_text() == page("mxnet.md"), "run `make docs`"


def test_the_operators_that_were_promised_have_rows() -> None:
    held = {row.operator for row in MXNET}
    names = PROMISED.split()
    assert [name for name in names if not {name, f"_contrib_{name}"} & held] == []
    assert len({row.function for row in MXNET}) > 150
