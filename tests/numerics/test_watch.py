import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep.errors import ConfigError
from halfstep.formats import FORMATS
from halfstep.gradients.per_parameter import amaxes, amaxes_of
from halfstep.numerics.watch import forecast, headroom, spread, trend, watch
from halfstep.optim import SGD, AdamW
from halfstep.scaling import StaticLossScale
from halfstep.session import prepare
from halfstep.trees import dense_values, ends_of


class Two(nn.Module):
    def __init__(self, wrap=None):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        self.wrap = wrap

    def forward(self, x):
        if self.wrap is None:
            return self.b(torch.tanh(self.a(x)))
        return self.b(torch.tanh(checkpoint(self.a, x, use_reentrant=self.wrap)))


def run(model, optimizer, x, steps=1, micro=1):
    for _ in range(steps):
        for part in x.chunk(micro):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_seen_is_what_there_was():
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(6, 4)
    before = model.a.weight.detach().clone()
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    out = model.a(x)
    with watch(model, optimizer, every=1, exact=True) as seen:
        run(model, optimizer, x)
    seen.collect()
    note = seen.notes[0]
    assert note.taken
    assert note.amax == pytest.approx(max(g.abs().max().item() for g in grads), rel=1e-6)
    activation = seen.series["activation", "a"].samples[0]
    assert activation.amax == pytest.approx(out.abs().max().item(), rel=1e-6)
    assert activation.total == out.numel()
    update = seen.series["update", "a.weight"].samples[0]
    assert update.amax == pytest.approx((model.a.weight - before).abs().max().item(), rel=1e-6)
    assert seen.series["weight", "a.weight"].samples[0].total == 16


@pytest.mark.parametrize("wrap", [None, True, False])
def test_recomputation_is_not_counted_twice(wrap):
    model = Two(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4, requires_grad=True)
    with watch(model, optimizer, every=1, exact=True) as seen:
        run(model, optimizer, x)
    seen.collect()
    assert seen.series["activation", "a"].samples[0].total == 24
    assert seen.series["activation_grad", "a"].samples[0].total == 24


def test_accumulation_counts_every_microbatch_and_the_final_gradient():
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4)
    for part in x.chunk(3):
        model(part).square().mean().backward()
    expected = max(p.grad.abs().max().item() for p in model.parameters())
    optimizer.zero_grad()
    with watch(model, optimizer, every=1, exact=True) as seen:
        run(model, optimizer, x, micro=3)
    seen.collect()
    assert seen.series["activation", "a"].samples[0].total == 24
    assert seen.series["gradient", "a.weight"].samples[0].total == 16
    assert seen.notes[0].amax == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")])
@pytest.mark.parametrize("own", [True, False])
def test_a_session_s_gradients_are_noted_as_backward_left_them(level, dtype, own):
    torch.manual_seed(0)
    model = Two()
    make = SGD if own else torch.optim.SGD
    amp = prepare(model, make(model.parameters(), lr=0.1), level=level, dtype=dtype, loss_scale=8.0)
    expected = []
    with watch(model, amp, every=2, exact=True) as seen:
        for x in torch.randn(3, 2, 5, 4):
            for part in x:
                with amp.autocast():
                    loss = model(part).float().square().mean()
                amp.backward(loss)
            expected.append({n: p.grad.abs().max().item() for n, p in model.named_parameters()})
            amp.step(clip_norm=1e-3)
    assert [n.amax for n in seen.notes] == [max(e.values()) for e in expected]
    assert [n.worst for n in seen.notes] == [max(e, key=e.get) for e in expected]
    for name in expected[0]:
        series = seen.series["gradient", name]
        assert series.amax == [e[name] for e in expected]
        assert [s.step for s in series.samples] == [0, 2]
        assert seen.series["update", name].samples[0].total == dict(model.named_parameters())[name].numel()


