"""The op tables as plain data: for each table, groups of (rule word, reason, op names).

A newcomer reads here which op runs in which precision and why; `ops.py` turns the groups into rows. A name
followed by `*` has a `dtype=` argument of its own. No imports here, and no code but how a measurement reads.
"""

Groups = tuple[tuple[str, str, str], ...]

CONVOLUTIONS = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution"
)
_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"
_RNN_CELLS = "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
RECURRENT = "lstm gru rnn_tanh rnn_relu"
_LOSSES = (
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss"
    " smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss"
    " soft_margin_loss"
    " triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits"
)
_FFTS = (
    "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2"
    " fft_rfftn fft_irfftn fft_hfft fft_ihfft"
)
_FACTORISATIONS = (
    "cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse linalg_cond"
    " linalg_matrix_rank linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals"
    " linalg_eigvalsh linalg_inv"
    " linalg_householder_product linalg_tensorinv linalg_tensorsolve geqrf _lu_with_info qr svd"
    " triangular_solve linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh"
    " linalg_lstsq linalg_inv_ex linalg_matrix_sqrth"
)
_POINTWISE_FULL = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus"
)
_UPSAMPLES = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d"
    " _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d"
    " _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
# These stay in fp32 at every level: in 16 bits torch refuses them on CPU (trace: torch 2.11 alone).
NO_16_BIT_KERNEL = (
    f"{_FACTORISATIONS} linalg_solve_ex linalg_lu_solve linalg_ldl_solve linalg_pinv"
    f" {_FFTS} stft istft polar view_as_complex quantile nanquantile avg_pool3d cdist pdist"
    " nuclear_norm ctc_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward"
    " _grid_sampler_2d_cpu_fallback _upsample_bilinear2d_aa _upsample_bicubic2d_aa trace"
)


def _describe_measurement(
    op: str, error: float, gradients: float, size: float, torchs: tuple[float, float] | None = None
) -> str:
    """Say what op_rules.json (results/amd-epyc-avx512-bf16) found for the op kept in bf16.

    The worst of inputs and parameters, of sums of 32 to 65,536 terms; 0 is exact. `torchs`: where torch's own
    kernel errs more than a region, its two errors.
    """
    text = (
        f"measured {op}: error against float64 x{error:.2f} of fp32 rounded once,"
        f" gradients x{gradients:.2f}, bytes x{size:.2f} of fp32"
    )
    return text if torchs is None else text + f" (torch's own kernel x{torchs[0]:.2f} and x{torchs[1]:.2f})"


