"""What holds on the Python device. `compat/test_device_module.py` runs this file in a process of its own."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import devices
from halfstep.casting import casts
from halfstep.conformance import GROUPS, battery, run_battery
from halfstep.errors import ConfigError
from halfstep.policy.ops import OpRow, Rule
from halfstep.trainer import Trainer
from tests import python_device
from tests.python_device import NAME, to_host


def failures(**options) -> list[str]:
    return [check.name for check in run_battery(NAME, **options) if check.status == "fails"]


# --- the device itself -------------------------------------------------------------------------------------


def test_views_share_memory_and_in_place_changes_reach_autograd():
    a = torch.zeros(4, 4, device=NAME)
    a[1:3, 2] = 5
    a.t()[1].add_(1)
    assert a.cpu()[1].tolist() == [0, 1, 5, 0]
    x = torch.arange(4.0, device=NAME, requires_grad=True)
    y = x * 2
    y[2:].mul_(3)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 6, 6]


def test_data_can_be_swapped_copied_saved_and_loaded():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(NAME)
    model[0].weight.data = model[0].weight.data.bfloat16()
    twin = copy.deepcopy(model)
    assert {t.device.type for t in twin.state_dict().values()} == {NAME}
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    assert torch.equal(loaded["0.weight"], model[0].weight.detach().cpu())
    file.seek(0)
    here = torch.load(file)["0.weight"]
    assert here.device.type == NAME
    assert torch.equal(here.cpu(), loaded["0.weight"])


def test_a_device_module_has_what_scripts_ask_of_it():
    module = torch.get_device_module(NAME)
    for device in (0, NAME, f"{NAME}:0", torch.device(NAME, 0)):
        module.set_device(device)
        module.synchronize(device)
    assert module.current_device() == 0
    module.synchronize()
    with pytest.raises(ConfigError, match=f"give a device of {NAME}"):
        module.set_device("cpu")


def test_recurrent_cells_are_those_of_the_cpu():
    torch.manual_seed(0)
    plain, x = nn.LSTM(3, 4, 2), torch.randn(5, 2, 3)
    model = copy.deepcopy(plain).to(NAME)
    plain(x)[0].sum().backward()
    model(x.to(NAME))[0].sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


# --- registration ------------------------------------------------------------------------------------------


def test_the_device_is_the_default_and_says_what_it_computes_in():
    assert devices.available() == ("cpu", NAME)
    assert devices.resolve().type == NAME
    assert devices.default_dtype(NAME) is torch.bfloat16
    assert torch.pydev.get_amp_supported_dtype() == [torch.bfloat16, torch.float16]
    with hs.autocast():
        assert torch.mm(torch.ones(2, 2, device=NAME), torch.ones(2, 2, device=NAME)).dtype is torch.bfloat16


@pytest.fixture
def registered():
    """Registers the device anew and puts back what the module registered."""
    yield lambda **what: hs.devices.register(NAME, **what)
    python_device.register()


def test_a_dtype_that_was_not_declared_is_refused(registered):
    registered(dtypes=("bf16",))
    assert torch.pydev.get_amp_supported_dtype() == [torch.bfloat16]
    with pytest.raises(hs.UnsupportedError, match="fp16 does not work on pydev: its vendor declares no fp16"):
        hs.autocast(NAME, torch.float16)
    with pytest.raises(hs.UnsupportedError, match="fp16"):
        hs.prepare(nn.Linear(2, 2).to(NAME), dtype="fp16")


def test_a_slow_dtype_is_rounded_around_fp32(registered):
    registered(dtypes=("bf16", "fp16"), slow=("fp16",))
    checks = {c.name: c for c in run_battery(NAME, ["O1"], ["fp16"], only=["casting", "models"])}
    assert checks["linear fp16"].status == "falls back"
    assert checks["MLP O1 fp16"].status == "falls back"
    assert not [c for c in checks.values() if c.status == "fails"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other", "a process has one PrivateUse1 device, 'pydev'"),
        ("cuda", "cannot name a device"),
        ("My Chip", "cannot name a device"),
        ("Pydev", "cannot name a device"),
    ],
)
def test_names_that_cannot_be_taken(name, says):
    with pytest.raises(hs.ConfigError, match=says):
        hs.devices.register(name)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"dtypes": ("int8",)}, "unknown number format 'int8'"),
        ({"dtypes": ()}, "computes in none; list at least one"),
        ({"dtypes": ("bf16",), "slow": ("fp16",)}, r"slow=\['fp16'\] is not among the dtypes"),
        ({"collective": "nosuchccl"}, "collective='nosuchccl' is no backend of torch.distributed"),
    ],
)
def test_wrong_descriptions_are_refused(registered, what, says):
    with pytest.raises(hs.ConfigError, match=says):
        registered(**what)


# --- torch.<name>.amp --------------------------------------------------------------------------------------


def linear_dtype() -> torch.dtype:
    return nn.functional.linear(torch.ones(2, 2, device=NAME), torch.ones(2, 2, device=NAME)).dtype


def test_amp_autocast_takes_enabled_first():
    from torch.pydev.amp import autocast

    with autocast(True):
        assert linear_dtype() is torch.bfloat16
        with autocast(False):
            assert linear_dtype() is torch.float32
    with autocast(True, torch.float16):
        assert linear_dtype() is torch.float16
    assert autocast(dtype=torch.float16)(linear_dtype)() is torch.float16
    assert linear_dtype() is torch.float32
    with pytest.raises(hs.ConfigError, match=r"takes enabled first, was given torch.float16"):
        autocast(torch.float16)


def test_the_course_loop_trains_with_and_without_amp():
    x, y = torch.randn(32, 8, device=NAME), torch.randint(0, 3, (32,), device=NAME)
    for amp in (True, False):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(NAME)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.pydev.amp.GradScaler(enabled=amp)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            with torch.pydev.amp.autocast(amp):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < losses[0] * 0.9
        assert scaler.is_enabled() is amp


def test_the_scaler_uses_the_vendors_kernels_and_pickles():
    python_device.calls.clear()
    weight = nn.Parameter(torch.ones(3, device=NAME))
    scaler, optimizer = (
        torch.pydev.amp.GradScaler(1024.0, growth_interval=1),
        torch.optim.SGD([weight], lr=0.1),
    )
    scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer).taken
    scaler.update()
    assert python_device.calls == ["finite_check", "update_scale"]
    assert scaler.get_scale() == 2048.0
    again = pickle.loads(pickle.dumps(scaler))
    assert type(again) is torch.pydev.amp.GradScaler
    assert again.get_scale() == 2048.0


def test_custom_functions_find_the_device():
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.pydev.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.pydev.amp.custom_bwd
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, device=NAME, dtype=torch.bfloat16, requires_grad=True)
    with torch.pydev.amp.autocast():
        out = Twice.apply(x)
    assert out.dtype is torch.float32
    out.sum().backward()
    assert x.grad.tolist() == [2, 2]


# --- the whole of halfstep ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_one_pass_optimizer_trains_here_as_on_the_cpu(dtype):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    last = {}
    for where in ("cpu", NAME):
        model = copy.deepcopy(plain).to(where)
        session = hs.prepare(model, hs.optim.AdamW(model.parameters(), lr=1e-2), level="O2", dtype=dtype)
        for _ in range(5):
            with session.autocast():
                loss = nn.functional.cross_entropy(model(x.to(where)), y.to(where))
            session.backward(loss)
            assert session.step(clip_norm=1.0).taken
        last[where] = loss.item()
    assert last[NAME] == pytest.approx(last["cpu"], rel=0.02)


def test_the_trainer_fits_checkpoints_and_resumes_here(tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    losses = []
    for epochs in (1, 2):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(NAME)
        trainer = Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            nn.CrossEntropyLoss(),
            level="O2",
            dtype="fp16",
            checkpoints=tmp_path,
            checkpoint_every=4,
        )
        loader = torch.utils.data.DataLoader(data, 16)
        losses += [log.loss for log in trainer.fit(loader, epochs=epochs, resume=True).steps]
    assert trainer.step == 8
    assert sum(losses[-4:]) < sum(losses[:4])


def test_code_that_names_torch_autocast_can_be_made_ours():
    from halfstep.compat.torch_amp import install

    a = torch.ones(2, 2, device=NAME)
    with install(), torch.autocast(NAME, torch.bfloat16):
        assert torch.mm(a, a).dtype is torch.bfloat16
    with torch.autocast(NAME, torch.bfloat16):
        assert torch.mm(a, a).dtype is torch.float32


# --- the battery -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_device_conforms(dtype):
    checks = list(run_battery(NAME, ["O1", "O2"], [dtype]))
    assert [c for c in checks if c.status == "fails"] == []
    assert {c.group for c in checks} == set(GROUPS)
    casting_checks = [c for c in checks if c.group == "casting"]
    assert sum(c.status == "passes" for c in casting_checks) > 0.9 * len(casting_checks)
    assert {c.name: c.detail for c in checks}["finite check"] == "the vendor's kernel"


def wrong_exp(monkeypatch):
    """Our own table says FULL; the machinery runs it LOW."""
    kept = casts.runner

    def runner(site, row, *rest):
        return kept(site, OpRow("exp", Rule.LOW, "") if site.name == "exp" else row, *rest)

    monkeypatch.setattr(casts, "runner", runner)


def declare_kernels(monkeypatch, **kernels):
    made = dataclasses.replace(hs.devices.declared(NAME), **kernels)
    monkeypatch.setattr(hs.devices, "declared", lambda name: made)


def blind_to_nan(monkeypatch):
    def check(grads, found_inf, inv_scale):
        for grad in grads:
            if bool(to_host(grad).isinf().any()):
                found_inf.fill_(1.0)
            grad.copy_(grad.float() * inv_scale)

    declare_kernels(monkeypatch, finite_check=check)


def never_backs_off(monkeypatch):
    def update(scale, tracker, found_inf, growth, backoff, interval):
        python_device.update_scale(scale, tracker, found_inf * 0, growth, backoff, interval)

    declare_kernels(monkeypatch, update_scale=update)


def leaky_masters(monkeypatch):
    from halfstep.optim.masters import MasterWeights

    kept = MasterWeights.params
    monkeypatch.setattr(MasterWeights, "params", lambda self: [p.bfloat16().float() for p in kept(self)])


def forgets_the_scale(monkeypatch):
    kept = hs.Session.load_state_dict

    def load(self, state):
        fresh = self.loss_scale
        kept(self, state)
        self.loss_scale = fresh

    monkeypatch.setattr(hs.Session, "load_state_dict", load)


def noisy_products(monkeypatch):
    monkeypatch.setattr(python_device, "product_error", 0.5)


@pytest.fixture
def restored(monkeypatch):
    yield
    monkeypatch.undo()
    python_device.register()


@pytest.mark.parametrize(
    ("break_it", "groups", "named"),
    [
        (wrong_exp, GROUPS, {"exp fp16"}),
        (blind_to_nan, ["scaling"], {"finite check", "scale follows the rule, bad steps are skipped"}),
        (never_backs_off, ["scaling"], {"scale update", "scale follows the rule, bad steps are skipped"}),
        (leaky_masters, ["masters"], {"small updates add up O2 fp16"}),
        (forgets_the_scale, ["state"], {"saved and resumed O2 fp16"}),
        (noisy_products, ["models"], {"MLP O2 fp16", "CNN O2 fp16", "transformer O2 fp16"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_thing_broken_on_purpose_fails_and_is_named(monkeypatch, restored, break_it, groups, named):
    python_device.register()
    break_it(monkeypatch)
    assert set(failures(levels=["O2"], dtypes=["fp16"], only=groups)) == named


@pytest.mark.parametrize("dtype", list(battery.TOLERANCES), ids=str)
def test_a_device_is_not_compared_with_itself(dtype):
    details = [c.detail for c in run_battery(NAME, ["O1"], [dtype], only=["models"])]
    assert len(details) == 3
    assert not [d for d in details if "gradients within 0.0e+00" in d]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"only": ["speed"]}, "unknown group speed; expected one of casting, numbers"),
        ({"dtypes": ["fp32"]}, "checks bf16 and fp16, was asked for fp32"),
        ({"levels": ["O7"]}, "unknown level 'O7'"),
    ],
)
def test_wrong_requests_are_refused(what, says):
    with pytest.raises(hs.ConfigError, match=says):
        failures(**what)
