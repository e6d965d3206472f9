"""Planted faults: small models that go wrong in one known place, and what the doctor must say about each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep.scaling import StaticLossScale
from halfstep.session import prepare


@dataclass
class Case:
    """A faulty training step with what it needs. `step` returns the loss."""

    model: nn.Module
    step: Callable
    batch: tuple
    session: object = None
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class Fault:
    """`op` may list names: kernels differ between devices."""

    name: str
    build: Callable[[], Case]
    phase: str
    module: str
    op: tuple[str, ...]
    cause: str
    cure: str | None = None
    spoils: str = ""
    underflow: bool = False


def data(n=16, d=8, scale=1.0):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=g) * scale
    return x, (x[:, :1] > 0).float()


def session_case(model, x, y, *, lr=1e-2, loss=None, skip=None, dtype="fp16", scale=None, opt=None):
    """A step through `hs.prepare` at O1."""
    optimizer = (opt or torch.optim.SGD)(model.parameters(), lr=lr)
    amp = prepare(
        model,
        optimizer,
        level="O1",
        dtype=dtype,
        loss_scale=scale or StaticLossScale(8.0),
        skip_nonfinite=skip,
    )
    criterion = loss or (lambda out, target: F.mse_loss(out.float(), target))

    def step(x, y):
        with amp.autocast():
            value = criterion(model(x), y)
        amp.backward(value)
        amp.step()
        return value.detach()

    return Case(model, step, (x, y), amp, optimizer)


class Attention(nn.Module):
    def __init__(self, d, gain):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.gain = gain

    def forward(self, x):
        q, k = self.q(x) * self.gain, self.k(x) * self.gain
        logits = torch.matmul(q, k.transpose(-2, -1))
        return torch.matmul(torch.softmax(logits * self.gain**-2, -1), self.v(x))


def attention_logits():
    model = nn.Sequential(nn.Linear(8, 8), Attention(8, 700.0), nn.Linear(8, 1))
    return session_case(model, *data())


class Residual(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x):
        h = self.up(x) * self.gain
        return h + x


def residual_stream():
    def grown(x):
        return x / 60000

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(8, 8)
            self.blocks = nn.Sequential(*[Residual(1.0) for _ in range(3)])
            self.norm = nn.LayerNorm(8)
            self.out = nn.Linear(8, 1)
            with torch.no_grad():
                for layer in (self.inp, *[b.up for b in self.blocks]):
                    layer.weight.fill_(0.0).fill_diagonal_(1.0)
                    layer.bias.zero_()

        def forward(self, x):
            return self.out(self.norm(self.blocks(self.inp(x))))

    x, y = data()
    return session_case(Net(), x.clamp(-3, 3) / 3 * 12000, y)


class HandNorm(nn.Module):
    def __init__(self, eps=1e-3):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True).to(x.dtype)
        var = (x * x).mean(-1, keepdim=True)
        return x / (var + self.eps).sqrt().to(x.dtype)


def handwritten_variance():
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), HandNorm(), nn.Linear(8, 1))
    return session_case(model, *data(scale=900.0))


def loss_overflow():
    def loss(out, target):
        return ((out - target.half()) * 3e4).abs().mean() * 1e-4

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        model[2].bias.fill_(4.0)
    return session_case(model, *data(), loss=loss)


def backward_only():
    """Finite gradients come in, but the weight gradient of the last layer sums too much for fp16."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    x, y = data(scale=50.0)
    return session_case(model, x, y * 20, scale=StaticLossScale(2.0**12), lr=1e-5)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g / (x - x)


class Clip(nn.Module):
    def forward(self, x):
        return _Clipped.apply(x)


def custom_function():
    model = nn.Sequential(nn.Linear(8, 8), Clip(), nn.Linear(8, 1))
    return session_case(model, *data(), skip=True)


def underflow():
    """Gradients of about 1e-10: zero in fp16 without a loss scale."""

    def loss(out, target):
        return F.mse_loss(out.float(), target) * 1e-7

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return session_case(model, *data(), loss=loss, lr=1e5, scale=StaticLossScale(2.0))


class Normalised(nn.Module):
    def forward(self, x):
        return x / x.sum(-1, keepdim=True)


def division_by_zero():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Normalised(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias.fill_(0.3)
    x, y = data()
    x[3] = 0
    with torch.no_grad():
        model[0].bias.copy_(-model[0].bias.abs() * 0)
    return session_case(model, x, y, dtype="bf16", skip=True)


def nan_in_data():
    x, y = data()
    x[2, 5] = float("nan")
    return session_case(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), x, y)


class TinyEps(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.relu(self.lin(x))
        top = h.amax(-1, keepdim=True)
        return h / (top + 1e-8)


def bad_epsilon():
    model = nn.Sequential(TinyEps(), nn.Linear(8, 1))
    x, y = data()
    x[3] = 0
    with torch.no_grad():
        model[0].lin.bias.zero_()
    return session_case(model, x, y)


def batch_norm_statistics():
    """One batch of huge values: the variance leaves fp32 and stays in the running statistics for good."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
    return session_case(model, *data(scale=1e20), dtype="bf16", skip=True)


def optimizer_state():
    """Everything in fp16, no masters: the square of a gradient of 2000 does not fit Adam's second moment."""
    model = nn.Sequential(nn.Linear(8, 1)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.5), foreach=False)
    x, y = data(scale=50.0)

    def step(x, y):
        loss = (model(x.half()).float() - y * 100).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(model, step, (x, y), None, optimizer)