def test_each_optimizer_s_step_notes_its_own_gradients():
    model = Two()
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.a, model.b))
    amp = prepare(model, [first, second], dtype="bf16")
    with watch(model, amp, every=0) as seen:
        with amp.autocast():
            loss = model(torch.randn(6, 4)).square().mean()
        amp.backward(loss)
        tops = [max(p.grad.abs().max().item() for p in m.parameters()) for m in (model.a, model.b)]
        amp.step(first)
        amp.step(second)
    assert [n.amax for n in seen.notes] == tops
    assert [n.worst[0] for n in seen.notes] == ["a", "b"]


def test_released_gradients_are_noted():
    model = Two()
    amp = prepare(model, SGD(model.parameters(), lr=0.1, release_gradients=True), level="O0")
    x = torch.randn(6, 4)
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with watch(model, amp, every=1) as seen:
        amp.backward(model(x).square().mean())
        amp.step()
    assert seen.notes[0].amax == max(g.abs().max().item() for g in grads)
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_largest_of_any_dtype_and_layout():
    given = [
        torch.tensor([-3.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([[1.0, -1e300]], dtype=torch.float64),
        torch.tensor([1.0, math.nan]),
        torch.tensor([-math.inf, 1.0], dtype=torch.float16),
        torch.empty(0),
        torch.tensor([3.0 - 5.0j]),
        torch.sparse_coo_tensor([[0, 0, 4]], [2.0, 3.0, -4.0], (9,), check_invariants=True),
    ]
    expected = torch.tensor([3.0, 1e300, math.nan, math.inf, 0.0, 5.0, 5.0], dtype=torch.float64)
    assert torch.equal(amaxes(given).nan_to_num(nan=-1), expected.nan_to_num(nan=-1))
    one_by_one = amaxes_of([ends_of(dense_values(g)) for g in given])
    assert torch.equal(one_by_one.nan_to_num(nan=-1), expected.nan_to_num(nan=-1))


def test_skips_and_scale_are_noted():
    model = Two()
    amp = prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dtype="fp16",
        loss_scale=StaticLossScale(64.0),
    )
    with watch(model, amp) as seen:
        for value in (1.0, 1e30, 1.0):
            with amp.autocast():
                loss = model(torch.full((2, 4), 1.0)).float().square().mean() * value
            amp.backward(loss)
            amp.step()
    assert [n.taken for n in seen.notes] == [True, False, True]
    assert [n.finite for n in seen.notes] == [True, False, True]
    assert {n.scale for n in seen.notes} == {64.0}
    assert seen.skipped()[0].step == 1
    assert "1 of 3 steps skipped" in seen.summary()[0]
    assert seen.format is FORMATS["fp16"]


def test_a_scaler_s_scale_is_noted_as_the_step_had_it():
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    scales = []
    with watch(model, optimizer, every=1, scaler=scaler) as seen:
        for _ in range(4):
            scales.append(scaler.get_scale())
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scales == [2.0, 4.0, 8.0, 16.0]
    assert [note.scale for note in seen.notes] == scales


def test_lost_updates_are_counted():
    model = nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with watch(model, optimizer, every=1) as seen:
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    seen.collect()
    assert seen.lost[0].share == 1.0
    assert "100% of the updates are lost" in seen.summary()[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_largest_is_the_same_by_kernel(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(n).to(dtype) for n in (200_000, 128, 1, 70_000, 131_073)]
    tensors[1][3], tensors[3][-1], tensors[2][0] = math.nan, -math.inf, 3e-39
    one_by_one = amaxes_of([ends_of(t) for t in tensors])
    assert torch.equal(amaxes(tensors).nan_to_num(nan=-1), one_by_one.nan_to_num(nan=-1))
    assert amaxes([*tensors, torch.empty(0, dtype=dtype)])[-1] == 0


@pytest.mark.filterwarnings("ignore:.*too coarse for a step:halfstep.errors.HalfstepWarning")
@pytest.mark.parametrize("level", ["O2", None])
@pytest.mark.parametrize(
    ("master", "lost"), [(None, 1.0), ("exact", 0.0), ("fp32", 0.0), ("stochastic", 0.0)]
)
def test_lost_updates_of_one_pass_optimizers(level, master, lost):
    model = nn.Linear(64, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, master=master)
    amp = None if level is None else prepare(model, optimizer, level=level, dtype="bf16")
    with watch(model, optimizer if amp is None else amp, every=1) as seen:
        for _ in range(3):
            loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum()
            if amp is None:
                loss.backward()
                optimizer.step()
            else:
                amp.backward(loss)
                amp.step()
    seen.collect()
    assert seen.lost, "no share was reported"
    assert {note.share for note in seen.lost} == {lost}
    assert any("100% of the updates are lost" in line for line in seen.summary()) == (lost == 1.0)


def test_a_skipped_step_loses_no_update():
    model = nn.Linear(8, 1, bias=False).bfloat16()
    amp = prepare(model, SGD(model.parameters(), lr=0.1), level="O2", dtype="bf16", loss_scale=8.0)
    with watch(model, amp, every=1) as seen:
        for value in (1.0, math.inf, 1.0):
            amp.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum() * value)
            amp.step()
    seen.collect()
    assert [n.taken for n in seen.notes] == [True, False, True]
    assert [(note.step, note.share) for note in seen.lost] == [(0, 0.0), (2, 0.0)]


class Grower(nn.Module):
    """Its output doubles every ten steps."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return self.fc(x) * 2.0 ** (self.steps / 10)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Grower()])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_the_forecast_names_the_module_and_the_step():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(8, 4)
    with watch(model, optimizer, every=5, dtype="fp16") as seen:
        for _ in range(80):
            (model(x).sum() * 1e-6).backward()
            optimizer.step()
    found = seen.forecasts()
    assert [f.path for f in found] == ["blocks.1"]
    top = model.blocks[1].fc(model.blocks[0](x)).abs().max().item()
    last_seen = seen.series["activation", "blocks.1"].steps[-1] + 1
    expected = 10 * (math.log2(65504) - math.log2(top)) - last_seen
    assert found[0].steps == pytest.approx(expected, rel=0.1)
    assert str(found[0]).startswith("'blocks.1' overflows fp16 in about ")


def test_no_forecast_from_noise():
    g = torch.Generator().manual_seed(0)
    values = (torch.rand(60, generator=g) + 1).tolist()
    assert forecast("x", "activation", range(60), values, FORMATS["fp16"]) is None
    assert forecast("x", "activation", range(3), values[:3], FORMATS["fp16"]) is None
    assert forecast("x", "activation", range(60), [2.0] * 60, FORMATS["fp16"]) is None
    assert trend([1, 1, 1, 1, 1, 1], [1.0] * 6) is None


def test_headroom_in_bits():
    assert headroom(65504.0, "fp16") == 0
    assert headroom(65504 / 8, "fp16") == 3
    assert headroom(0.0, "fp16") == math.inf
    assert headroom(math.nan, "fp16") == -math.inf


@pytest.mark.parametrize("shape", [(400, 300), (100_003,), (64, 3, 64, 64), (2, 70_000)])
def test_a_spread_sample_reaches_every_column(shape):
    t = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    sample = spread(t)
    assert 1 << 11 <= sample.numel() <= 1 << 16
    if shape[-1] < 5000:
        assert len(torch.unique(sample.reshape(-1) % shape[-1])) == shape[-1]


def test_a_compiled_model_is_watched_as_far_as_it_can_be():
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, every=1) as seen:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        run(compiled, optimizer, torch.randn(6, 4), steps=2)
    seen.collect()
    assert ("gradient", "a.weight") in seen.series
    assert ("activation", "a") not in seen.series
    assert len(seen.notes) == 2


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="watch got a NoneType"):
        watch(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without parameters"):
        watch(nn.Identity())


def test_a_nonfinite_gradient_is_noted_with_its_parameter():
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, every=0) as seen:
        F.mse_loss(model(torch.full((1, 4), math.nan)), torch.zeros(1, 1)).backward()
        optimizer.step()
    assert not seen.notes[0].finite
    assert seen.notes[0].worst in ("a.weight", "a.bias", "b.weight", "b.bias")
    assert not [k for k in seen.series if k[0] == "activation"]
