"""Operators of other frameworks that neuron-cc lists, as its `list-operators` prints them.

Source: the operator lists of neuron-cc's release notes: names of the first release (1.0.4680.0),
then what later ones added. `log` of MXNet and `Log` of TensorFlow were taken back as advertised by
mistake, and stay in the list of the first release, which had them.
"""

from __future__ import annotations

from collections.abc import Mapping

_MXNET = """
Activation BatchNorm Cast Concat Convolution Convolution_v1 Dropout Flatten FullyConnected LeakyReLU
Pooling Pooling_v1 RNN Reshape SequenceMask SliceChannel Softmax UpSampling __add_scalar__
__div_scalar__ __mul_scalar__ __pow_scalar__ __rdiv_scalar__ __rpow_scalar__ __rsub_scalar__
__sub_scalar__ _arange _copy _div_scalar _equal_scalar _full _greater_equal_scalar _greater_scalar
_lesser_equal_scalar _lesser_scalar _maximum _maximum_scalar _minimum _minimum_scalar _minus_scalar
_mul_scalar _not_equal_scalar _ones _plus_scalar _power_scalar _rdiv_scalar _rminus_scalar
_rnn_param_concat _zeros batch_dot broadcast_add broadcast_div broadcast_equal broadcast_greater
broadcast_greater_equal broadcast_lesser broadcast_lesser_equal broadcast_maximum broadcast_minimum
broadcast_mod broadcast_mul broadcast_not_equal broadcast_sub ceil clip concat elemwise_add
elemwise_div elemwise_mul elemwise_sub exp expand_dims flatten floor gather_nd log log_softmax max
mean min negative ones_like relu repeat reshape reshape_like reverse rsqrt sigmoid slice slice_like
softmax split sqrt square squeeze stack sum tanh tile transpose where zeros_like
"""
_MXNET_LATER = """
_contrib_div_sqrt_dim broadcast_axis
Deconvolution LayerNorm Pad SwapAxis _contrib_arange_like _contrib_interleaved_matmul_encdec_qk
_contrib_interleaved_matmul_encdec_valatt _contrib_interleaved_matmul_selfatt_qk
_contrib_interleaved_matmul_selfatt_valatt arctan broadcast_like cos erf pad sin slice_axis
amp_cast amp_multicast
"""
_TENSORFLOW = """
Add AddV2 All AvgPool BatchMatMul BatchMatMulV2 BatchToSpaceND BiasAdd Cast Ceil Concat ConcatV2
Const Conv2D Equal Exp ExpandDims Fill Floor FusedBatchNorm Greater GreaterEqual Identity LRN
LeakyRelu Less LessEqual Log LogicalAnd LogicalNot LogicalOr MatMul Max MaxPool Maximum Mean Min
Minimum Mul NoOp NotEqual Pack Pad PadV2 Placeholder Pow Prod RandomUniform RealDiv Reciprocal Relu
Relu6 Reshape ReverseV2 Round Rsqrt Select Shape Sigmoid Sign Slice Softmax SpaceToBatchND Split
SplitV Sqrt Square Squeeze StridedSlice Sub Sum Tanh Tile Transpose ZerosLike
"""
_TENSORFLOW_LATER = """
Neg LogSoftmax ResizeBilinear ResizeNearestNeighbor FloorDiv Softplus Unstack
AdjustContrastv2 AdjustSaturation BroadcastTo Cholesky Conv2DBackpropInput Conv3D CropAndResize
HSVToRGB InvertPermutation L2Loss Log1p MatrixBandPart MatrixDiag MatrixSetDiag
MatrixTriangularSolve MaxPool3D MirrorPad RGBToHSV Range SoftmaxCrossEntropyWithLogits
SquaredDifference StopGradient Unpack UnsortedSegmentSum
Abs Cos DepthwiseConv2dNative Erf Rank Sin Size
"""
_ONNX = """
Add ArgMax ArgMin AveragePool BatchNormalization Cast Ceil Clip Concat Constant ConstantFill Conv
ConvTranspose Div Dropout Elu Exp FC Flatten Floor Gather Gemm GlobalAveragePool GlobalMaxPool
HardSigmoid Identity LRN LeakyRelu Log LogSoftmax MatMul Max MaxPool Mean Min Mul Neg PRelu Pad
ParametricSoftplus Pow Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Scale
ScaledTanh Selu Sigmoid Slice SoftPlus Softmax Softsign SpatialBN Split Sqrt Squeeze Sub Sum Tanh
ThresholdedRelu Transpose Unsqueeze Upsample
"""
_ONNX_LATER = "Abs"

LISTED: Mapping[str, tuple[str, ...]] = {
    "mxnet": (*_MXNET.split(), *_MXNET_LATER.split()),
    "onnx": (*_ONNX.split(), *_ONNX_LATER.split()),
    "tensorflow": (*_TENSORFLOW.split(), *_TENSORFLOW_LATER.split()),
}
"""Framework -> the operators that neuron-cc lists of it, each once."""
