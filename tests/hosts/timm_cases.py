"""timm: the recipe of docs/hosts.md, its optimizer registry and a scaler as its training script calls it."""

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn import functional as F

import halfstep as hs
from tests.hosts import common
from tests.hosts.common import ACCUMULATE, CLIP, DTYPES, LOW, RATE, SEEDS, WAYS

PARTS = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".models")
STAND_INS = {f"torchvision{part}": MagicMock() for part in (*PARTS, ".models.feature_extraction")}
"""Where torchvision is missing: timm imports it, but not for what is used here."""
if importlib.util.find_spec("torchvision") is not None:
    STAND_INS = {}
sys.modules.update(STAND_INS)
timm_optim = importlib.import_module("timm.optim")
for name in STAND_INS:
    del sys.modules[name]
pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, BATCHES = 16, 80
REGISTRY = timm_optim.OptimizerRegistry()
REGISTRY.register(timm_optim.OptimInfo("halfstep", hs.optim.AdamW, has_betas=True))


class Scaler:
    """What timm's training script calls in place of its NativeScaler."""

    state_dict_key = "amp_scaler"

    def __init__(self, session):
        self.session = session
        self.state_dict, self.load_state_dict = session.state_dict, session.load_state_dict

    def __call__(
        self, loss, optimizer, clip_grad=None, clip_mode="norm", parameters=None, create_graph=False,
        need_update=True,
    ):  # fmt: skip
        self.session.backward(loss, create_graph=create_graph)
        if need_update:
            self.outcome = self.session.step(optimizer, clip_norm=clip_grad, zero_grad=False)


def train(way, dtype="bf16", seed=0, spoiled=None, batches=BATCHES):
    """Train as timm's script does: its optimizer factory, its scaler, its order of calls."""
    common.quiet()
    model, scaler = common.cnn(seed).to(LOW[dtype] if way == "optimizer" else LOW["fp32"]), None
    if way == "fp32":
        optimizer = timm_optim.create_optimizer_v2(model, opt="adamw", lr=RATE, weight_decay=0.05)
    else:
        own = {"clip_norm": CLIP, "skip_nonfinite": True} if way == "optimizer" else {}
        optimizer = REGISTRY.create_optimizer(model, opt="halfstep", lr=RATE, weight_decay=0.05, **own)
    if way in WAYS[1:]:
        how = {"on_nonfinite": "skip"} if dtype == "bf16" else {"loss_scale": 1024.0}
        scaler = Scaler(hs.prepare(model, optimizer, level=way, dtype=dtype, **how))
    assert len(optimizer.param_groups) == 2  # timm's: biases and norms without weight decay
    run = SimpleNamespace(model=model, losses=[], norms=[], skipped=[])
    loader = torch.utils.data.DataLoader(common.digits(seed, batches * BATCH), batch_size=BATCH)
    for i, (x, y) in enumerate(loader):
        need_update = (i + 1) % ACCUMULATE == 0
        with scaler.session.autocast() if scaler else torch.autocast("cpu", enabled=False):
            output = model(x.to(model[0].weight.dtype) if scaler is None else x)
            loss = F.cross_entropy(output.float(), y)
        run.losses.append(float(loss.detach()))
        loss = loss / ACCUMULATE * (float("inf") if i == spoiled else 1.0)
        if scaler:
            scaler(loss, optimizer, clip_grad=CLIP, parameters=model.parameters(), need_update=need_update)
            outcome = scaler.outcome if need_update else None
        else:
            loss.backward()
            if need_update and way == "fp32":
                run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            if need_update:
                optimizer.step()
            outcome = getattr(optimizer, "outcome", None) if need_update else None
        if outcome is not None:
            run.norms.append(outcome.grad_norm)
            run.skipped.append(outcome.skipped)
        if need_update:
            optimizer.zero_grad()
    second = run.losses[len(run.losses) // 2 :]
    run.last = sum(second) / len(second)
    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_norm(way, dtype):
    plain = [train("fp32", seed=seed) for seed in SEEDS]
    common.like_fp32([train(way, dtype, seed) for seed in SEEDS], plain, 0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_on_inf_is_skipped(way, dtype):
    run = train(way, dtype, spoiled=3 * ACCUMULATE, batches=6 * ACCUMULATE)
    assert run.skipped == [False, False, False, True, False, False]
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
