"""What a session says at its first step where its level did nothing, and where it must say nothing."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from halfstep import doctor
from tests.silence import silent

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
NO_OP = "no op ran in bf16: the step computed in fp32: compute model and loss inside `with amp.autocast"


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def prepared(model: nn.Module, level: str = "O1", dtype: str = "bf16", kind=torch.optim.SGD):
    return hs.prepare(model, kind(model.parameters(), lr=0.1), level=level, dtype=dtype)


def plain(amp: hs.Session) -> None:
    amp.backward(amp.model(X).square().mean())
    amp.step()


def in_region(amp: hs.Session) -> None:
    x = X.to(next(amp.model.parameters()).dtype)
    with amp.autocast():
        loss = amp.model(x).float().square().mean()
    amp.backward(loss)
    amp.step()


def test_a_loop_that_forgets_the_region_is_told_once():
    amp = prepared(small())
    with pytest.warns(hs.HalfstepWarning, match=NO_OP):
        plain(amp)
    for _ in range(3):
        plain(amp)


def test_a_region_around_the_loss_alone_is_told():
    """It used to count as a region, though the model was called outside of it."""
    amp = prepared(small())
    out = amp.model(X)
    with amp.autocast():
        loss = out.square().mean()
    amp.backward(loss)
    with pytest.warns(hs.HalfstepWarning, match=NO_OP):
        amp.step()


def test_who_keeps_all_of_it_in_fp32_by_a_plan_is_told_of_the_level_that_does():
    model, plan = small(), hs.Plan((hs.PlanRule("**", dtype="fp32"),))
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    with pytest.warns(hs.HalfstepWarning, match=NO_OP + r".*the plan is to keep all of it in fp32.*level O0"):
        in_region(amp)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.Conv1d])
def test_every_kind_of_layer_is_seen(cell):
    torch.manual_seed(0)
    layer = cell(8, 4, 1) if cell is nn.Conv1d else cell(8, 4)
    amp = prepared(layer)
    out = layer(torch.randn(3, 8, 8))
    amp.backward((out[0] if isinstance(out, tuple) else out).square().mean())
    with pytest.warns(hs.HalfstepWarning, match=NO_OP):
        amp.step()


class OwnRegion(nn.Module):
    def __init__(self, region) -> None:
        super().__init__()
        self.inner, self.region = small(), region

    def forward(self, x):
        with self.region():
            return self.inner(x).float()


def of_torch() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def checkpointed(amp: hs.Session) -> None:
    with amp.autocast():
        out = torch.utils.checkpoint.checkpoint(amp.model, X, use_reentrant=False)
        loss = out.square().mean()
    amp.backward(loss)
    amp.step()


def compiled(amp: hs.Session) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with amp.autocast():
            return amp.model(x).square().mean()

    amp.backward(torch.compile(forward, backend="aot_eager")(X))
    amp.step()


def penalty_first(amp: hs.Session) -> None:
    amp.backward(sum(p.square().sum() for p in amp.model.parameters()))
    with amp.autocast():
        loss = amp.model(X).square().mean()
    amp.backward(loss)
    amp.step()


def elementwise(amp: hs.Session) -> None:
    amp.backward(sum(p.square().sum() for p in amp.model.parameters()))
    amp.step()


def by_own_backward(amp: hs.Session) -> None:
    with hs.autocast("cpu", "bf16"):
        loss = amp.model(X).float().square().mean()
    loss.backward()
    amp.step()


def explicitly_off(amp: hs.Session) -> None:
    with amp.autocast(enabled=False):
        loss = amp.model(X).square().mean()
    amp.backward(loss)
    amp.step()


@pytest.mark.parametrize(
    "loop", [in_region, checkpointed, compiled, penalty_first, elementwise, by_own_backward, explicitly_off]
)
def test_nothing_is_said_of_a_loop_that_casts(loop):
    with silent():
        loop(prepared(small()))


@pytest.mark.parametrize("region", [of_torch, lambda: hs.autocast("cpu", "bf16")])
def test_nothing_is_said_of_a_region_inside_the_model(region):
    with silent():
        plain(prepared(OwnRegion(region)))


@pytest.mark.parametrize(("level", "dtype"), [("O0", None), ("O2", "bf16"), ("O3", "bf16")])
def test_nothing_is_said_at_other_levels(level, dtype):
    model = small()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level, dtype=dtype)
    with silent():
        plain(amp)


def test_weights_made_16_bit_after_prepare_are_told_once():
    model = small()
    amp = prepared(model)
    model.bfloat16()
    with pytest.warns(hs.HalfstepWarning, match=r"O1 keeps fp32 weights, but 4 parameters are bf16 .*O2"):
        in_region(amp)
    in_region(amp)


def test_a_model_of_fp64_is_told():
    amp = prepared(small().double())
    with pytest.warns(hs.HalfstepWarning, match=r"no op ran in bf16: all weights are fp64.*model\.float\(\)"):
        in_region(amp)


@pytest.mark.parametrize(
    ("level", "dtype", "said"),
    [
        ("O2", "bf16", "O2's 16-bit weights have no fp32 masters"),
        ("O2", "fp16", "nothing divides the loss scale 65536 out and .* loss_scale='none'"),
        ("O1", "fp16", "nothing divides the loss scale 65536 out.* loss_scale='none'"),
    ],
)
def test_a_backward_without_an_optimizer_is_told_once(level, dtype, said):
    model = small()
    amp = hs.prepare(model, level=level, dtype=dtype)

    def backward() -> None:
        with amp.autocast():
            loss = model(X).float().square().mean()
        amp.backward(loss)

    with pytest.warns(hs.HalfstepWarning, match=said):
        backward()
    backward()


def test_a_backward_without_an_optimizer_that_loses_nothing_is_not_told():
    model = small()
    amp = hs.prepare(model, level="O1", dtype="bf16")
    with silent():
        with amp.autocast():
            loss = model(X).square().mean()
        amp.backward(loss)


def loop_of(amp: hs.Session, region: bool):
    def step(x: torch.Tensor) -> torch.Tensor:
        if region:
            with amp.autocast():
                loss = F.mse_loss(amp.model(x).float(), x[:, :1].float())
        else:
            loss = F.mse_loss(amp.model(x), x[:, :1])
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("kernels", ["native", "rounded"])
def test_lint_and_doctor_find_a_step_outside_of_the_region(kernels):
    for region in (True, False):
        model = small()
        amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16", kernels=kernels)
        step = loop_of(amp, region)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hs.HalfstepWarning)
            found = hs.lint(step, X)
            document = doctor.examine(step, X)
        assert [f.rule for f in found] == ([] if region else ["no region"])
        assert document.healthy is region
        if not region:
            assert found[0].text.startswith("no op ran in bf16")
            assert "0 (Linear)" in found[0].where or "test_first_step.py" in found[0].where
            assert "no op ran in bf16" in document.headline


@pytest.mark.parametrize(("change", "said"), [("bfloat16", "4 parameters are bf16"), ("double", "fp64")])
def test_lint_and_doctor_find_weights_of_another_dtype(change, said):
    model = small()
    amp = prepared(model)
    getattr(model, change)()
    assert [f.rule for f in hs.lint(session=amp)] == ["weights"]
    x = X.to(next(model.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hs.HalfstepWarning)
        document = doctor.examine(loop_of(amp, True), x)
    assert not document.healthy
    assert said in document.headline
