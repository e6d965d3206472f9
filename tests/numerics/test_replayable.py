import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import optim as hs_optim
from halfstep.errors import HalfstepWarning, LossScaleCollapsed
from halfstep.numerics.replayable import Replayable
from halfstep.numerics.snapshot import Snapshot
from halfstep.numerics.trace import trace_step
from halfstep.scaling import DynamicLossScale
from halfstep.session import prepare
from halfstep.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:5 steps in a row were skipped")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(F.dropout(self.norm(self.a(x)), 0.2))


def make(skip, max_skips=50):
    torch.manual_seed(0)
    model = Net()
    amp = prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        dtype="fp16" if skip else "bf16",
        loss_scale=DynamicLossScale(init=2.0**10) if skip else None,
        max_skips=max_skips,
    )

    def step(x, y, factor):
        with amp.autocast():
            loss = F.mse_loss(model(x).float(), y) * factor
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return model, amp, step


def batches(bad_at, n=5):
    g = torch.Generator().manual_seed(1)
    for i in range(n):
        x = torch.randn(16, 4, generator=g)
        yield x, x[:, :1], float("inf") if i == bad_at else 1.0


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.filterwarnings("ignore:step 3")
def test_a_bad_step_is_replayed_and_the_run_goes_on_as_if_not(skip):
    finals = []
    for ready in (False, True):
        model, amp, step = make(skip)
        replay = Replayable(amp, warn=False)
        for batch in batches(bad_at=2):
            replay.run(step, *batch) if ready else step(*batch)
        finals.append([p.detach().clone() for p in (*model.parameters(), *model.buffers())])
        scale = amp.loss_scale
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*finals))
    assert amp.loss_scale == scale
    assert replay.steps == 5
    assert replay.traces[0][0] == 3
    bad = replay.traces[0][1].bad
    assert (bad.phase, bad.module, bad.op) == ("forward", "", "mul")
    kinds = [trace.bad.cause.kind for _, trace in replay.traces]
    assert kinds[1:] == ([] if skip else ["weights"])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.filterwarnings("ignore:step 3")
def test_weights_are_copied_by_a_trace_and_before_and_after_an_update_gone_wrong(skip, monkeypatch):
    copies, init = [], Snapshot.__init__

    def counted(self, parts, weights=True):
        copies.extend([parts] * weights)
        init(self, parts, weights)

    monkeypatch.setattr(Snapshot, "__init__", counted)
    _, amp, step = make(skip)
    replay = Replayable(amp, warn=False)
    for batch in batches(bad_at=2, n=3):
        replay.run(step, *batch)
    assert len(replay.traces) == 1
    assert len(copies) == (1 if skip else 3)