class Block(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x):
        h = torch.exp(self.fc(x).half() * self.gain) if self.gain else self.fc(x)
        return torch.log1p(h)


class Big(nn.Module):
    """Squares in fp16 what the layer gives."""

    def __init__(self, gain):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x):
        h = self.fc(x) * self.gain
        return torch.sqrt(h * h + 1.0)


class Checkpointed(nn.Module):
    def __init__(self, block, reentrant):
        super().__init__()
        self.inp, self.block, self.out = nn.Linear(8, 8), block, nn.Linear(8, 1)
        self.reentrant = reentrant

    def forward(self, x):
        h = checkpoint(self.block, self.inp(x), use_reentrant=self.reentrant)
        return self.out(h / 100)


def in_checkpoint():
    return session_case(Checkpointed(Big(1500.0), False), *data(), lr=1e-5)


class _Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g.half() * 60000.0 * 60000.0


class InCheckpointBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return _Explodes.apply(self.fc(x))


def checkpoint_backward():
    return session_case(Checkpointed(InCheckpointBackward(), True), *data(), skip=True, lr=1e-11)


class Forgetful(nn.Module):
    """Divides by a counter that is zero only when forward runs a second time."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        again = torch._C._current_graph_task_id() != -1
        h = torch.tanh(self.fc(x))
        return h * (h / (0.0 if again else 1.0))


def recomputation():
    return session_case(Checkpointed(Forgetful(), False), *data(), dtype="bf16", skip=True)


class Functional(nn.Module):
    """The fault lies between modules, in plain code."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 1)})

    def forward(self, x):
        h = self.body["a"](x)
        h = torch.mul(h, 40000.0) * 8
        return self.body["b"](h / h.abs().amax())


def between_modules():
    return session_case(Functional(), *data())


def log_of_zero():
    def loss(out, target):
        p = torch.softmax(out.float() * 300, -1)
        return -(torch.log(p) * F.one_hot(target.long().view(-1), 2)).sum(-1).mean()

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return session_case(model, *data(), loss=loss, dtype="bf16", skip=True)


class Length(nn.Module):
    def forward(self, x):
        return torch.sqrt((x * x).sum(-1, keepdim=True))


def sqrt_gradient():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Length(), nn.Linear(1, 1))
    x, y = data()
    x[3] = 0
    return session_case(model, x, y, dtype="bf16", skip=True)


class Trap(nn.Module):
    """`where` hides the inf in forward; backward multiplies it by zero."""

    def forward(self, x):
        safe = x * (x > 0)
        return torch.where(safe > 0, 1 / safe, torch.zeros_like(safe)).clamp(max=2)


def where_trap():
    model = nn.Sequential(nn.Linear(8, 8), Trap(), nn.Linear(8, 1))
    return session_case(model, *data(), dtype="bf16", skip=True)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        scores = self.fc(x).masked_fill(x < -0.5, float("-inf"))
        return torch.softmax(scores, -1)


def masked_row():
    x, y = data()
    x[3] = -1.0
    return session_case(nn.Sequential(Masked(), nn.Linear(8, 1)), x, y, dtype="bf16", skip=True)


def spoiled_weight():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    return session_case(model, *data())


FAULTS = [
    Fault("attention_logits", attention_logits, "forward", "1", ("matmul",), "range", "full"),
    Fault("residual_stream", residual_stream, "forward", "blocks.2", ("add",), "range", "full"),
    Fault("handwritten_variance", handwritten_variance, "forward", "2", ("mul",), "range", "full"),
    Fault("loss_overflow", loss_overflow, "forward", "", ("mul",), "range", "full"),
    Fault("backward_only", backward_only, "backward", "2", ("linear",), "range", "loss_scale"),
    Fault("custom_function", custom_function, "backward", "1", ("div",), "mathematics"),
    Fault("underflow", underflow, "backward", "", ("cast",), "precision", "loss_scale", underflow=True),
    Fault("division_by_zero", division_by_zero, "forward", "2", ("div",), "mathematics", "clamp"),
    Fault("nan_in_data", nan_in_data, "forward", "0", ("linear", "cast"), "data"),
    Fault("bad_epsilon", bad_epsilon, "forward", "0", ("div",), "precision", "epsilon"),
    Fault(
        "batch_norm_statistics",
        batch_norm_statistics,
        "forward",
        "0",
        ("batch_norm",),
        "range",
        spoils="0.running_var",
    ),
    Fault(
        "optimizer_state",
        optimizer_state,
        "optimizer",
        "",
        ("addcmul",),
        "range",
        "masters",
        "0.weight.exp_avg_sq",
    ),
    Fault("in_checkpoint", in_checkpoint, "forward", "block", ("mul",), "range", "full"),
    Fault("checkpoint_backward", checkpoint_backward, "backward", "block", ("mul",), "range", "loss_scale"),
    Fault("recomputation", recomputation, "recompute", "block", ("div",), "mathematics"),
    Fault("between_modules", between_modules, "forward", "", ("mul",), "range", "full"),
    Fault("log_of_zero", log_of_zero, "forward", "", ("log",), "mathematics", "clamp"),
    Fault("sqrt_gradient", sqrt_gradient, "backward", "1", ("sqrt",), "mathematics", "clamp"),
    Fault("where_trap", where_trap, "forward", "1", ("div", "reciprocal"), "mathematics", "clamp"),
    Fault("masked_row", masked_row, "forward", "0", ("softmax",), "mathematics"),
    Fault("spoiled_weight", spoiled_weight, "forward", "2", ("linear", "cast"), "weights"),
]
