"""Modules that a model's own classes keep in fp32: transformers' `_keep_in_fp32_modules`, also the strict."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import halfstep as hs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.wo(self.wi(x).relu())


class Declares(nn.Module):
    _keep_in_fp32_modules: ClassVar = ("wo",)
    _keep_in_fp32_modules_strict: ClassVar = None

    def __init__(self):
        super().__init__()
        self.feed = Feed()

    def forward(self, x):
        return self.feed(x)


class Strict(Declares):
    _keep_in_fp32_modules_strict: ClassVar = {"feed.wo"}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(
    ("kind", "low", "kept"),
    [(Declares, FP16, FP32), (Declares, BF16, BF16), (Strict, FP16, FP32), (Strict, BF16, FP32)],
)
def test_declared_modules_are_stored_in_fp32(level, kind, low, kept):
    model = nn.Sequential(kind(), nn.Linear(4, 2))  # the class may stand anywhere
    hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), level=level, dtype=low)
    assert model[0].feed.wi.weight.dtype == low
    assert model[0].feed.wo.weight.dtype == kept
    assert model[1].weight.dtype == low


def test_a_plan_for_the_same_path_wins():
    model = Declares()
    plan = hs.Plan([hs.PlanRule("**.wo", dtype="fp16")])
    hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), level="O2", dtype="fp16", plan=plan)
    assert model.feed.wo.weight.dtype == FP16


def test_what_would_overflow_fp16_does_not():
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for block in (model.encoder.block[0], model.decoder.block[0]):
            block.layer[-1].DenseReluDense.wo.weight.mul_(3e5)  # its results are beyond 65,504
    tokens = torch.randint(0, 32, (2, 6))
    expected = model(input_ids=tokens, decoder_input_ids=tokens).logits.detach()
    amp = hs.prepare(model, hs.optim.AdamW(model.parameters()), level="O2", dtype="fp16")
    with torch.no_grad(), amp.autocast():
        logits = model(input_ids=tokens, decoder_input_ids=tokens).logits
    assert torch.isfinite(logits).all()
    assert (logits.float() - expected).abs().max() < 0.02 * expected.abs().max()