def release_run(trace):
    """Four steps with released gradients, clipped; step 3 leaves the range unless its loss scale is lower."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = hs_optim.AdamW(model.parameters(), lr=1e-2, release_gradients=True)
    amp = prepare(model, optimizer, dtype="fp16", loss_scale=DynamicLossScale(init=2.0**10))

    def step(x, factor, clip_norm):
        with amp.autocast():
            loss = model(x).float().square().mean() * factor
        amp.backward(loss)
        amp.step(clip_norm=clip_norm)

    replay = Replayable(amp, warn=False)
    for (x, _, _), factor, clip_norm in zip(batches(0), (1.0, 5.0, 1e4, 1.0), (0.02, 0.01, 0.02, 0.01)):
        if trace == "healthy":
            trace_step(step, 3.0 * x, 2.0, 0.5, session=amp)
        replay.run(step, x, factor, clip_norm) if trace == "bad" else step(x, factor, clip_norm)
    return replay, model, optimizer.release._last_norm


@pytest.mark.filterwarnings("ignore:clip_norm with released gradients")
@pytest.mark.parametrize("trace", ["healthy", "bad"])
def test_released_gradients_are_clipped_as_if_nothing_had_been_traced(trace):
    _, plain, norm = release_run("")
    replay, traced, traced_norm = release_run(trace)
    assert [c.status for _, t in replay.traces for c in t.bad.cures if c.kind == "loss_scale"] == (
        ["works"] if trace == "bad" else []
    )
    assert torch.equal(norm, traced_norm)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), traced.parameters()))


def test_a_collapse_names_the_first_bad_op():
    _, amp, step = make(skip=True, max_skips=2)
    replay = Replayable(amp, limit=0, warn=False)
    with pytest.raises(LossScaleCollapsed, match="first bad op: forward: mul outside any module"):
        for _ in range(4):
            replay.run(step, torch.randn(16, 4), torch.randn(16, 1), float("inf"))


def test_a_session_s_loss_that_is_far_too_large_is_divided():
    _, amp, step = make(skip=True)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    bad = trace_step(step, x, x[:, :1], 1e7, session=amp).bad
    assert ("loss", "works") in [(cure.kind, cure.status) for cure in bad.cures]


def test_without_a_session():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sqrt().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    replay = Replayable(warn=False)
    replay.run(step, torch.full((2, 4), 100.0) * torch.sign(model.weight.detach()))
    assert replay.last is None
    start = model.weight.detach().clone()
    replay.run(step, -torch.full((2, 4), 100.0) * torch.sign(model.weight.detach()))
    assert replay.last.bad.op == "sqrt"
    assert not model.weight.isfinite().all()
    assert start.isfinite().all()


class Faulty(Net):
    """A batch with large numbers in its first row overflows fp16 at `* factor`; all others are well."""

    def forward(self, x):
        factor = torch.where(x[0].amax() > 50, 6e4, 1.0).half()
        return (1 + super().forward(x).abs()) * factor


def train(trace, *, accumulate=1, own=False, scale=2.0**10, at=(3, 5), steps=8, **options):
    torch.manual_seed(0)
    model = Faulty()
    make = hs_optim.AdamW if own else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    g = torch.Generator().manual_seed(1)
    data = [torch.randn(16, 4, generator=g) for _ in range(steps * accumulate)]
    for i in at:
        data[i * accumulate + accumulate - 1][0] = 1e3

    def loader():
        for x in data:
            x = F.dropout(x, 0.1) + 0 * torch.rand(())  # a loader that draws from the global generator
            yield x, x[:, 1:2]

    trainer = Trainer(
        model,
        optimizer,
        lambda out, y: F.mse_loss(out.float(), y),
        dtype="fp16",
        loss_scale=DynamicLossScale(init=scale, interval=3),
        scheduler=scheduler,
        accumulate=accumulate,
        progress=False,
        trace=trace,
        **options,
    )
    history = trainer.fit(loader(), steps=steps)
    values = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    entries = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    state = [v for entry in entries for _, v in sorted(entry.items()) if isinstance(v, torch.Tensor)]
    kept = [v.detach().clone() for v in (*values, *state)]
    return trainer, history, kept, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("accumulate", "own", "level"), [(1, False, "O1"), (2, False, "O1"), (1, True, "O1"), (1, True, "O2")]
)
def test_a_trainer_replays_its_bad_steps_and_goes_on_as_if_not(accumulate, own, level):
    plain = train(False, accumulate=accumulate, own=own, level=level)
    with pytest.warns(HalfstepWarning, match="step 4: forward: mul in the root module") as told:
        traced = train(True, accumulate=accumulate, own=own, level=level)
    assert len(told) == 1
    assert all(torch.equal(a, b) for a, b in zip(plain[2], traced[2], strict=True))
    assert repr(plain[1].steps) == repr(traced[1].steps)
    assert plain[3] == traced[3]
    assert traced[1].skipped == [4, 6]
    trainer = traced[0]
    assert [number for number, _ in trainer.traces] == [4]
    bad = trainer.traces[0][1].bad
    assert (bad.phase, bad.op, bad.cause.kind, bad.harmless) == ("forward", "mul", "range", False)
    assert "* factor" in bad.location.code
    assert plain[0].traces == []


def test_the_skips_of_a_scale_that_is_too_high_are_no_fault():
    trainer, history, _, _ = train(True, scale=2.0**24, at=())
    assert history.skipped[:2] == [1, 2]
    assert all(bad.harmless for bad in (trace.bad for _, trace in trainer.traces))
    assert trainer.traces[0][1].bad.phase == "backward"
    assert trainer.traces[0][1].bad.cause.kind == "range"
    replays = trainer._replayable._replays
    assert replays <= 1 + math.log2(len(history.skipped))


def test_a_trainer_s_collapse_names_the_first_bad_op():
    with (
        pytest.warns(HalfstepWarning, match="first op that is not finite"),
        pytest.raises(LossScaleCollapsed, match="first bad op: forward: mul in the root"),
    ):
        train(True, at=range(60), steps=60)


def test_a_replayed_collapse_is_not_replayed_for_ever():
    _, amp, step = make(skip=True, max_skips=50)
    replay = Replayable(amp, limit=1, warn=False)
    with pytest.raises(LossScaleCollapsed):
        for batch in (b for _ in range(60) for b in batches(bad_at=0, n=1)):
            replay.run(step, *batch)
    assert replay._replays == 2
    assert len(replay.traces) == 1


def test_a_long_history_does_not_hide_a_bad_step():
    _, amp, step = make(skip=True)
    amp.history = type(amp.history)(maxlen=2)
    replay = Replayable(amp, warn=False)
    for batch in batches(bad_at=4):
        replay.run(step, *batch)
    assert [number for number, _ in replay.traces] == [5]


def test_the_forward_of_a_closure_is_no_part_of_the_optimizer():
    model, x = nn.Linear(4, 1), torch.full((2, 4), 12.0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (torch.exp(x).half() * model(x)).float().mean()  # too large
        loss.backward()
        return loss

    def step():
        return optimizer.step(closure)

    bad = trace_step(step, model=model, optimizer=optimizer, try_cures=False).bad
    assert bad.phase == "forward"
    assert not any(cure.kind == "masters" for cure in bad.cures)
