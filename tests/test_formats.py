"""Formats against torch and ml_dtypes: every code point, and more than a million fp32 values each."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigError
from halfstep.formats import (
    BF16,
    E4M3FN,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    FP64,
    TF32,
    Format,
    decode,
    describe,
    dtype_name,
    encode,
    format_of,
    parse_dtype,
    round_reference,
    round_to,
)

NUMPY = {
    "fp64": np.float64,
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
INTS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
SMALL = [FP16, BF16, E4M3FN, E5M2]
# torch 2.12 made its cast to e4m3fn saturate; before, and in ml_dtypes, an overflow gives NaN.
TORCH_SATURATES = {"e4m3fn": torch.tensor(1e4).to(torch.float8_e4m3fn).float().item() == 448.0}
by_name = pytest.mark.parametrize("fmt", SMALL, ids=str)


def every_value(fmt: Format) -> torch.Tensor:
    """All code points of a format of 8 or 16 bits, in order of their patterns, as fp32."""
    return torch.arange(2**fmt.bits).to(INTS[fmt.bits]).view(fmt.torch_dtype).float()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: the same bits, or NaN both."""
    ints = {4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.view(ints) == b.view(ints)) | (a.isnan() & b.isnan())


def assert_same(a: torch.Tensor, b: torch.Tensor, given: torch.Tensor) -> None:
    wrong = ~same_bits(a, b)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {a.numel()} differ: {given[wrong][:4]}, {a[wrong][:4]}, {b[wrong][:4]}"
    )


