"""Scripts that end well and are wrong: averages, sums and gradients that lose their low bits."""

from tests.doctor.people import Project

AVERAGED = (
    ("ema", "average", "averag", "shadow"),
    ("bf16", "bfloat16", "fp16", "float16", "16 bits", "16-bit", "rounding", "rounds"),
)

PROJECTS = [
    Project(
        "average_by_copy_in_half",
        {
            "train.py": """\
import torch
from torch import nn

from ema import EMA

torch.manual_seed(31)
net = nn.Sequential(nn.Linear(8, 48), nn.SiLU(), nn.Linear(48, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
ema = EMA(net, decay=0.9999)
start = [p.detach().clone() for p in net.parameters()]
for step in range(20):
    x = torch.randn(64, 8)
    loss = nn.functional.mse_loss(net(x), x[:, :1] * x[:, 1:2])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    ema.update(net)
moved = sum((p - q).abs().sum().item() for p, q in zip(net.parameters(), start))
print(f"weights moved by {moved:.3f}, their average by {ema.distance(start):.5f}")
""",
            "ema.py": """\
import torch


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = [p.detach().half() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow, model.parameters()):
            s.copy_(self.decay * s + (1 - self.decay) * p.half())  # HERE

    def distance(self, start):
        return sum((s.float() - q.half().float()).abs().sum().item() for s, q in zip(self.shadow, start))
""",
        },
        says=AVERAGED,
    ),
    Project(
        "averaged_model_in_bfloat16",
        {
            "train.py": """\
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn


def build():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))


def main():
    torch.manual_seed(32)
    net = build()
    averaged = AveragedModel(net, avg_fn=get_ema_avg_fn(0.999)).bfloat16()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(20):
        x = torch.randn(64, 10)
        y = x[:, :4].argmax(1)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaged.update_parameters(net)  # HERE
    torch.save(averaged.module.state_dict(), "averaged.pt")
    print(f"saved the average; last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
"""
        },
        steps=0,
        says=AVERAGED,
        files_written=("averaged.pt",),
    ),
    Project(
        "mean_of_three_thousand_losses_in_half",
        {
            "train.py": """\
import torch
from torch import nn


class AverageMeter:
    def __init__(self):
        self.total = torch.zeros((), dtype=torch.float16)
        self.count = 0

    def update(self, value):
        self.total += value.detach().half()  # HERE
        self.count += 1

    @property
    def mean(self):
        return self.total.item() / self.count


torch.manual_seed(33)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
meter = AverageMeter()
for step in range(3000):
    x = torch.randn(128, 4)
    loss = nn.functional.mse_loss(net(x), x[:, :1] + 0.95 * torch.randn(128, 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    meter.update(loss)
    if step % 500 == 499:
        print(f"step {step + 1}: mean loss {meter.mean:.4f}")
"""
        },
        steps=0,
        says=(("fp16", "float16", "half"), ("total", "sum", "mean", "average")),
    ),
    Project(
        "five_hundred_micro_batches_in_bfloat16",
        {
            "train.py": """\
import torch
from torch import nn

MICRO = 512

torch.manual_seed(34)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).bfloat16()
masters = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.02)
for step in range(3):
    reported = 0.0
    for _ in range(MICRO):
        x = torch.randn(4, 6).bfloat16()
        y = 3 + x[:, :1]
        loss = nn.functional.mse_loss(model(x), y) / MICRO
        loss.backward()  # HERE
        reported += loss.item()
    for p, master in zip(model.parameters(), masters):
        master.grad, p.grad = p.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters):
            p.copy_(master)
    norm = sum(m.grad.norm() ** 2 for m in masters) ** 0.5
    print(f"step {step}: loss {reported:.4f}, gradient norm {norm:.4f}")
"""
        },
        says=(
            ("bf16", "bfloat16", "16 bits", "16-bit"),
            ("accumul", "micro", "gradient"),
        ),
    ),
    Project(
        "float16_without_a_scaler",
        {
            "train.py": """\
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, width))

    def forward(self, x):
        return self.inner(x)


def residuals(x):
    return 1e-3 * torch.sin(x)


torch.manual_seed(35)
net = Residual(128)
nn.init.zeros_(net.inner[2].weight)
nn.init.zeros_(net.inner[2].bias)
opt = torch.optim.SGD(net.parameters(), lr=500.0, momentum=0.9)
for step in range(16):
    x = torch.randn(256, 128)
    with torch.autocast("cpu", dtype=torch.float16):  # HERE
        loss = 0.02 * nn.functional.mse_loss(net(x), residuals(x))
    opt.zero_grad()
    loss.backward()  # HERE
    opt.step()
    norm = sum(p.grad.norm().item() for p in net.parameters())
    print(f"{step:2d} loss {loss.item():.3e} gradient {norm:.2e}")
"""
        },
        says=(
            ("scaler", "loss scale", "loss_scale"),
            ("underflow", "zero", "flush", "without", "no gradscaler", "no loss"),
        ),
    ),
]
