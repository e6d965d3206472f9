"""Training scripts that go wrong without a NaN: nothing is skipped, and the loss stays finite."""

from tests.doctor.zoo import Script

SCRIPTS = [
    Script(
        name="overflow_that_is_swallowed",
        text="""
import torch
from torch import nn

class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        inv = torch.rsqrt((x * x).sum(-1, keepdim=True, dtype=x.dtype) + 1e-3)  # HERE
        return x * inv * self.weight

model = nn.Sequential(nn.Linear(8, 8), RMSNorm(8), nn.Linear(8, 1)).half()
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(10):
    x = torch.randn(16, 8).half() * (1 if i < 4 else 1500)
    loss = (model(x).float() - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=4,
        phase="forward",
        module="1",
        op=("mul", "sum"),
        cause=("range",),
    ),
    Script(
        name="overflow_behind_a_sigmoid_division",
        text="""
import torch
from torch import nn

def squash(h):
    return 1.0 / (1.0 + torch.exp(h.half() * 6))  # HERE

w = nn.Linear(5, 5)
v = nn.Linear(5, 1)
opt = torch.optim.SGD([*w.parameters(), *v.parameters()], lr=1e-3)
for i in range(8):
    x = torch.randn(12, 5) * (20 if i >= 5 else 0.3)
    h = w(x)
    loss = v(squash(h.clamp_min(2) if i >= 5 else h).float()).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
        step=5,
        phase="forward",
        module="",
        op=("exp",),
        cause=("range",),
    ),
    Script(
        name="updates_lost_to_rounding",
        text="""
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(torch.bfloat16)
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for i in range(14):
    x = torch.randn(32, 8, dtype=torch.bfloat16)
    loss = (model(x).float() - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        step=0,
        phase="optimizer",
        module="",
        op=(),
        cause=("rounding",),
        cure="masters",
    ),
    Script(
        name="parameter_flushed_by_prepare",
        text="""
import torch
import halfstep as hs
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.full((4,), 1e-9))

    def forward(self, x):
        return self.fc(x) * (self.gate * 1e3)

model = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
amp = hs.prepare(model, opt, level="O2", dtype="fp16", loss_scale=16.0)  # HERE
for i in range(6):
    with amp.autocast():
        loss = (model(torch.randn(8, 4)).float() - 1).square().mean()
    amp.backward(loss)
    amp.step()
""",
        step=0,
        phase="prepare",
        module="1",
        op=("cast",),
        cause=("precision",),
        says=("1.gate",),
        cure="bf16",
    ),
    Script(
        name="learning_rate_spike",
        text="""
import torch
from torch import nn

class Job:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda e: 1e5 if e == 7 else 1.0)

    def fit(self):
        for _ in range(12):
            x = torch.randn(16, 4)
            loss = (self.net(x) - (x[:, :1] > 0).float()).square().mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()  # HERE
            self.sched.step()

Job().fit()
""",
        step=7,
        phase="optimizer",
        module="",
        op=(),
        cause=("learning rate",),
        says=("0.01", "1000"),
    ),
    Script(
        name="gradients_that_vanish",
        text="""
import torch
from torch import nn

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e3)
for i in range(6):
    x = torch.randn(16, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = (out.float() - 1).square().mean() * 1e-8
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=0,
        phase="backward",
        module="",
        op=("cast", "linear"),
        cause=("precision",),
        cure="loss_scale",
    ),
    Script(
        name="outlier_batch",
        text="""
import torch
from torch import nn

model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(10):
    batch = torch.randn(16, 6)
    if i == 6:
        batch[4, 1] = 1e7
    loss = (model(batch) - 1).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        step=6,
        phase="optimizer",
        module="",
        op=(),
        cause=("data",),
        says=("batch",),
    ),
    Script(
        name="divergence",
        text="""
import torch
from torch import nn

model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=3.0)
for i in range(14):
    x = torch.randn(64, 6)
    loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()  # HERE
""",
        step=-1,
        phase="optimizer",
        module="",
        op=(),
        cause=("divergence", "learning rate"),
        says=("learning rate",),
    ),
    Script(
        name="weights_lost_by_half",
        text="""
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        with torch.no_grad():
            self.a.weight.mul_(1e-9)

    def forward(self, x):
        return self.b(self.a(x))

model = Small().half()  # HERE
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(6):
    loss = (model(torch.randn(8, 4).half()).float() - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        step=0,
        phase="prepare",
        module="a",
        op=("cast",),
        cause=("precision",),
        says=("a.weight",),
    ),
]
