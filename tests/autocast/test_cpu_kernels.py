"""Attention of short sequences on a CPU: torch's forward, and a backward in fp32 where bf16's is slower."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import halfstep as hs
from halfstep.autocast import cpu_kernels, regions

pytestmark = pytest.mark.skipif(
    hs.devices.is_slow("cpu", "bf16") or torch.cpu._is_amx_tile_supported(),
    reason="torch's own kernels, or plain emulation, serve this CPU",
)


def inputs(length: int = 24, width: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 2, length, width, generator=generator).to(dtype).requires_grad_() for _ in range(3)
    ]


def gradients(tensors: list[Tensor], region: object, **options: object) -> tuple[Tensor, list[Tensor]]:
    with region:  # type: ignore[attr-defined]
        out = F.scaled_dot_product_attention(*tensors, **options)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=generator)
    return out, list(torch.autograd.grad((out.to(weights.dtype) * weights).sum(), tensors))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_forward_is_torchs_and_gradients_are_nearer(options):
    low = inputs()
    exact = [t.detach().double().requires_grad_() for t in low]
    _, wanted = gradients(exact, hs.autocast("cpu", enabled=False), **options)
    out, ours = gradients(low, hs.autocast("cpu", "bf16"), **options)
    regions.release()
    reference, torchs = gradients(low, torch.autocast("cpu", torch.bfloat16), **options)
    assert torch.equal(out, reference)
    for mine, theirs, right in zip(ours, torchs, wanted):
        assert mine.dtype == torch.bfloat16
        assert not torch.equal(mine, theirs), "the backward in fp32 did not run"
        assert (mine - right).norm() <= (theirs - right).norm()
        assert (mine - right).norm() <= 4e-3 * right.norm()


def node_of(*tensors: Tensor, **options: object) -> str:
    with hs.autocast("cpu", "bf16"):
        return F.scaled_dot_product_attention(*tensors, **options).grad_fn.name()


def test_what_does_not_fit_stays_with_torch():
    q, k, v = inputs()
    assert node_of(q, k, v) == "_AttentionBackward"
    assert node_of(*(t.detach().float().requires_grad_() for t in (q, k, v))) == "_AttentionBackward"
    mask = torch.zeros(24, 24)
    others = [
        node_of(q, k, v, attn_mask=mask),
        node_of(q, k, v, dropout_p=0.5),
        node_of(*inputs(1024, 32)),
        node_of(*inputs(256, 64)),
        node_of(q[0], k[0], v[0]),
        node_of(*(t.double() for t in (q, k, v))),
    ]
    assert "_AttentionBackward" not in others
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert node_of(q, k, v) != "_AttentionBackward"


def test_nothing_is_kept_without_gradients(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "attention", None)  # calling it would fail
    with hs.autocast("cpu", "bf16"), torch.no_grad():
        assert F.scaled_dot_product_attention(*inputs()).grad_fn is None


def test_it_saves_16_bits_and_only_what_torch_saves():
    saved: list[Tensor] = []
    low = inputs()
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with keep, hs.autocast("cpu", "bf16"):
        F.scaled_dot_product_attention(*low)
    sums = 3 * 2 * 24
    assert sorted(t.numel() * t.element_size() for t in saved) == [sums * 4, *[sums * 16 * 2] * 4]


def test_gradients_of_some_inputs_only():
    q, k, v = inputs()
    _, all_of_them = gradients([q, k, v], hs.autocast("cpu", "bf16"))
    frozen = [q, k.detach(), v.detach()]
    with hs.autocast("cpu", "bf16"):
        out = F.scaled_dot_product_attention(*frozen)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (mine,) = torch.autograd.grad((out.to(weights.dtype) * weights).sum(), [q])
    assert torch.equal(mine, all_of_them[0])
