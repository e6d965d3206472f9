"""Optimizers of other packages in `hs.optim.compact`: as over fp32 weights, or refused by what they do."""

import importlib

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.optim import compacted

pytestmark = pytest.mark.filterwarnings("ignore")
SAME = [
    *(f"schedulefree.{name}" for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")),
    *(f"optimi.{name}" for name in ("AdamW", "Lion", "StableAdamW", "Adan", "Ranger", "SGD")),
    "lion_pytorch.Lion",
    *(
        f"pytorch_optimizer.{name}"
        for name in (
            "Adan",
            "AdaBelief",
            "Lamb",
            "SOAP",
            "AdEMAMix",
            "CAME",
            "AdaFactor",
            "Shampoo",
            "ADOPT",
            "MARS",
        )
    ),
]
REFUSED = {
    "pytorch_optimizer.Prodigy": "depends on other parameters",
    "pytorch_optimizer.DAdaptAdam": "depends on other parameters",
    "pytorch_optimizer.Adai": "depends on other parameters",
    "pytorch_optimizer.SophiaH": "does not require grad",
    "schedulefree.AdamWScheduleFreeClosure": "by a closure",
}
OPTIONS = {"optimi": {"lr": 1e-3, "triton": False}}


def kind_of(name):
    package, _, kind = name.partition(".")
    return getattr(importlib.import_module(package), kind), OPTIONS.get(package, {"lr": 1e-3})


@pytest.mark.parametrize("name", SAME)
def test_with_fp32_states_it_does_what_it_does_to_fp32_weights(name, monkeypatch):
    monkeypatch.setattr(compacted, "BUCKET", 700)
    kind, options = kind_of(name)
    g = torch.Generator().manual_seed(0)
    shapes = [(20, 33), (7,), (3, 2, 4, 5), (33, 20)]
    params = [nn.Parameter(torch.randn(shape, generator=g).bfloat16()) for shape in shapes]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    both = hs.optim.compact(kind, params, **options), kind(wide, **options)
    for optimizer in both:
        getattr(optimizer, "train", lambda: None)()
    for _ in range(15):
        for p, q in zip(params, wide):
            p.grad = torch.randn(p.shape, generator=g).bfloat16()
            q.grad = p.grad.float()
        for optimizer in both:
            optimizer.step()
    for optimizer in both:
        getattr(optimizer, "eval", lambda: None)()
    assert all(torch.equal(both[0].master_of(p), q) for p, q in zip(params, wide))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_what_they_do(name):
    kind, options = kind_of(name)
    with pytest.raises(hs.UnsupportedError, match=REFUSED[name]):
        hs.optim.compact(kind, [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))], **options)
