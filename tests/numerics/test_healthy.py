"""Healthy training: the doctor says nothing, and watching it changes nothing."""

import pytest
import torch

from halfstep.numerics.lint import LintProbe
from halfstep.numerics.trace import trace_step
from halfstep.numerics.watch import watch
from halfstep.recipes import RECIPES
from halfstep.session import prepare

pytestmark = pytest.mark.usefixtures("rounded_kernels")
SETTINGS = [("O0", None), ("O1", "bf16"), ("O1", "fp16"), ("O2", "fp16")]


def start(name, level, dtype, steps=4):
    recipe = RECIPES[name]
    torch.manual_seed(0)
    model, optimizer = recipe.build(0)
    amp = prepare(model, optimizer, level=level, dtype=dtype)
    batches = iter(recipe.task().train(0))
    small = 2 if name == "text-gpt" else 16

    def step(x, y):
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        return loss.detach()

    return model, amp, step, [tuple(t[:small] for t in next(batches)) for _ in range(steps)]


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize(("level", "dtype"), SETTINGS)
def test_no_false_alarm(name, level, dtype):
    _, amp, step, batches = start(name, level, dtype)
    for batch in batches[:2]:
        step(*batch)
    probe = LintProbe()
    trace = trace_step(step, *batches[2], session=amp, underflow=True, observers=[probe.observe])
    assert trace.bad is None
    assert trace.ends == ()
    assert probe.findings == []
    assert trace.ops > 20


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O1", "fp16"), ("O2", "fp16")])
def test_watched_and_unwatched_losses_are_the_same(name, level, dtype):
    losses, weights = [], []
    for every in (None, 2):
        model, amp, step, batches = start(name, level, dtype, steps=10)
        seen = None if every is None else watch(model, amp, every=every)
        losses.append([float(step(*batch)) for batch in batches])
        weights.append([p.detach().clone() for p in model.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert seen is not None
    assert seen.step == len(seen.notes) == 10
    assert len(next(iter(seen.series.values())).samples) == 5
    assert seen.forecasts() == []
