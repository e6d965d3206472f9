"""Apex's documents as their users write them: the four levels by the table, the DCGAN with three losses."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from halfstep.compat.apex import amp

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
F16, F32 = torch.float16, torch.float32


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _taken_down():
    yield
    amp.shutdown()


# weights, batch norm, statistics, gradients of weights, of batch norm, masters, output, checkpoint
TABLE = {
    "O0": (F32, F32, F32, F32, F32, F32, F32, F32),
    "O1": (F32, F32, F32, F32, F32, F32, F16, F32),
    "O2": (F16, F32, F32, F16, F32, F32, F32, F32),
    "O3": (F16, F16, F16, F16, F16, F16, F32, F32),
}
OPTIONS = {
    "O0": (F32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (F16, False, True, True, "dynamic"),
    "O3": (F16, False, False, False, 1.0),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 64, 10)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


@pytest.mark.parametrize("opt_level", TABLE)
def test_dtypes_equal_the_table(opt_level):
    weights, norm, statistics, grads, norm_grads, masters, output_dtype, checkpoint = TABLE[opt_level]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    for _ in range(2):
        optimizer.zero_grad()
        output = model(torch.randn(8, 1, 8, 8))
        loss = nn.functional.cross_entropy(output, torch.randint(10, (8,)))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            assert model.fc.weight.grad.dtype == grads
        assert loss.dtype == F32
        assert {model.conv.weight.dtype, model.fc.weight.dtype, model.fc.bias.dtype} == {weights}
        assert model.bn.weight.dtype == norm
        assert model.bn.running_mean.dtype == statistics
        # Where there are masters, a weight has its master's gradient after scale_loss: unscaled, in fp32.
        unscaled = F32 if opt_level == "O2" else grads
        assert {model.conv.weight.grad.dtype, model.fc.weight.grad.dtype} == {unscaled}
        assert model.bn.weight.grad.dtype == norm_grads
        assert {p.dtype for p in amp.master_params(optimizer)} == {masters}
        assert {p.grad.dtype for p in amp.master_params(optimizer)} == {masters}
        assert output.dtype == output_dtype
        optimizer.step()
    assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} == {checkpoint}
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {masters}


@pytest.mark.parametrize("opt_level", OPTIONS)
def test_defaults_equal_the_table(opt_level):
    amp.initialize(Net(), opt_level=opt_level, verbosity=0)
    options = amp._amp_state.opt_properties.options
    names = (
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
    )
    assert tuple(options[name] for name in names) == OPTIONS[opt_level]


@pytest.mark.parametrize(("opt_level", "expected"), [("O1", F16), ("O2", F16), ("O3", F16), ("O0", F16)])
def test_cast_model_outputs_overrides_the_level(opt_level, expected):
    model = amp.initialize(Net(), opt_level=opt_level, cast_model_outputs=F16, verbosity=0)
    assert model(torch.randn(2, 1, 8, 8)).dtype == expected


def test_checkpoints_go_between_levels_without_loss():
    torch.manual_seed(0)
    exact = Net()
    model = Net()
    model.load_state_dict(exact.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    saved = model.state_dict()
    assert all(torch.equal(saved[k], v) for k, v in exact.state_dict().items())


def test_saving_and_loading_as_the_readme_shows(tmp_path):
    model, optimizer = Net(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save(checkpoint, tmp_path / "amp_checkpoint.pt")
    assert checkpoint["amp"] == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}
    amp.shutdown()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    checkpoint = torch.load(tmp_path / "amp_checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])


@pytest.mark.parametrize("opt_level", TABLE)
def test_the_levels_train(opt_level):
    row = example("apex_levels").train(opt_level, steps=40)
    assert row["accuracy"] > 0.85


def test_the_overrides_of_apexs_scripts():
    row = example("apex_levels").train("O2", 5, loss_scale="128.0", keep_batchnorm_fp32="False")
    assert row["scale"] == 128.0
    assert row["parameters"] == "float16"


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_dcgan_trains_and_an_inf_skips_only_the_optimizer_that_uses_it(opt_level):
    injected = {18: "G", 21: "G", 24: "D"}
    seen = example("apex_dcgan").train(opt_level, steps=30, inject_overflow=injected, verbosity=0)
    assert seen["moved"] == [{"D": True, "G": False}, {"D": True, "G": False}, {"D": False, "G": True}]
    assert len(set(seen["scales"])) == 3
    assert seen["scales"][0] > seen["scales"][1] > seen["scales"][2]
    assert seen["lossD"][-1] < seen["lossD"][0]
    assert seen["finite"]
    assert seen["spread"] > 0.01