def hard_values(fmt: Format) -> torch.Tensor:
    """10^6 random fp32 bit patterns, and around each code point of `fmt` the values next to every tie."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).to(torch.int32)
    points = every_value(fmt) if fmt.bits <= 16 else torch.empty(0)
    points = points[points.isfinite()].double().sort().values
    ties = (points[1:] + points[:-1]) / 2
    beyond = torch.tensor([fmt.max * (1 + fmt.epsilon / 4 * k) for k in range(6)], dtype=torch.float64)
    near = torch.cat([points, ties, beyond, -beyond]).float()
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 2**-149, -(2**-149), 3.4e38])
    return torch.cat([bits.view(torch.float32), near, near.nextafter(up), near.nextafter(down), special])


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.torch_dtype], ids=str)
def test_limits_are_those_of_torch_and_ml_dtypes(fmt):
    theirs = torch.finfo(fmt.torch_dtype)
    assert (fmt.bits, fmt.max, fmt.epsilon, fmt.smallest_normal) == (
        theirs.bits, theirs.max, theirs.eps, theirs.smallest_normal,
    )  # fmt: skip
    oracle = ml_dtypes.finfo(NUMPY[fmt.name])
    assert fmt.smallest_subnormal == float(oracle.smallest_subnormal)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (oracle.nexp, oracle.nmant)
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits


def test_tf32_is_fp32_with_ten_mantissa_bits():
    assert (TF32.bits, TF32.smallest_normal, TF32.epsilon) == (19, FP32.smallest_normal, FP16.epsilon)
    assert TF32.torch_dtype is None


@by_name
def test_every_code_point_decodes_encodes_and_rounds_to_itself(fmt):
    values = every_value(fmt)
    ours = torch.tensor([decode(bits, fmt) for bits in range(2**fmt.bits)])
    theirs = np.arange(2**fmt.bits).astype(f"uint{fmt.bits}").view(NUMPY[fmt.name]).astype(np.float32)
    assert_same(ours, values, ours)
    assert_same(torch.from_numpy(theirs), values, ours)
    numbers = [(bits, x) for bits, x in enumerate(values.tolist()) if not math.isnan(x)]
    assert [encode(x, fmt) for _, x in numbers] == [bits for bits, _ in numbers]
    assert all(round_reference(x, fmt) == x for _, x in numbers)
    assert_same(round_to(values, fmt), values, values)
    assert_same(round_to(values.double(), fmt), values.double(), values)


@by_name
def test_a_million_fp32_values_round_as_in_torch_and_ml_dtypes(fmt):
    x = hard_values(fmt)
    assert x.numel() >= 1_000_000
    ours = round_to(x, fmt)
    with np.errstate(all="ignore"):
        oracle = torch.from_numpy(x.numpy().astype(NUMPY[fmt.name]).astype(np.float32))
    assert_same(ours, oracle, x)
    torch_like = round_to(x, fmt, saturate=TORCH_SATURATES.get(fmt.name, False))
    assert_same(torch_like, x.to(fmt.torch_dtype).float(), x)
    assert_same(round_to(x.double(), fmt), ours.double(), x)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_the_fast_twin_is_the_reference(fmt, dtype, saturate):
    x = hard_values(FP16 if fmt.bits > 16 else fmt).to(dtype)
    x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))[:3000]]
    expected = torch.tensor([round_reference(v, fmt, saturate) for v in x.tolist()], dtype=dtype)
    assert_same(round_to(x, fmt, saturate), expected, x)


@settings(max_examples=300, deadline=None)
@given(st.floats(width=64), st.sampled_from(["fp64", "fp32", "fp16"]))
def test_the_reference_rounds_doubles_once_as_numpy_does(x, name):
    with np.errstate(all="ignore"):
        theirs = float(np.float64(x).astype(NUMPY[name]))
    ours = round_reference(x, name)
    assert ours == theirs or (math.isnan(ours) and math.isnan(theirs))
    assert math.copysign(1, ours) == math.copysign(1, theirs) or math.isnan(x)


@settings(max_examples=200, deadline=None)
@given(st.fractions(-70000, 70000), st.sampled_from(SMALL))
def test_no_number_of_the_format_is_nearer(x, fmt):
    ours = round_reference(x, fmt, saturate=True)
    values = every_value(fmt)
    values = values[values.isfinite()].unique().tolist()
    assert abs(Fraction(ours) - x) == min(abs(Fraction(v) - x) for v in _around(values, float(x)))


def _around(values, x):
    at = int(np.searchsorted(values, x))
    return values[max(0, at - 2) : at + 2]


def test_fp64_is_not_rounded_by_way_of_fp32():
    just_above_a_tie = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert round_to(just_above_a_tie, FP16).item() == 1 + 2**-10
    assert just_above_a_tie.to(torch.float16).item() == 1.0


@pytest.mark.parametrize(
    ("x", "fmt", "saturate", "expected"),
    [
        (65519.0, FP16, False, 65504.0),
        (65520.0, FP16, False, math.inf),
        (65520.0, FP16, True, 65504.0),
        (-math.inf, FP16, True, -65504.0),
        (2**-25, FP16, False, 0.0),
        (-(2**-25), FP16, False, -0.0),
        (2**-25 * (1 + 2**-20), FP16, False, 2**-24),
        (464.0, E4M3FN, False, 448.0),
        (465.0, E4M3FN, False, math.nan),
        (math.inf, E4M3FN, False, math.nan),
        (math.inf, E4M3FN, True, 448.0),
        (61440.0, E5M2, False, math.inf),
        (61439.0, E5M2, False, 57344.0),
        (1 + 2**-11, TF32, False, 1.0),
        (1 + 3 * 2**-11, TF32, False, 1 + 2**-9),
    ],
)
def test_known_facts(x, fmt, saturate, expected):
    for got in (round_reference(x, fmt, saturate), round_to(torch.tensor([x]), fmt, saturate).item()):
        assert got == expected or (math.isnan(got) and math.isnan(expected))
        assert math.copysign(1, got) == math.copysign(1, expected) or math.isnan(expected)


def test_rounding_makes_a_new_tensor_and_carries_no_gradient():
    x = torch.tensor([1.0, 1.0001], requires_grad=True)
    for fmt in (FP32, BF16, TF32):
        rounded = round_to(x, fmt)
        assert not rounded.requires_grad
        assert rounded.data_ptr() != x.data_ptr()
    assert round_to(torch.zeros(2, 0, 3), BF16).shape == (2, 0, 3)


def test_non_contiguous_tensors_keep_their_shape():
    x = torch.randn(6, 4).t()[::2]
    assert torch.equal(round_to(x, TF32), round_to(x.contiguous(), TF32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.complex64])
def test_only_wide_floats_are_rounded(dtype):
    with pytest.raises(ConfigError, match="takes an fp32 or fp64 tensor"):
        round_to(torch.zeros(2, dtype=dtype), BF16)


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("bf16", "bfloat16", "BF16", "torch.bfloat16", torch.bfloat16), torch.bfloat16),
        (("fp16", "float16", "half", "f16", "torch.half"), torch.float16),
        (("fp32", "float32", "float", "f32"), torch.float32),
        (("fp64", "float64", "double", "f64"), torch.float64),
        (("e4m3fn", "float8_e4m3fn"), torch.float8_e4m3fn),
        (("e5m2", "float8_e5m2"), torch.float8_e5m2),
    ],
)
def test_dtypes_by_name(names, dtype):
    assert {parse_dtype(name) for name in names} == {dtype}
    assert parse_dtype(dtype_name(dtype)) == dtype
    assert format_of(dtype) is FORMATS[dtype_name(dtype)]


@pytest.mark.parametrize("bad", ["bf61", "", "int8", torch.int64, None, 16])
def test_what_is_no_format_is_refused(bad):
    with pytest.raises(ConfigError, match=r"unknown number format.*expected one of fp64, fp32"):
        parse_dtype(bad)


def test_tf32_is_no_tensor_dtype():
    assert format_of("tf32") is TF32
    with pytest.raises(ConfigError, match="set_float32_matmul_precision"):
        parse_dtype("tf32")


def test_dtypes_without_a_row_keep_their_name():
    assert dtype_name(torch.int64) == "int64"


@pytest.mark.parametrize(
    ("x", "fmt", "status"),
    [
        (0.5, FP16, "exact"),
        (0.0, FP16, "exact"),
        (0.1, FP16, "rounded"),
        (1e-7, FP16, "subnormal"),
        (1e-8, FP16, "underflow"),
        (70000.0, FP16, "overflow"),
        (math.inf, FP16, "infinity"),
        (math.inf, E4M3FN, "overflow"),
        (math.nan, BF16, "nan"),
        (Fraction(1, 10), FP64, "rounded"),
        (Fraction(10) ** 400, FP64, "overflow"),
    ],
)
def test_describe_says_what_happened(x, fmt, status):
    assert describe(x, fmt).status == status


def test_describe_gives_bits_error_and_spacing():
    s = describe(Fraction("0.00006666666"), FP16)
    assert (s.sign, s.exponent, s.mantissa) == ("0", "00001", "0001011110")
    assert s.value == decode(s.bits, FP16) == 6.663799285888672e-05
    assert s.spacing == 2**-24
    assert s.absolute_error == pytest.approx(2.8667141e-8)
    assert s.relative_error == pytest.approx(4.3000716e-4)
    assert describe(0.1, FP64).absolute_error == 0


def test_encode_and_decode_refuse_what_does_not_fit():
    with pytest.raises(ConfigError, match="not a number of fp16"):
        encode(0.1, FP16)
    with pytest.raises(ConfigError, match="pattern of the 8 bits"):
        decode(256, E5M2)


def test_formats_cannot_be_changed():
    with pytest.raises(AttributeError):
        FP16.bits = 17
    with pytest.raises(TypeError):
        FORMATS["fp16"] = BF16
