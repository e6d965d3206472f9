"""Inside a CUDA graph capture what keeps scales and outcomes on the host is refused before it launches."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.errors import UnsupportedError
from halfstep.trainer import Trainer
from tests import falsecuda

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
OPTIMIZERS = {"hs": hs.optim.AdamW, "torch": torch.optim.AdamW}


class Launches(TorchDispatchMode):
    """Every op that reaches the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(op.__name__)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch):
    """From its call on a graph is captured, in which asking for an event or waiting would be an error."""

    def begin(*owners: Any) -> None:
        for owner in owners:
            monkeypatch.setattr(type(owner), "device", torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    return begin


def prepared(kind: str, dtype: str):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters(), lr=0.1), dtype=dtype, kernels="native")
    with amp.autocast():
        loss = model(X).float().square().mean()
    return amp, model, loss


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_session_is_refused_by_name_before_anything_is_launched(kind: str, dtype: str, capture: Any):
    amp, model, loss = prepared(kind, dtype)
    amp.backward(loss, retain_graph=True)
    before, state = [p.detach().clone() for p in model.parameters()], amp.state
    capture(amp)
    calls = {"backward": lambda: amp.backward(loss), "step": amp.step, "unscale": amp.unscale}
    if dtype == "fp16":
        calls["scale"] = lambda: amp.scale(loss)
    for name, call in calls.items():
        with Launches() as launches, pytest.raises(UnsupportedError) as refused:
            call()
        assert str(refused.value).startswith(f"amp.{name}() cannot be captured in a CUDA graph")
        assert "the optimizer's own step()" in str(refused.value)
        assert launches.names == []
    assert amp.state == state
    assert all(map(torch.equal, before, model.parameters()))


def test_after_the_capture_the_session_goes_on(capture: Any, monkeypatch: pytest.MonkeyPatch):
    amp, _, loss = prepared("hs", "bf16")
    with monkeypatch.context():
        capture(amp)
        with pytest.raises(UnsupportedError):
            amp.backward(loss)
    monkeypatch.undo()
    amp.backward(loss)
    assert amp.step().taken


@pytest.mark.parametrize("call", ["unscale_", "step", "update"])
def test_a_grad_scaler_is_refused_too(call: str, monkeypatch: pytest.MonkeyPatch):
    p = nn.Parameter(torch.ones(4))
    optimizer, scaler = hs.optim.SGD([p], lr=0.1), hs.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    monkeypatch.setattr("halfstep.devices.transfer.capturing", lambda device: True)
    arguments = () if call == "update" else (optimizer,)
    with Launches() as launches, pytest.raises(UnsupportedError) as refused:
        getattr(scaler, call)(*arguments)
    assert str(refused.value).startswith(f"scaler.{call}() cannot be captured in a CUDA graph")
    assert launches.names == []


def test_on_a_cpu_nobody_asks_whether_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    def fail() -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    amp, _, loss = prepared("hs", "bf16")
    amp.backward(loss)
    assert amp.step().taken


@pytest.mark.skipif(not falsecuda.installed(), reason="needs the false CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_on_the_device_nothing_is_asked_during_the_capture(kind: str, dtype: str):
    model = nn.Linear(8, 4).cuda()
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters(), lr=0.1), dtype=dtype)
    for captured in (False, False, True, False):
        with amp.autocast():
            loss = model(X.cuda()).float().square().mean()
        if captured:
            with falsecuda.capturing(), falsecuda.recorded_ops() as ops:
                for call in (lambda: amp.backward(loss), amp.step):  # noqa: B023
                    with pytest.raises(UnsupportedError, match="cannot be captured in a CUDA graph"):
                        call()
            assert ops.names == []
        else:
            amp.backward(loss)
            assert amp.step().taken


@pytest.mark.skipif(not falsecuda.installed(), reason="needs the false CUDA device")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_on_the_device_what_reads_values_is_refused_during_the_capture(kind: str, tmp_path: Any):
    """It used to end in torch's own errors, of a load when it was half done."""
    model, x = nn.Linear(8, 4).cuda(), X.cuda()
    amp = hs.prepare(model, OPTIMIZERS[kind](model.parameters(), lr=0.1), level="O2", dtype="fp16")
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)
    outcome = amp.step()
    amp.save(tmp_path / "a")
    other = nn.Linear(8, 4).cuda()
    trainer = Trainer(other, OPTIMIZERS[kind](other.parameters(), lr=0.1), nn.functional.mse_loss, level="O1")

    def evaluate() -> None:
        with amp.evaluating():
            pass

    calls = {
        "amp.state_dict()": amp.state_dict,
        "amp.sync()": amp.sync,
        "amp.save()": lambda: amp.save(tmp_path / "b"),
        "amp.load()": lambda: amp.load(tmp_path / "a"),
        "amp.evaluating()": evaluate,
        "Trainer.fit()": lambda: trainer.fit([(x, x[:, :4])], steps=1),
        "Trainer.evaluate()": lambda: trainer.evaluate([(x, x[:, :4])]),
        "reading the loss scale": lambda: repr(amp),
    }
    with falsecuda.capturing(), falsecuda.recorded_ops() as ops:
        for name, call in calls.items():
            with pytest.raises(UnsupportedError, match="cannot be captured in a CUDA graph") as refused:
                call()
            assert name in str(refused.value)
    assert ops.names == []
    amp.load(tmp_path / "a")
    assert outcome.taken
