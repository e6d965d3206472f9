import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ConfigError
from halfstep.formats import FORMATS, format_of
from halfstep.numerics import histogram as hg

STORED = [f for f in FORMATS.values() if f.torch_dtype is not None]
INT = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def special_bits(fmt):
    """Both zeros, the ends of the subnormals and normals, infinities, quiet and signalling NaN."""
    if fmt.bits <= 16:
        return torch.arange(1 << fmt.bits).to(INT[fmt.bits])
    m, top = fmt.mantissa_bits, (1 << fmt.exponent_bits) - 1
    one = [0, 1, 2, 3, (1 << m) - 1, 1 << m, (1 << m) + 1, (top << m) - 1, top << m, (top << m) + 1]
    one += [1 << k for k in range(m)] + [(1 << k) - 1 for k in range(m)]
    one += [(top << m) | (1 << (m - 1)), ((top << m) | ((1 << m) - 1)), 127 << m, 65519, 0x10000]
    both = one + [v - (1 << (fmt.bits - 1)) for v in one]
    return torch.tensor(both, dtype=torch.int64).to(INT[fmt.bits])


def tensor_with_everything(fmt, n=70_000, seed=0):
    g = torch.Generator().manual_seed(seed)
    low, high = (
        (-(1 << (fmt.bits - 1)), (1 << (fmt.bits - 1)) - 1) if fmt.bits < 64 else (-(2**63), 2**63 - 1)
    )
    random = torch.randint(low, high, (n,), generator=g).to(INT[fmt.bits])
    bits = torch.cat([special_bits(fmt), random, special_bits(fmt)])
    return bits.view(fmt.torch_dtype)


def count_in_float64(t, fmt):
    """The oracle: numpy, float64, frexp."""
    x = t.to(torch.float64).numpy()
    finite = np.abs(x[np.isfinite(x) & (x != 0)])
    exponents = np.frexp(finite)[1] - 1
    lowest = fmt.min_exponent - fmt.mantissa_bits
    bins = np.bincount(exponents - lowest, minlength=fmt.max_exponent - lowest + 1)
    return tuple(bins.tolist()), int((x == 0).sum()), int(np.isinf(x).sum()), int(np.isnan(x).sum())


@pytest.mark.parametrize("fmt", STORED, ids=str)
@pytest.mark.parametrize("size", ["large", "small"])
def test_counts_equal_a_float64_count(fmt, size):
    t = tensor_with_everything(fmt)
    t = t if size == "large" else t[:: 1 + t.numel() // 4000]
    h = hg.count(t).read()
    assert (h.exponents, h.zeros, h.infs, h.nans) == count_in_float64(t, fmt)
    assert h.total == t.numel()
    subnormal = (t.double() != 0) & (t.double().abs() < fmt.smallest_normal)
    assert h.subnormals == int(subnormal.sum())


def test_away_from_the_cpu_nothing_is_read(monkeypatch):
    """On the meta device any read of a value raises; a count must get through without one."""
    for fmt in STORED:
        if fmt.bits == 8:
            continue
        counts = hg.count(torch.empty(100, dtype=fmt.torch_dtype, device="meta"))
        assert counts.bins.device.type == "meta"


@pytest.mark.parametrize("flush", [True, False])
def test_denormal_flushing_does_not_change_a_count(flush):
    t = torch.tensor([1e-40, 1e-45, 0.0, -3e-39], dtype=torch.float32)
    torch.set_flush_denormal(flush)
    try:
        h = hg.count(t).read()
    finally:
        torch.set_flush_denormal(False)
    assert (h.zeros, h.subnormals) == (1, 3)


@pytest.mark.parametrize("fmt", STORED, ids=str)
def test_amax_is_the_largest_and_carries_nan(fmt):
    t = torch.tensor([0.5, -1.75, 1.5]).to(fmt.torch_dtype)
    assert hg.amax(t).item() == 1.75
    assert math.isnan(hg.amax(torch.tensor([1.0, math.nan]).to(fmt.torch_dtype)))
    assert hg.amax(t[:0]).item() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 6).t(),
        lambda: torch.randn(3, 4, 5)[:, ::2],
        lambda: torch.randn(()),
        lambda: torch.randn(4, dtype=torch.complex64),
        lambda: torch.randn(5, requires_grad=True),
        lambda: torch.eye(5).to_sparse(),
        lambda: torch.empty(0, 3),
    ],
)
def test_any_layout(make):
    t = make()
    h = hg.count(t).read()
    d = t.detach()
    d = d.values() if d.is_sparse else d
    d = torch.view_as_real(d) if d.is_complex() else d
    assert h.total == d.numel()
    assert h.exponents == count_in_float64(d.reshape(-1), format_of(d.dtype))[0]


