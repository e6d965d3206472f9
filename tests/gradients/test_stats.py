"""The read-only gradient pass: finite flag, 2-norm, largest magnitude."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import halfstep as hs
from halfstep.gradients.stats import combine, measure, measure_whole

LOW = [torch.float16, torch.bfloat16]


def test_fp32_norm_is_torchs_bit_for_bit():
    grads = [torch.randn(n, 7) for n in (1, 40, 300)]
    assert torch.equal(measure(grads).norm, get_total_norm(grads))


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64, torch.complex64])
def test_against_float64(dtype):
    grads = [torch.randn(50, dtype=torch.float64).to(dtype), torch.randn(3, 4).to(dtype)]
    exact = torch.cat(
        [torch.view_as_real(g).flatten() if g.is_complex() else g.flatten() for g in grads]
    ).double()
    stats = measure(grads, 0.5)
    assert stats.finite
    torch.testing.assert_close(stats.norm.double(), exact.norm() / 2, rtol=1e-6, atol=0)
    assert stats.amax == exact.abs().max() / 2
    assert stats.norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_value_among_many(dtype, bad):
    grads = [torch.ones(5), torch.ones(77).to(dtype)]
    grads[1][40] = bad
    assert not measure(grads).finite
    assert not math.isfinite(measure(grads).amax)


def test_the_norm_of_large_finite_gradients_does_not_overflow():
    stats = measure([torch.full((4,), 1e30)])
    assert stats.finite
    torch.testing.assert_close(stats.norm, torch.tensor(2e30))


def test_fp16_squares_do_not_overflow():
    assert measure([torch.full((4,), 60000.0).half()]).norm == 120000.0


def test_sparse_duplicates_count_summed_and_nothing_is_written():
    with torch.sparse.check_sparse_tensor_invariants(True):
        grad = torch.sparse_coo_tensor([[1, 1]], [3.0, 1.0], (3,))
        stats = measure([grad, None, torch.empty(0), torch.tensor([3.0])])
    assert (stats.norm.item(), stats.amax.item()) == (5.0, 4.0)
    assert not grad.is_coalesced()


@pytest.mark.parametrize("grads", [[], [None], [torch.empty(0)]])
def test_nothing_is_finite_and_zero(grads):
    stats = measure(grads)
    assert (stats.finite.item(), stats.norm.item(), stats.amax.item()) == (True, 0.0, 0.0)


def test_tensor_inverse_scale():
    assert measure([torch.tensor([3.0, 4.0])], torch.tensor(0.5)).norm == 2.5


def test_combined_parts_equal_the_whole():
    grads = [torch.randn(9), torch.randn(4).half()]
    parts, whole = combine([measure([g]) for g in grads]), measure(grads)
    torch.testing.assert_close(parts.norm, whole.norm)
    assert (parts.amax, parts.finite) == (whole.amax, whole.finite)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan, 1e30])
def test_a_look_without_the_largest_magnitude_agrees_with_measure(bad):
    grads = [torch.randn(9), torch.randn(4).half(), torch.randn(9000)]
    if bad is not None:
        grads[2][5] = bad
    whole = measure(grads, 0.5)
    finite, norm, _ = measure_whole(grads, 0.5, needs_amax=False)
    assert finite == whole.finite
    torch.testing.assert_close(norm, whole.norm, equal_nan=True, rtol=0, atol=0)


def test_the_largest_magnitude_is_of_16_bit_and_of_fp32_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16", loss_scale="headroom")
    with amp.autocast():
        loss = model(torch.randn(8, 32)).float().pow(2).mean() * 1e-3
    amp.backward(loss)
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    model[1].bias.grad.mul_(1e3)
    expected = max(float(p.grad.abs().max()) for p in model.parameters()) / amp.loss_scale.read()
    assert float(amp.step().amax) == pytest.approx(expected, rel=1e-6)
