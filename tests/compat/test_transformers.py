"""Unmodified third-party models under install(): transformers' tiny GPT-2 and BERT from config."""

import pytest
import torch

import halfstep as hs
from halfstep.compat.torch_amp import install

transformers = pytest.importorskip("transformers", exc_type=ImportError)
transformers.logging.set_verbosity_error()


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config)


def train(build, low_precision):
    """30 steps in torch's own words; returns the loss of the first and of the last step."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=low_precision)
    pattern, losses, regions = torch.arange(32) * 7 % 64, [], 0
    for _ in range(30):
        tokens = (pattern + torch.randint(0, 3, (8, 1))) % 64
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low_precision):
            regions += hs.active_policy("cpu") is not None
            loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses[0], losses[-1], regions


@pytest.mark.parametrize("build", [gpt2, bert])
def test_30_steps_in_bf16_end_within_2_percent_of_fp32(build):
    first, full, _ = train(build, low_precision=False)
    with install():
        _, mixed, regions = train(build, low_precision=True)
    assert regions == 30  # they were our regions, not torch's
    assert full < 0.6 * first
    assert mixed == pytest.approx(full, rel=0.02)
    assert mixed != full
