"""fully_shard with a MixedPrecisionPolicy of the user's, and shards that are 16-bit already (gloo ranks)."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import halfstep as hs
from halfstep.errors import ConfigError, UnsupportedError
from tests.ranks import run


def net():
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 4))


def sharded(ours, param_dtype):
    model, policy = net(), MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    if ours:
        return hs.distributed.shard(model, mp_policy=policy)
    fully_shard(model[1], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def trained(ours, level, kind, dtype, param_dtype):
    """Losses and whole weights after three steps, and in which dtypes layers saw their weights."""
    model = sharded(ours, param_dtype)
    optimizer = kind(model.parameters(), lr=0.01)
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, kernels="native")
    losses, seen = [], {}
    for name in ("1.0", "1.1"):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(
            lambda module, _, name=name: seen.update({name: module.weight.dtype})
        )
    for step in range(3):
        with amp.autocast():
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = model(x).float().square().mean()
        amp.backward(loss)
        assert amp.step(clip_norm=1.0).taken
        losses.append(loss.item())
    return losses, [p.full_tensor() for p in model.parameters()], seen


def policies(rank):
    bf16, wide, kinds = torch.bfloat16, torch.float32, (torch.optim.AdamW, hs.optim.AdamW)
    found = []
    for level in ("O1", "O2"):
        for kind in kinds:
            without = trained(True, level, kind, "bf16", None)
            within = trained(True, level, kind, "bf16", bf16)
            assert within[2] == {"1.0": wide, "1.1": bf16}, (level, kind)  # normalisations as the level says
            assert within[0] == without[0], (level, kind)
            assert all(map(torch.equal, within[1], without[1])), (level, kind)
    for level, kind in (("O1", kinds[0]), ("O1", kinds[1]), ("O2", kinds[0])):
        losses, _, seen = trained(False, level, kind, "bf16", bf16)
        assert seen == {"1.0": bf16, "1.1": bf16}, "a group gathers one dtype, which is the user's"
        found.append(losses)
    for level, dtype in (("O1", "bf16"), ("O2", "bf16"), ("O0", None)):
        with pytest.raises(ConfigError, match=r"param_dtype=fp16\) contradicts the level"):
            trained(True, level, kinds[0], dtype, torch.float16)
    return found


@pytest.mark.long
def test_16_bit_gathers_fit_every_level_that_computes_in_that_dtype():
    """`MixedPrecisionPolicy(param_dtype=bf16)` used to be refused wherever a group held a normalisation."""
    first, second = run(policies, 2)
    plain = trained_alone()
    for losses in (*first, *second):
        assert losses[0] == pytest.approx(plain, rel=0.02)


def trained_alone():
    with torch.no_grad():
        return net()(torch.randn(4, 8, generator=torch.Generator().manual_seed(0))).square().mean().item()


def low_shards(rank):
    model = hs.distributed.shard(net().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match=r"is a 16-bit shard, .* Shard the fp32 model") as caught:
        hs.MasterWeights(optimizer, model)
    with pytest.raises(UnsupportedError, match="is a 16-bit shard"):
        hs.prepare(model, optimizer, level="O2", dtype="bf16")
    return str(caught.value)


def test_masters_beside_16_bit_shards_are_refused_with_the_cure():
    """It used to end in `aten._foreach_copy_ does not have a sharding strategy` at the first step."""
    assert "'0.weight'" in run(low_shards, 2)[0]