_NORM = "its statistics are fp32, and so are the sums for weight and bias; "
_PICKS = "picks or copies values, and adds their gradients in fp32; "
_AVERAGES = "averages values, in fp32; "
_POINTWISE = "moves its result no further than its input; "
HALFSTEP: Groups = (
    (
        "low",
        "a convolution: 16-bit products accumulate in fp32 inside the kernel",
        f"{_CONVOLUTIONS} _convolution convolution cudnn_convolution cudnn_convolution_transpose",
    ),
    (
        "low",
        "a matrix product: 16-bit products accumulate in fp32 inside the kernel",
        "linear matmul mm bmm baddbmm addmm addbmm addmv addr mv einsum chain_matmul linalg_multi_dot"
        " _addmm_activation",
    ),
    (
        "low",
        "attention: two matrix products around a softmax that the kernel keeps in fp32",
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _native_multi_head_attention",
    ),
    (
        "low",
        "a recurrent cell: matrix products of inputs and state",
        f"{_RNN_CELLS} {RECURRENT} _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn",
    ),
    ("low", "follows a low op and has one small weight; bound by memory", "prelu"),
    ("full", "grows or cancels fast: one rounding of the input moves the output by many", _POINTWISE_FULL),
    (
        "full",
        "a sum of many terms: the result outgrows 16 bits and is rounded to them; "
        + _describe_measurement("sum_of_squares", 1.18, 1.00, 0.50)
        + ", in fp16 infinite",
        "sum* prod* cumsum* cumprod* nansum* logsumexp trace",
    ),
    (
        "full",
        "a sum of many terms: rounding its result is most of the error; "
        + _describe_measurement("mean", 1.00, 0.00, 0.50),
        "mean* nanmean*",
    ),
    (
        "full",
        "sums and differences of squares; " + _describe_measurement("var", 1.00, 7.82, 0.50),
        "var std var_mean std_mean",
    ),
    (
        "full",
        "a running sum of exponentials; " + _describe_measurement("logcumsumexp", 1.00, 3.84, 0.50),
        "logcumsumexp",
    ),
    (
        "full",
        "a norm: squares leave the range of fp16 and the result feeds a division",
        "norm linalg_vector_norm* linalg_matrix_norm* linalg_norm* frobenius_norm nuclear_norm dist pdist"
        " cdist renorm cosine_similarity",
    ),
    (
        "full",
        "a loss: a mean of small terms, and the root of every gradient; "
        + _describe_measurement("mse_loss", 1.16, 1.39, 0.50),
        f"{_LOSSES} multilabel_margin_loss_forward ctc_loss",
    ),
    (
        "full",
        "a loss: the root of every gradient; " + _describe_measurement("cross_entropy", 18.80, 1.79, 0.56),
        "cross_entropy_loss",
    ),
    (
        "full",
        "the first half of a loss; " + _describe_measurement("log_softmax", 1.13, 9.96, 0.50),
        "log_softmax*",
    ),
    (
        "full",
        "positions lose pixels in 16 bits; "
        + _describe_measurement("grid_sampler", 1.00, 1.00, 0.50, (12.30, 855.00)),
        "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback",
    ),
    ("full", "no 16-bit kernel on CPU, hence fp32 on every device", NO_16_BIT_KERNEL),
    (
        "full",
        "torch's 16-bit kernel gives gradients of NaN for finite numbers",
        "matrix_exp linalg_matrix_exp",
    ),
    (
        "full",
        "stands for an integer kernel: its steps are exact in fp32 only",
        "fake_quantize_per_tensor_affine",
    ),
    (
        "keep",
        _NORM + _describe_measurement("layer_norm", 1.00, 1.00, 0.53, (1.00, 1220.00)),
        "layer_norm native_layer_norm",
    ),
    ("keep", _NORM + _describe_measurement("rms_norm", 1.00, 1.00, 0.84), "rms_norm"),
    ("keep", _NORM + _describe_measurement("group_norm", 1.00, 1.00, 0.51, (1.00, 27.60)), "group_norm"),
    ("keep", _NORM + _describe_measurement("batch_norm", 1.00, 1.00, 0.50, (2.01, 1050.00)), "batch_norm"),
    (
        "keep",
        _NORM + _describe_measurement("instance_norm", 1.00, 1.00, 0.52, (1.94, 51.30)),
        "instance_norm",
    ),
    (
        "keep",
        "its kernel sums in fp32, its gradient takes the result as rounded; "
        + _describe_measurement("softmax", 1.00, 2.50, 0.50),
        "softmax*",
    ),
    (
        "keep",
        _PICKS + _describe_measurement("max_pool", 0.00, 1.00, 0.70, (0.00, 495.00)),
        "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
        " fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d",
    ),
    (
        "keep",
        _PICKS + _describe_measurement("pad", 0.00, 1.00, 0.50, (0.00, 4160.00)),
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d"
        " upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d"
        " _upsample_nearest_exact2d _upsample_nearest_exact3d",
    ),
    (
        "keep",
        _AVERAGES + _describe_measurement("avg_pool", 1.00, 1.00, 0.50, (1.00, 587.00)),
        "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    ),
    (
        "keep",
        _AVERAGES + _describe_measurement("upsample", 1.58, 1.00, 0.50),
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d",
    ),
    ("keep", _POINTWISE + _describe_measurement("relu", 0.00, 0.00, 0.50), "relu"),
    ("keep", _POINTWISE + _describe_measurement("gelu", 1.00, 1.00, 0.50), "gelu"),
    ("keep", _POINTWISE + _describe_measurement("sigmoid", 1.00, 3.00, 0.50), "sigmoid"),
    (
        "widest",
        "joins tensors: none of them loses bits",
        "cat stack where index_copy addcdiv addcmul atan2 bilinear cross linalg_cross tensordot lerp"
        " masked_scatter scatter put heaviside meshgrid cartesian_prod",
    ),
    (
        "widest",
        "adds to a tensor by index: none of them loses bits, sums are fp32 and rounded once; "
        + _describe_measurement("index_add", 1.00, 0.00, 0.53, (849.00, 0.00)),
        "index_put scatter_add index_add scatter_reduce index_reduce embedding_bag",
    ),
    (
        "widest",
        "one number from two vectors, summed in fp32; " + _describe_measurement("vecdot", 2.64, 1.00, 0.50),
        "dot vdot linalg_vecdot",
    ),
    (
        "banned:fp16",
        "its gradient divides by a probability that 16 bits round to 0 or 1, in fp16 to NaN; "
        + _describe_measurement("sigmoid_then_bce", 1990.00, 7.99, 0.50),
        "binary_cross_entropy",
    ),
)

_SUMS_BY_INDEX = (
    "index index_select index_add index_add_ index_put index_put_ index_reduce index_reduce_ segment_reduce"
    " histc put put_ coalesce to_dense"
    " take bilinear gather scatter_add scatter_add_ scatter_reduce scatter_reduce_"
    " grid_sampler grid_sampler_2d grid_sampler_3d"
)
# These add where windows overlap, or where an edge is copied: few terms but for wide windows.
WINDOWS = (
    "unfold im2col col2im replication_pad1d replication_pad2d replication_pad3d avg_pool1d avg_pool2d"
    " max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices"
    " max_pool3d_with_indices fractional_max_pool2d fractional_max_pool3d adaptive_avg_pool1d"
    " adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
)
# Ops whose 16-bit kernels add in 16 bits, forward or for a gradient: a sum of ones in bf16 stops at 256.
# CPU: measured with torch 2.13 (tests/laws/test_law_18_long_sums.py finds them).
SUMS_IN_16_BITS = {
    "cpu": (
        "layer_norm native_layer_norm batch_norm group_norm instance_norm embedding embedding_bag"
        f" adaptive_avg_pool3d nll_loss nll_loss2d cross_entropy_loss {CONVOLUTIONS} {WINDOWS}"
        f" {_SUMS_BY_INDEX}"
    ),
}


def sums_in_16_bits(device_type: str) -> tuple[str, ...]:
    """Return the ops that need another way to add; of an unknown device type, those that add by index."""
    return tuple(SUMS_IN_16_BITS.get(device_type, f"{WINDOWS} {_SUMS_BY_INDEX}").split())


_TORCH_CUDA_REASON = "as torch's CUDA autocast list has it"
TORCH_CUDA: Groups = (
    (
        "low",
        _TORCH_CUDA_REASON,
        f"_convolution {_CONVOLUTIONS} convolution prelu addmm addmv addr matmul einsum mm mv"
        f" linalg_vecdot linear"
        f" addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell"
        f" _thnn_fused_gru_cell"
        f" {_RNN_CELLS} _scaled_dot_product_flash_attention scaled_dot_product_attention"
        f" _cudnn_rnn cudnn_convolution"
        f" cudnn_convolution_transpose",
    ),
    (
        "full",
        _TORCH_CUDA_REASON,
        f"{_POINTWISE_FULL} layer_norm native_layer_norm rms_norm group_norm frobenius_norm"
        f" nuclear_norm"
        f" cosine_similarity {_LOSSES} dist pdist cdist renorm logsumexp {_UPSAMPLES} norm prod*"
        f" softmax*"
        f" log_softmax* cumprod* cumsum* linalg_vector_norm* linalg_matrix_norm* sum* linalg_matrix_sqrth",
    ),
    (
        "widest",
        _TORCH_CUDA_REASON,
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    ),
    (
        "banned",
        _TORCH_CUDA_REASON,
        "binary_cross_entropy",
    ),
)

_TORCH_CPU_REASON = "as torch's CPU autocast list has it"
TORCH_CPU: Groups = (
    (
        "low",
        _TORCH_CPU_REASON,
        f"_convolution {_CONVOLUTIONS} bmm mm linalg_vecdot baddbmm addmm _addmm_activation"
        f" addbmm linear matmul"
        f" mkldnn_rnn_layer prelu scaled_dot_product_attention _native_multi_head_attention",
    ),
    (
        "full",
        _TORCH_CPU_REASON,
        f"avg_pool3d binary_cross_entropy grid_sampler polar prod quantile nanquantile stft cdist"
        f" grid_sampler_2d"
        f" _grid_sampler_2d_cpu_fallback grid_sampler_3d trace view_as_complex {_FACTORISATIONS}"
        f" max_pool3d"
        f" max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d"
        f" replication_pad1d"
        f" replication_pad2d replication_pad3d {_LOSSES} cross_entropy_loss ctc_loss {_FFTS}"
        f" fake_quantize_per_tensor_affine fractional_max_pool2d fractional_max_pool3d"
        f" adaptive_max_pool3d"
        f" multilabel_margin_loss_forward",
    ),
    ("widest", _TORCH_CPU_REASON, "stack cat index_copy"),
)

IN_PLACE = (
    "acos_ asin_ cosh_ cumprod_ cumsum_ erfinv_ exp_ expm1_ log10_ log2_ log_ pow_ reciprocal_ renorm_ rsqrt_"
    " sinh_ tan_"
)
_APEX_REASON = "as Apex's override lists have it"
APEX: Groups = (
    (
        "low",
        _APEX_REASON,
        f"{_CONVOLUTIONS} linear prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm {_RNN_CELLS}"
        f" {RECURRENT}",
    ),
    (
        "full",
        _APEX_REASON,
        f"{_UPSAMPLES} grid_sampler softplus softmax log_softmax gelu layer_norm group_norm"
        f" cosine_similarity"
        f" poisson_nll_loss cosine_embedding_loss cross_entropy_loss hinge_embedding_loss kl_div"
        f" l1_loss mse_loss"
        f" margin_ranking_loss multilabel_margin_loss multi_margin_loss nll_loss nll_loss2d"
        f" binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss"
        f" ctc_loss acos asin"
        f" cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist"
        f" norm prod std sum"
        f" var renorm",
    ),
    (
        "widest",
        _APEX_REASON,
        "addcdiv addcmul atan2 cross bilinear dot add sub div mul eq equal ge gt le lt ne cat stack",
    ),
    ("banned", _APEX_REASON, "binary_cross_entropy"),
    (
        "banned",
        "in place the fp32 result would be rounded to 16 bits, as Apex has it",
        IN_PLACE,
    ),
)

_MINDSPORE_AUTO = "as MindSpore's amp level auto has it"
MINDSPORE: Groups = (
    (
        "low",
        "on MindSpore's white list",
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear lstm_cell gru_cell"
        " rnn_tanh_cell rnn_relu_cell matmul mm bmm prelu relu addr",
    ),
    ("low", _MINDSPORE_AUTO, "_convolution convolution einsum addmm"),
    ("low", "its products are on MindSpore's list", RECURRENT),
    (
        "full",
        _MINDSPORE_AUTO,
        "pow acos asin cosh erfinv exp expm1 log log1p reciprocal rsqrt sinh tan softplus layer_norm"
        " native_layer_norm batch_norm group_norm kl_div smooth_l1_loss multilabel_margin_loss"
        " soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits pdist cdist"
        " renorm prod* softmax* log_softmax* cumprod* cumsum* sum* norm mse_loss",
    ),
    ("widest", _MINDSPORE_AUTO, "addcdiv addcmul cross dot grid_sampler cat"),
)

_MLU_SAME = "as torch's CUDA list, which the port starts from"
_MLU_FULL = "the port runs it in fp32"
MLU: Groups = (
    *((rule, _MLU_SAME, names) for rule, _, names in TORCH_CUDA),
    ("low", "its products are on the list the port starts from", RECURRENT),
    ("full", _MLU_FULL, "dot vdot batch_norm softmax* sigmoid"),
)

PAPER: Groups = (
    (
        "low",
        "products accumulate in fp32, then one rounding to 16 bits",
        "linear matmul mm bmm baddbmm addmm addbmm addmv addr mv einsum dot vdot chain_matmul"
        " linalg_multi_dot"
        f" {_CONVOLUTIONS} scaled_dot_product_attention {_RNN_CELLS} {RECURRENT}",
    ),
    (
        "keep",
        "a large reduction: 16 bits in and out, fp32 inside",
        "batch_norm layer_norm group_norm instance_norm rms_norm softmax log_softmax sum mean",
    ),
)