def test_many_at_once_equal_one_by_one():
    everything = tensor_with_everything(FORMATS["fp32"], 500)
    parts = [
        everything,
        torch.randn(7),
        torch.zeros(3),
        everything[:1],
        torch.empty(0),
        torch.full((2,), 1e-42),
    ]
    together = hg.count_many(parts)
    for part, row in zip(parts, together):
        assert torch.equal(row, hg.count(part).bins)


def test_counts_add():
    a, b = torch.randn(100), torch.randn(50)
    assert (hg.count(a) + hg.count(b)).read() == hg.count(torch.cat([a, b])).read()
    with pytest.raises(ConfigError, match="fp16"):
        hg.count(a) + hg.count(b.half())


def test_integers_are_refused():
    with pytest.raises(ConfigError, match="int64"):
        hg.count(torch.arange(3))
    with pytest.raises(ConfigError, match="int64"):
        hg.what_if(torch.arange(3), "fp16")


def really_cast(x, fmt, k):
    """The oracle: scale in fp32 (exact here), cast, compare in float64.

    torch clamps to 448 when it casts to e4m3fn, which would hide what left the range; ml_dtypes does not.
    """
    scaled = (x.double() * 2.0**k).float()
    if fmt.has_inf:
        q = scaled.to(fmt.torch_dtype).double() / 2.0**k
    else:
        with np.errstate(invalid="ignore"):
            stored = scaled.numpy().astype(ml_dtypes.float8_e4m3fn)
        q = torch.from_numpy(stored.astype(np.float64)) / 2.0**k
    x = x.double()
    finite = x.isfinite()
    q, x = q[finite], x[finite]
    stays = q.isfinite()
    noise = ((x - q)[stays] ** 2).sum().item()
    snr = 10 * math.log10((x[stays] ** 2).sum().item() / noise) if noise else math.inf
    return (
        ((q == 0) & (x != 0)).sum().item() / max(1, (x != 0).sum().item()),
        (~stays).double().mean().item(),
        snr,
    )


CASTS = [FORMATS[n] for n in ("fp16", "e4m3fn", "e5m2", "bf16")]


@pytest.mark.parametrize("fmt", CASTS, ids=str)
@pytest.mark.parametrize("k", [-20, -9, 0, 3, 10, 16])
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
def test_what_if_equals_really_casting(fmt, k, source):
    g = torch.Generator().manual_seed(k + 100)
    x = torch.randn(20_000, generator=g) * torch.exp2(torch.randint(-28, 15, (20_000,), generator=g).float())
    edges = [fmt.smallest_subnormal * f * 2.0**-k for f in (0.5, 0.50001, 1.5, 1.0)]
    x = torch.cat([x, torch.tensor([*edges, fmt.max * 2.0**-k, 0.0, math.inf, math.nan])]).to(source)
    flushed, overflow, snr = really_cast(x, fmt, k)
    w = hg.what_if(x, fmt, k)
    assert w.flushed == pytest.approx(flushed, abs=1e-12)
    assert w.overflow == pytest.approx(overflow, abs=1e-12)
    assert w.snr_db == pytest.approx(snr, rel=1e-9)


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.nan], [math.inf], []])
def test_what_if_of_nothing_useful(values):
    x = torch.tensor(values, dtype=torch.float16)
    w = hg.what_if(x, "fp16")
    assert (w.flushed, w.overflow) == (0, 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_any_fp32_values(values):
    t = torch.tensor(values, dtype=torch.float32)
    h = hg.count(t).read()
    assert (h.exponents, h.zeros, h.infs, h.nans) == count_in_float64(t, FORMATS["fp32"])
    first, middle = h.trimmed()
    assert sum(middle) == sum(h.exponents)
    if middle:
        assert first == h.min_exponent
        assert first + len(middle) - 1 == h.max_exponent
