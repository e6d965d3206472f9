"""Law 1: a 16-bit weight and the bits it lacks are the fp32 value, and train as fp32 masters do."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.optim import SGD, AdamW, Lion, MasterWeights
from halfstep.optim.split import join, round_away, split

BF16, FP16 = torch.bfloat16, torch.float16
SPECIAL = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x007FFFFF, 0x00800000,
    0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0xBF808000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,
    0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800001,
]  # fmt: skip


def floats(patterns: Any) -> Tensor:
    """The fp32 values of 32-bit patterns."""
    return torch.from_numpy(np.asarray(patterns, dtype=np.int64).astype(np.uint32).view(np.float32).copy())


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int16 if t.element_size() == 2 else torch.int32)


def halves(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` split into new tensors, by the one way in."""
    half, lacking = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=torch.int16)
    assert (split(x, half, lacking) is None) == (dtype == BF16)
    return half, lacking


def defined(x: Tensor) -> tuple[Any, Any]:
    """What the bf16 half and the bits that it lacks are, in numpy."""
    pattern = x.numpy().view(np.int32)
    nan = (pattern & 0x7FFFFFFF) > 0x7F800000
    up = np.where(nan, (pattern >> 16) | 0x7FC0, (pattern + 0x8000) >> 16)
    return up.astype(np.int16), np.where(nan, 0, pattern - (up << 16)).astype(np.int16)


def defined_join(half: Any, lacking: Any) -> Any:
    high = half.astype(np.int32) << 16
    both = high + lacking
    return np.where((both ^ high) < 0, high, both)


def check_bf16(x: Tensor) -> None:
    half, lacking = halves(x, BF16)
    joined = join(half, lacking)
    for found, expected in zip((bits(half), lacking), defined(x)):
        assert np.array_equal(found.numpy(), expected)
    assert torch.equal(bits(half), bits(round_away(x)))
    assert np.array_equal(bits(joined).numpy(), defined_join(bits(half).numpy(), lacking.numpy()))
    nan = x.isnan()
    assert torch.equal(half.isnan(), nan)
    assert torch.equal(joined.isnan(), nan)
    assert torch.equal(bits(joined)[~nan], bits(x)[~nan])
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    same = bits(half) == bits(x.to(BF16))
    assert bool((same | tie | nan).all())
    up = (x.view(torch.int32) >> 16) + 1  # away from zero: the next larger magnitude
    assert torch.equal(bits(half)[tie & ~nan].int() & 0xFFFF, up[tie & ~nan] & 0xFFFF)


def check_fp16(x: Tensor) -> None:
    """`x` below 65520 in magnitude: exact from 2^-16 up, a bounded error below."""
    half, lacking = halves(x, FP16)
    assert torch.equal(bits(half), bits(x.to(FP16)))
    joined = join(half, lacking)
    exact = (x.abs() >= 2.0**-16) | (x == 0)
    assert torch.equal(bits(joined)[exact], bits(x)[exact])
    error = (joined.double() - x.double()).abs()
    # 65,537 steps of 2^-40 round to an even half: its upper tie cannot be told from the step below.
    upper = (x.abs().double() - half.abs().double()) * 2.0**40 > 32767.5
    assert bool((error <= torch.where(upper & (half != 0), 2.0**-40, 2.0**-41)).all())
    assert torch.equal(joined == 0, (x.abs() <= 2.0**-41) | (x == 0))


def test_special_values_survive():
    check_bf16(floats(SPECIAL))


