"""Widening gradients for masters: torch's bits, measured in the same pass, read by nobody again."""

import copy
import math

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.gradients import cpu as _cpu
from halfstep.gradients.cpu import LEAST
from halfstep.gradients.widen import widen
from halfstep.session import steppers

LOW = [torch.bfloat16, torch.float16]


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 2^16 values of a 16-bit dtype, often enough for the kernel to be used."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).repeat(LEAST // 2**16 + 1)


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu, "kernels_if_any", lambda: None)


@pytest.mark.parametrize("dtype", LOW)
def test_every_bit_pattern_widens_as_torch_does(dtype: torch.dtype) -> None:
    low = every_pattern(dtype)
    (wide,), measured = widen([low])
    assert measured is None  # inf and NaN are for the careful look
    torch.testing.assert_close(wide, low.float(), rtol=0, atol=0, equal_nan=True)
    finite = low[low.isfinite()]
    (wide,), _ = widen([finite])
    assert torch.equal(wide.view(torch.int32), finite.float().view(torch.int32))  # -0 and subnormals too


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", LOW)
def test_what_the_pass_measures(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(300, 1001).to(dtype), torch.randn(7).to(dtype), torch.randn(70_000).bfloat16()]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide, measured = widen(grads)
    finally:
        torch.set_num_threads(before)
    assert measured is not None
    exact = math.sqrt(sum(float(g.double().pow(2).sum()) for g in grads))
    assert measured.norm == pytest.approx(exact, rel=1e-6)
    assert measured.amax == max(float(g.abs().max()) for g in grads)
    assert all(torch.equal(w, g.float()) for w, g in zip(wide, grads))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30, 1e-20])
def test_a_sum_of_squares_that_cannot_be_trusted_is_not_given(value: float) -> None:
    low = torch.zeros(LEAST, dtype=torch.bfloat16)
    low[LEAST // 2] = value
    (wide,), measured = widen([low])
    assert measured is None
    torch.testing.assert_close(wide, low.float(), rtol=0, atol=0, equal_nan=True)


def test_gradients_that_are_all_zero_have_norm_zero() -> None:
    _, measured = widen([torch.zeros(LEAST, dtype=torch.bfloat16)])
    assert measured is not None
    assert (measured.norm, measured.amax) == (0.0, 0.0)


@pytest.mark.parametrize(
    "low",
    [torch.randn(LEAST // 2).bfloat16(), torch.randn(512, 1024).bfloat16().t()],
    ids=["few elements", "transposed"],
)
def test_what_the_kernel_does_not_take_torch_copies(low: torch.Tensor) -> None:
    (wide,), measured = widen([low])
    assert measured is None
    assert torch.equal(wide, low.float())
    assert wide.stride() == low.stride()


@pytest.mark.usefixtures("no_kernel")
def test_without_numba_torch_copies() -> None:
    low = torch.randn(LEAST).bfloat16()
    (wide,), measured = widen([low])
    assert measured is None
    assert torch.equal(wide, low.float())


class WithNorm(nn.Module):
    """A weight large enough for the kernel, and normalisation weights that stay fp32 at O2."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.out = nn.Linear(512, 768), nn.LayerNorm(768), nn.Linear(768, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.wide(x)))


def trained(model: nn.Module, dtype: str, bad: int | None = None) -> tuple[nn.Module, list[hs.Outcome]]:
    """Four clipped steps at O2 with masters behind torch's AdamW; step `bad` gets an inf."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp = hs.prepare(model, optimizer, level="O2", dtype=dtype, loss_scale=1024.0)
    torch.manual_seed(1)
    outcomes = []
    for step in range(4):
        x, y = torch.randn(8, 512), torch.randint(0, 3, (8,))
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        amp.backward(loss * math.inf if step == bad else loss)
        outcomes.append(amp.step(clip_norm=0.5))
    amp.revert()
    return model, outcomes


@pytest.mark.parametrize("bad", [None, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_training_has_the_same_bits_and_outcomes_without_the_kernel(
    dtype: str, bad: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = WithNorm()
    fused, told = trained(model, dtype, bad)
    monkeypatch.setattr(_cpu, "kernels_if_any", lambda: None)
    plain, expected = trained(model, dtype, bad)
    for (name, p), q in zip(fused.named_parameters(), plain.parameters()):
        assert torch.equal(p, q), name
    assert [o.taken for o in told] == [o.taken for o in expected] == [i != bad for i in range(4)]
    for ours, theirs in zip(told, expected):
        if ours.taken:
            assert float(ours.grad_norm) == pytest.approx(float(theirs.grad_norm), rel=1e-5)


def test_nobody_reads_again_what_was_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    look = steppers.finite_and_norm
    monkeypatch.setattr(
        steppers,
        "finite_and_norm",
        lambda gradients, scale: read.append(sum(g.numel() for g in gradients)) or look(gradients, scale),
    )
    trained(WithNorm(), "bf16")
    assert read == [2 * 768] * 4  # the fp32 weights of the LayerNorm only


def test_the_largest_magnitude_counts_gradients_of_fp32_weights_too() -> None:
    torch.manual_seed(0)
    model = WithNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16", loss_scale="headroom")
    with amp.autocast():
        loss = model(torch.randn(8, 512)).float().pow(2).mean() * 1e-3
    amp.backward(loss)
    gradients = [p.grad for p in model.parameters()]
    expected = max(float(g.abs().max()) for g in gradients if g is not None) / amp.loss_scale.read()
    model.norm.bias.grad.mul_(1e3)
    expected = max(expected, float(model.norm.bias.grad.abs().max()) / amp.loss_scale.read())
    outcome = amp.step()
    assert float(outcome.amax) == pytest.approx(expected, rel=1e-6)
