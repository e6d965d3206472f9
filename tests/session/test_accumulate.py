"""`prepare(accumulate="fp32")`: micro-batches add up in fp32 where a torch optimizer's weights are 16-bit."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.session.ranks import refuse_in_ddp

#: A gradient of each format beside which 1 is lost.
LARGE = {"bf16": 256.0, "fp16": 2048.0}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
    "foreach": lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def one_weight(make, **options):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make(model.parameters())
    return model, optimizer, hs.prepare(model, optimizer, level="O2", **options)


@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize(("accumulate", "kept"), [("fp32", 3.0), (None, 0.0)])
def test_small_micro_batches_are_kept_beside_a_large_one(dtype, scale, accumulate, kept):
    model, _, amp = one_weight(OPTIMIZERS["sgd"], dtype=dtype, loss_scale=scale, accumulate=accumulate)
    for gradient in (LARGE[dtype], 1.0, 1.0, 1.0):
        amp.backward(gradient * model.weight.sum())
    assert amp.step().grad_norm == LARGE[dtype] + kept  # 256 + 1 + 1 + 1 is 259
    with amp.evaluating():
        assert model.weight.item() == -(LARGE[dtype] + kept)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_are_those_of_fp32_sums_of_the_16_bit_gradients(kind):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    batches = torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    model = build()
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters()), level="O2", dtype="bf16", accumulate="fp32")
    low, masters = build().bfloat16(), [nn.Parameter(p.detach().clone()) for p in build().parameters()]
    plain = OPTIMIZERS[kind](masters)
    for step in batches:
        total = [torch.zeros_like(m) for m in masters]
        for x in step:
            amp.backward(model(x).square().mean())
            gradients = torch.autograd.grad(low(x.bfloat16()).float().square().mean(), list(low.parameters()))
            total = [t + g.float() for t, g in zip(total, gradients)]
        amp.step()
        for master, gradient in zip(masters, total):
            master.grad = gradient
        plain.step()
        with torch.no_grad():
            for p, master in zip(low.parameters(), masters):
                p.copy_(master)
    with amp.evaluating():
        for p, master in zip(model.parameters(), masters):
            assert torch.equal(p, master)


def test_weights_make_16_bit_gradients_again_after_revert():
    model, optimizer, amp = one_weight(OPTIMIZERS["sgd"], dtype="bf16", accumulate="fp32")
    amp.revert()
    model.bfloat16()
    optimizer.zero_grad()
    model.weight.sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16


def test_a_level_of_fp32_weights_adds_up_in_fp32_already():
    model = nn.Linear(1, 1, bias=False)
    amp = hs.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), level="O1", dtype="bf16", accumulate="fp32"
    )
    for gradient in (256.0, 1.0, 1.0, 1.0):
        amp.backward(gradient * model.weight.sum())
    assert amp.step().grad_norm == 259.0


def test_what_cannot_add_up_in_fp32_is_refused_by_name():
    model = nn.Linear(1, 1)
    torchs, ours = torch.optim.SGD(model.parameters(), lr=1.0), hs.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="accumulate='fp64': choose 'fp32' or None"):
        hs.prepare(model, torchs, level="O2", dtype="bf16", accumulate="fp64")
    with pytest.raises(ConfigError, match="accumulate='fp32' at O3"):
        hs.prepare(model, torchs, level="O3", dtype="bf16", accumulate="fp32")
    with pytest.raises(ConfigError, match="an argument of SGD itself"):
        hs.prepare(model, ours, level="O2", dtype="bf16", accumulate="fp32")
    assert model.weight.dtype == torch.float32


def test_ddp_refuses_it():
    _, optimizer, _ = one_weight(OPTIMIZERS["sgd"], dtype="bf16", accumulate="fp32")
    with pytest.raises(UnsupportedError, match="DistributedDataParallel's buffers"):
        refuse_in_ddp(optimizer)
    _, optimizer, _ = one_weight(OPTIMIZERS["sgd"], dtype="bf16")
    refuse_in_ddp(optimizer)