def test_every_exponent_with_every_lower_half_near_the_edges():
    low = np.r_[0:0x20, 0x7FE0:0x8020, 0xFFE0:0x10000]
    high = np.r_[0:0x10000]
    check_bf16(floats((high[:, None] * 65536 + low[None, :]).ravel()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(16))
def test_all_patterns_bf16(part: int):
    chunk = 1 << 24
    for start in range(part << 28, (part + 1) << 28, chunk):
        check_bf16(floats(np.arange(start, start + chunk)))


@pytest.mark.exhaustive
def test_all_patterns_bf16_in_the_compiled_kernels():
    types = pytest.importorskip("numba").types
    k = pytest.importorskip("halfstep.kernels.cpu.bits")
    away, lacking = k.emitted(types.int16)(k.bf16_away), k.emitted(types.int16)(k.lacking_bf16)
    rejoin, as_float = k.emitted(types.float32)(k.join_bf16), k.emitted(types.float32)(k.float_of)
    bits_of, i32 = k.emitted(types.int32)(k.bits_of), np.int32
    magnitude, inf = i32(k.MASK), i32(k.INF_BITS)

    @k.compiled("int64(int64,int64)", "mismatches")
    def mismatches(first: int, last: int) -> int:
        found = 0
        for pattern in range(first, last):
            bits = i32(pattern)
            x = as_float(bits)
            half = away(x)
            joined = bits_of(rejoin(half, lacking(x, half)))
            if i32(bits & magnitude) > inf:
                lost = i32(i32(half) & i32(0x7FFF)) <= i32(0x7F80)
                found += lost | (i32(joined & magnitude) <= inf)
            else:
                found += joined != bits
        return found

    assert mismatches(0, 1 << 32) == 0


@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_fp16_samples_of_every_exponent(sign: int):
    top = 0x477FF000  # 65520: from here on fp16 is inf
    check_fp16(floats(np.arange(0, top, 1013) | sign))
    ties = (np.arange(0, 0x200)[:, None] + np.array([0.5, 0.25, 0.49999, 0.50001])[None, :]).ravel()
    check_fp16(torch.from_numpy((ties * 2.0**-24).astype(np.float32)) * (-1 if sign else 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_all_patterns_fp16(sign: int):
    top, chunk = 0x477FF000, 1 << 24
    for start in range(0, top, chunk):
        check_fp16(floats(np.arange(start, min(top, start + chunk)) | sign))


def test_fp16_says_what_it_cannot_hold():
    for values, over in (([1.0, 65520.0], True), ([1.0, 65519.0], False)):
        half, lacking = torch.empty(2, dtype=FP16), torch.empty(2, dtype=torch.int16)
        flag = split(torch.tensor(values), half, lacking)
        assert flag is not None
        assert bool(flag) == over
        assert join(half, lacking).tolist() == [1.0, min(values[1], 65504.0) if over else 65519.0]
    half, lacking = halves(torch.tensor([float("inf"), float("-inf"), float("nan"), 65519.0]), FP16)
    assert join(half, lacking).tolist()[:2] == [float("inf"), float("-inf")]
    assert join(half, lacking)[2].isnan()
    assert join(half, lacking)[3] == 65519.0


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_layouts_and_sizes_split_alike(dtype: torch.dtype):
    """In one part or several, in the memory order of a convolution or a slice, and with nothing in it."""
    torch.manual_seed(0)
    x = torch.randn(1 << 18) * torch.logspace(-12, 4, 1 << 18)
    one_by_one = [join(*halves(part.clone(), dtype)) for part in x.split(1000)]
    assert torch.equal(bits(join(*halves(x, dtype))), bits(torch.cat(one_by_one)))
    box = x.view(64, 64, 8, 8)
    for one in (box.to(memory_format=torch.channels_last), box[:, ::2], x[:0], x[5].clone()):
        half, lacking = halves(one, dtype)
        assert torch.equal(join(half, lacking), join(*halves(one.contiguous(), dtype)))
        straight = join(half, lacking.contiguous(), torch.empty(one.shape))
        assert torch.equal(straight, join(half, lacking))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=8), st.integers(-(1 << 15), (1 << 15) - 1))
def test_any_bits_split_as_defined_and_any_bits_join(patterns: list[int], left: int):
    x = floats(patterns)
    check_bf16(x)
    half, _ = halves(x, BF16)
    lacking = torch.full_like(half, left, dtype=torch.int16)
    assert np.array_equal(
        bits(join(half, lacking)).numpy(), defined_join(bits(half).numpy(), lacking.numpy())
    )


def test_bits_left_from_another_weight_do_no_harm():
    half = torch.tensor([0.0, -0.0, 0.0], dtype=BF16)
    joined = join(half, torch.tensor([-5, -5, -32768], dtype=torch.int16))
    assert torch.equal(bits(joined), bits(half.float()))


# ---- training -------------------------------------------------------------------------------------------

ALGORITHMS = {
    "AdamW": (AdamW, {"lr": 3e-3}),
    "SGD": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}),
    "Lion": (Lion, {"lr": 3e-4, "weight_decay": 0.1}),
}


def train(algorithm: str, master: str, steps: int) -> tuple[list[float], nn.Module, Any]:
    """A small classifier in bf16, clipped; masters seeded from the fp32 initial weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 5))
    x, y = torch.randn(64, 24), torch.randint(0, 5, (64,))
    originals = {p: p.detach().clone() for p in model.parameters()}
    cls, options = ALGORITHMS[algorithm]
    optimizer = cls(model.parameters(), master=master, **options)
    model.bfloat16()
    optimizer.seed_masters(originals)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        stats = optimizer.measure()
        optimizer.step(clip_coef=torch.clamp(1.0 / (stats.norm + 1e-6), max=1.0))
        losses.append(loss.item())
    return losses, model, optimizer


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_equals_fp32_masters_bit_for_bit(algorithm: str):
    losses, model, optimizer = train(algorithm, "exact", 300)
    other_losses, other, other_optimizer = train(algorithm, "fp32", 300)
    assert losses == other_losses
    assert losses[-1] < losses[0]
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(bits(p), bits(q))
        assert torch.equal(optimizer.master_of(p), other_optimizer.master_of(q))
        assert torch.equal(bits(p), bits(round_away(other_optimizer.state[q]["master"])))


def test_masters_around_a_torch_optimizer_use_torch_s_cast():
    p = nn.Parameter(floats([0x3F808000]).to(BF16))
    inner = torch.optim.SGD([p], lr=1.0)
    MasterWeights(inner)
    p.grad = torch.full_like(p, 0.00390625)  # from 1.0 to the tie below it
    inner.step()
    master = inner.param_groups[0]["params"][0]
    assert torch.equal(p.detach(), master.detach().to(BF16))
