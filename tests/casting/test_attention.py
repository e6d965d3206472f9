"""Attention on a CPU with torch's forward and a backward rounded around fp32."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import halfstep as hs
from halfstep.casting import regions
from halfstep.casting.kernel_choice import KernelTable, Row
from halfstep.casting.kinds import attention
from halfstep.casting.kinds.kind import Choice

KERNELS = KernelTable([Row(Choice(input="rounded"), op="attention")])


def region() -> hs.autocast:
    return hs.autocast("cpu", "bf16", kernels=KERNELS)


def inputs(length: int = 24, width: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 2, length, width, generator=generator).to(dtype).requires_grad_() for _ in range(3)
    ]


def gradients(tensors: list[Tensor], where: object, **options: object) -> tuple[Tensor, list[Tensor]]:
    with where:  # type: ignore[attr-defined]
        out = F.scaled_dot_product_attention(*tensors, **options)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=generator)
    return out, list(torch.autograd.grad((out.to(weights.dtype) * weights).sum(), tensors))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_forward_is_torchs_and_gradients_are_nearer(options):
    low = inputs()
    exact = [t.detach().double().requires_grad_() for t in low]
    _, wanted = gradients(exact, hs.autocast("cpu", enabled=False), **options)
    out, ours = gradients(low, region(), **options)
    regions.release()
    reference, torchs = gradients(low, torch.autocast("cpu", torch.bfloat16), **options)
    assert torch.equal(out, reference)
    for mine, theirs, right in zip(ours, torchs, wanted):
        assert mine.dtype == torch.bfloat16
        assert not torch.equal(mine, theirs), "the backward in fp32 did not run"
        assert (mine - right).norm() <= (theirs - right).norm()
        assert (mine - right).norm() <= 4e-3 * right.norm()


def node_of(*tensors: Tensor, **options: object) -> str:
    with region():
        return type(F.scaled_dot_product_attention(*tensors, **options).grad_fn).__name__


def test_what_does_not_fit_stays_with_torch():
    q, k, v = inputs()
    assert node_of(q, k, v) == "AttentionBackward"
    assert node_of(*(t.detach().float().requires_grad_() for t in (q, k, v))) == "AttentionBackward"
    mask = torch.zeros(24, 24)
    assert node_of(q, k, v, attn_mask=mask) == "AttentionBackward"
    others = [
        node_of(q, k, v, attn_mask=mask.requires_grad_()),
        node_of(q, k, v, dropout_p=0.5),
        node_of(q[0], k[0], v[0]),
        node_of(*(t.double() for t in (q, k, v))),
    ]
    assert "AttentionBackward" not in others
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert node_of(q, k, v) != "AttentionBackward"


def test_nothing_is_kept_without_gradients(monkeypatch):
    monkeypatch.setattr(attention, "Attention", None)  # calling it would fail
    with region(), torch.no_grad():
        assert F.scaled_dot_product_attention(*inputs()).grad_fn is None


def test_it_saves_16_bits_and_only_what_torch_saves():
    saved: list[Tensor] = []
    low = inputs()
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with keep, region():
        F.scaled_dot_product_attention(*low)
    sums = 3 * 2 * 24
    assert sorted(t.numel() * t.element_size() for t in saved) == [sums * 4, *[sums * 16 * 2] * 4]


def test_gradients_of_some_inputs_only():
    q, k, v = inputs()
    _, all_of_them = gradients([q, k, v], region())
    frozen = [q, k.detach(), v.detach()]
    with region():
        out = F.scaled_dot_product_attention(*frozen)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (mine,) = torch.autograd.grad((out.to(weights.dtype) * weights).sum(), [q])
    assert torch.equal(mine, all_of_them[0])
