"""Compressed states and random rounding: nothing dies, nothing stalls, nobody's generator is touched."""

import pytest
import torch
from torch import nn

from halfstep.kernels.codes import BLOCK
from halfstep.optim import SGD, AdamW, Lion, rounding

BF16 = torch.bfloat16
MODES = [(m, s) for m in ("exact", "fp32", "stochastic") for s in ("fp32", "bf16", "8bit")]


def uniform(count: int, key: int) -> torch.Tensor:
    return rounding.random_bits(count, key, torch.device("cpu"))


@pytest.mark.parametrize("width", [None, 2 * BLOCK, 33])
@pytest.mark.parametrize("first", [0, -640, 128, -7])
def test_random_bits_are_the_same_with_a_word_for_each_panel(first: int, width: int | None):
    by_panel, by_element = (
        rounding.random_bits(1000, key, torch.device("cpu"), first, width)
        for key in (12345, torch.tensor(12345))
    )
    assert torch.equal(by_panel, by_element)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_within_a_step_and_unbiased(signed: bool):
    g = torch.Generator().manual_seed(0)
    values = torch.randn(5000, generator=g) * 10 ** (-3 * torch.rand(5000, generator=g))
    values = values if signed else values**2
    exponents = rounding.exponents_for(rounding.peaks(values, len(values)))
    total = torch.zeros_like(values, dtype=torch.float64)
    for key in range(400):
        codes = rounding.encode(values, exponents, uniform(5000, key * 77777), signed, 5000)
        back = rounding.decode(codes, exponents, signed, 5000)
        # 3 bits after the leading one, and even spacing of 2^-17 of the block's largest below.
        assert bool(
            (
                (back - values).abs()
                <= values.abs() / 8 + rounding.peaks(values, len(values)).max() * 2.0**-15
            ).all()
        )
        total += back
    error = (total / 400 - values).abs() / (
        values.abs() + rounding.peaks(values, len(values)).max() * 2.0**-17
    )
    assert error.mean() < 0.003


def test_no_second_moment_becomes_zero_and_zero_first_moments_stay():
    values = torch.tensor([1e20, 1e-20, 1e-38, 0.0, 1.0])
    exponents = rounding.exponents_for(rounding.peaks(values, len(values)))
    for key in range(50):
        random = uniform(5, key)
        second, first = (rounding.encode(values, exponents, random, signed, 5) for signed in (False, True))
        assert bool((rounding.decode(second, exponents, False, 5) > 0).all())
        assert rounding.decode(first, exponents, True, 5)[3] == 0


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_second_moments_do_not_stall(state_dtype: str):
    p = nn.Parameter(torch.ones(2, 2 * BLOCK, dtype=BF16))
    optimizer = AdamW([p], lr=0.0, state_dtype=state_dtype, backend="reference")
    for step in range(700):
        p.grad = torch.ones_like(p) if step < 10 else torch.zeros_like(p)
        optimizer.step()
    entry = optimizer.state[p]
    if state_dtype == "bf16":
        second = entry["exp_avg_sq"].float()
    else:
        codes, exponents = entry["exp_avg_sq_codes"].view(-1), entry["exp_avg_sq_exponents"]
        second = rounding.decode(codes, exponents, signed=False, width=2 * BLOCK)
    expected = (1 - 0.999**10) * 0.999**690
    assert second.mean().item() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("hashed", [True, False])
def test_second_moments_are_unbiased_by_a_word_that_is_hashed(monkeypatch: pytest.MonkeyPatch, hashed: bool):
    """Words in step with the counter would round a moment the same way for as long as it takes to fall."""
    if not hashed:
        monkeypatch.setattr(rounding, "scramble", lambda x: x)
    first = 1 + torch.rand(4096, generator=torch.Generator().manual_seed(1))
    moments, exponents = first.clone(), torch.full((1, 8), 129, dtype=torch.int32)
    for step in range(700):
        random = uniform(4096, step) >> 16
        codes = rounding.encode(moments * 0.999, exponents, random, False, 4096)
        moments = rounding.decode(codes, exponents, False, 4096)
    left = (moments / first).mean().item() / 0.999**700
    assert left == pytest.approx(1, abs=0.02) if hashed else left > 1.5


@pytest.mark.parametrize(("master", "state_dtype"), MODES)
def test_a_weight_of_one_moves_at_small_learning_rates(master: str, state_dtype: str):
    steps, lr = 1500, 2.0**-20  # exact below 1 in fp32
    p = nn.Parameter(torch.ones(64, 1024, dtype=BF16))
    optimizer = AdamW([p], lr=lr, weight_decay=0.0, master=master, state_dtype=state_dtype)
    p.grad = torch.ones_like(p)
    for _ in range(steps):
        optimizer.step()
    moved = (1 - optimizer.master_of(p).double()).mean().item()
    assert moved == pytest.approx(steps * lr, rel=0.02)


def test_without_masters_it_does_not_move():
    p = nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = AdamW([p], lr=1e-6, master=None, backend="reference")
    p.grad = torch.ones_like(p)
    for _ in range(20):
        optimizer.step()
    assert p.tolist() == [1.0] * 64


@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_random_rounding_is_keyed_and_touches_no_generator(cls: type):
    def run(seed: int, order: int) -> list[torch.Tensor]:
        params = [nn.Parameter(torch.linspace(-1, 1, 700).bfloat16()) for _ in range(2)]
        optimizer = cls(
            params, lr=1e-3, master="stochastic", state_dtype="8bit", seed=seed, backend="reference"
        )
        for _ in range(3):
            for p in params[::order]:
                p.grad = torch.full_like(p, 0.37)
            optimizer.step()
        return [p.detach() for p in params]

    state = torch.get_rng_state()
    first, again, other = run(0, 1), run(0, -1), run(1, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])
