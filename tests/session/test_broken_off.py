"""A backward that breaks off leaves no gradients, so that the next step is that of a run without it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import CheckpointError, HalfstepError

SETTINGS = [("O0", None), ("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]


class Breaks(torch.autograd.Function):
    """As it is; backward raises `error` where there is one."""

    error: BaseException | None = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Breaks.error is not None:
            raise Breaks.error
        return grad


@pytest.fixture(autouse=True)
def whole():
    Breaks.error = None
    yield
    Breaks.error = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(Breaks.apply(F.gelu(self.first(x))))


def backward(net, amp, at, *named, **options):
    with amp.autocast():
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(at))
        loss = net(x).float().square().mean()
    amp.backward(loss, *named, **options)


def broken(net, amp, at, *named, error=KeyboardInterrupt, **options):
    Breaks.error = error("stop")
    with pytest.raises(error, match="stop") as found:
        backward(net, amp, at, *named, **options)
    Breaks.error = None
    assert "were cleared" in "".join(found.value.__notes__)


def weights(net, optimizer):
    return [value.clone() for value in hs.optim.fp32_state_dict(net, optimizer).values()]


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(("level", "dtype"), SETTINGS)
def test_the_next_step_is_that_of_a_run_without_it(level, dtype, ours, tmp_path):
    """The gradients of layers that it had reached used to be added to the next backward's."""
    ends = []
    for breaks in (False, True):
        net = Net()
        kind = hs.optim.SGD if ours else torch.optim.SGD
        optimizer = kind(net.parameters(), lr=0.1, momentum=0.9)
        amp = hs.prepare(net, optimizer, level=level, dtype=dtype, kernels="native", **SCALE.get(dtype, {}))
        for step in range(3):
            if breaks and step:
                backward(net, amp, 7)  # a micro-batch before it is a part of the same sum
                broken(net, amp, 8, error=(RuntimeError, KeyboardInterrupt)[step - 1])
                amp.save(tmp_path / str(step))
                with pytest.raises(HalfstepError, match=r"call backward\(loss\)"):
                    amp.step()
            backward(net, amp, step)
            assert amp.step(clip_norm=1.0).taken
        ends.append(weights(net, optimizer))
    assert all(map(torch.equal, *ends))


SCALE = {"fp16": {"loss_scale": 64.0}}


def test_another_optimizers_gradients_stay():
    nets = [Net(), Net()]
    optimizers = [hs.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    amp = hs.prepare(nets, optimizers, level="O1", dtype="bf16", kernels="native")
    backward(nets[0], amp, 0, optimizers[0])
    broken(nets[1], amp, 1, optimizers[1])
    assert amp.step(optimizers[0]).taken
    assert all(p.grad is None for p in nets[1].parameters())


@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O2", "fp16")])
def test_released_gradients_go_on_after_it_and_can_be_saved(level, dtype, tmp_path):
    """save() used to send to step() or zero_grad(), of which the second did not help."""
    net = Net()
    optimizer = hs.optim.SGD(net.parameters(), lr=0.01, release_gradients=True)
    amp = hs.prepare(net, optimizer, level=level, dtype=dtype, kernels="native", **SCALE.get(dtype, {}))
    backward(net, amp, 0)
    with pytest.raises(CheckpointError, match=r"applied already: call step\(\) first"):
        amp.save(tmp_path / "a")
    amp.step()
    amp.save(tmp_path / "a")
    broken(net, amp, 1)
    amp.save(tmp_path / "b")
    backward(net, amp, 2)
    assert amp.step().taken
    backward(net, amp, 3)
    amp.early_listeners.append(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        amp.step()
    amp.early_listeners.clear()
    backward(net, amp, 4)
    assert amp.step().taken


def test_gradients_of_another_loss_of_the_same_optimizer_are_cleared_too():
    """They were set aside, and put back scaled where the session took them for unscaled."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp = hs.prepare(net, optimizer, level="O1", dtype="fp16", loss_scale=[64.0, 128.0], kernels="native")
    backward(net, amp, 0)
    broken(net, amp, 1, loss_id=1)
    assert all(p.grad is None for p in net.parameters())
    backward(net, amp, 2, loss_id=1)
    right = [p.grad / 128 for p in net.parameters()]
    amp.unscale()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), right))
    assert amp.step().taken
