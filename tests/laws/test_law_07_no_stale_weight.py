"""Law 7, no stale weight: a weight changed in place inside a region is seen by the next op."""

import pytest
import torch
from torch import nn

from halfstep.casting import autocast

CHANGES = {
    "in place": lambda w: w.mul_(2),
    "data": lambda w: w.data.mul_(2),
    "set_data": lambda w: setattr(w, "data", w.data * 2),
    "numpy": lambda w: w.detach().numpy().__imul__(2),
    "foreach": lambda w: torch._foreach_mul_([w.data], 2.0),
}


@pytest.mark.parametrize("policy", [None, "torch", "paper"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_seen(change: str, dtype: torch.dtype, policy: str | None) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with autocast("cpu", dtype, policy=policy):
        before = layer(x)
        with torch.no_grad():
            CHANGES[change](layer.weight)
        after = layer(x)
    assert torch.equal(after, before * 2)


def test_a_fused_optimizer_step_inside_a_region_is_seen() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1.0, fused=True)
    with autocast("cpu", torch.bfloat16):
        before = layer(x)
        before.sum().backward()
        optimizer.step()
        after = layer(x)
    assert not torch.equal(after, before)


def test_torch_autocast_nested_in_our_region_caches_nothing() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        layer.weight.data.mul_(2)
        assert torch.equal(layer(x), before * 2)
