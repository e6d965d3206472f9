"""Scripts that look at their loss before backward, and end a step, a loop or themselves when it is bad."""

from tests.doctor.people import Project


def _customers():
    """A table of 96 rows in which one age is missing."""
    rows = ["age,visits,spent,left"]
    for i in range(96):
        age, visits, spent = 20 + (i * 7) % 50, (i * 5) % 11, (i * 13) % 37
        rows.append(f"{age if i != 77 else ''},{visits},{spent}.5,{int(visits < 4)}")
    return "\n".join(rows) + "\n"


PROJECTS = [
    Project(
        "package_that_breaks_at_a_missing_age",
        {
            "churn/train.py": """\
import csv

import torch
from torch import nn

from .data import batches
from .model import Churn


def main():
    torch.manual_seed(0)
    net = Churn()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()
    history = []
    for i, (x, y) in enumerate(batches("customers.csv", size=8)):
        loss = criterion(net(x), y)  # HERE
        if not torch.isfinite(loss):
            print(f"batch {i}: loss is {loss.item()}, stopping")
            break
        opt.zero_grad()
        loss.backward()
        opt.step()
        history.append((i, f"{loss.item():.6f}"))
    with open("history.csv", "w", newline="") as f:
        csv.writer(f).writerows([("batch", "loss"), *history])
    torch.save(net.state_dict(), "churn.pt")
    print(f"trained on {len(history)} batches")


if __name__ == "__main__":
    main()
""",
            "churn/__init__.py": "",
            "churn/data.py": """\
import csv
import math

import torch


def number(text):
    return float(text) if text else math.nan


def batches(path, size):
    with open(path, newline="") as f:
        rows = [[number(v) for v in row] for row in list(csv.reader(f))[1:]]
    table = torch.tensor(rows)
    for part in table.split(size):
        yield part[:, :3] / torch.tensor([70.0, 10.0, 37.0]), part[:, 3:]
""",
            "churn/model.py": """\
import torch
from torch import nn


class Churn(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.hidden = nn.Linear(3, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))  # HERE
""",
            "customers.csv": _customers(),
        },
        module="churn.train",
        step=10,
        says=(("nan",), ("data", "batch 10", "input", "in x")),
        files_written=("history.csv", "churn.pt"),
    ),
    Project(
        "every_fourth_batch_is_dropped",
        {
            "train.py": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x = torch.randn(49, 6)
y = x[:, :1] + 0.5 * x[:, 1:2] + 0.1 * torch.randn(49, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=16)


class Standardise(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-6)  # HERE


net = nn.Sequential(Standardise(), nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
dropped = 0
for epoch in range(5):
    running, seen = 0.0, 0
    for xb, yb in loader:
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(xb), yb)
        if torch.isnan(loss):
            dropped += 1
            continue
        loss.backward()
        opt.step()
        running += loss.item()
        seen += 1
    print(f"epoch {epoch}: loss {running / seen:.4f} ({dropped} batches dropped so far)")
"""
        },
        step=4,
        says=(
            ("std",),
            (
                "one value",
                "one row",
                "one sample",
                "single",
                "of 1",
                "size 1",
                "unbiased",
                "correction",
                "freedom",
            ),
        ),
    ),
    Project(
        "fit_that_raises",
        {
            "train.py": """\
import logging

import torch
from torch import nn

from features import describe

log = logging.getLogger("forecast")


class Forecaster:
    def __init__(self, lr=1e-2):
        self.net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.history = []

    def fit(self, loader, epochs=1):
        for epoch in range(epochs):
            for i, (window, target) in enumerate(loader):
                loss = self.step(window, target)
                log.info("epoch %d batch %d loss %.5f", epoch, i, loss)
                self.history.append(loss)
        return self

    def step(self, window, target):
        self.optimizer.zero_grad()
        out = self.net(describe(window))
        loss = nn.functional.smooth_l1_loss(out, target)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss became {loss.item()} after {len(self.history)} batches")
        loss.backward()
        self.optimizer.step()
        return loss.item()


def pressures(batches=14, size=12):
    g = torch.Generator().manual_seed(5)
    for i in range(batches):
        window = 1003.3 + 5 * torch.randn(size, 24, generator=g)
        if i == 6:
            window[3:6] = 1003.3  # the sensor was stuck
        yield window, (window[:, -1:] - 1003.3) / 5


if __name__ == "__main__":
    handler = logging.FileHandler("fit.log", mode="w")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    torch.manual_seed(0)
    Forecaster().fit(pressures())
    log.info("done")
""",
            "features.py": """\
import torch


def spread(x):
    mean = x.mean(1, keepdim=True)
    return ((x * x).mean(1, keepdim=True) - mean * mean).sqrt()  # HERE


def describe(window):
    return torch.cat([(window.mean(1, keepdim=True) - 1000) / 10, spread(window)], dim=1)
""",
        },
        step=7,
        says=(
            ("sqrt",),
            ("negative", "below zero", "below 0", "cancel", "less than 0", "rounding", "precision", "-0."),
        ),
        files_written=("fit.log",),
        exit_code=1,
    ),
    Project(
        "assert_before_backward",
        {
            "train.py": """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-2, -1)  # HERE
        return scores.softmax(-1) @ v


class Tagger(nn.Module):
    def __init__(self, width=64, tags=5):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.attend = Attention(width)
        self.head = nn.Linear(width, tags)

    def forward(self, x):
        h = self.embed(x)
        return self.head(h + self.attend(h))


def main():
    torch.manual_seed(11)
    net = Tagger()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(12):
        x = 3 * torch.randn(4, 10, 8)
        if step == 7:
            x[1] *= 60  # a long document: counts are not normalised
        y = torch.randint(0, 5, (4, 10))
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        assert torch.isfinite(loss), f"step {step}: loss {loss.item()}"
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        print(step, round(loss.item(), 4))


main()
"""
        },
        step=8,
        says=(("fp16", "float16", "half"), ("overflow", "65504", "65,504", "range", "too large", "times")),
        exit_code=1,
    ),
    Project(
        "sys_exit_after_an_override",
        {
            "train.py": """\
import math
import sys

import torch
from torch import nn

CONFIG = {"optim.lr": 0.03, "optim.momentum": 0.9, "model.hidden": 32, "steps": 18, "seed": 0}


def parse(argv):
    config = dict(CONFIG)
    for word in argv:
        key, _, value = word.partition("=")
        if key not in config:
            sys.exit(f"unknown key {key}")
        config[key] = type(config[key])(value)
    return config


def main(argv):
    cfg = parse(argv)
    torch.manual_seed(cfg["seed"])
    hidden = cfg["model.hidden"]
    net = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    opt = torch.optim.SGD(net.parameters(), lr=cfg["optim.lr"], momentum=cfg["optim.momentum"])  # HERE
    for step in range(cfg["steps"]):
        x = torch.randn(32, 10)
        y = x[:, :1] - x[:, 1:2]
        loss = (net(x) - y).pow(2).mean()
        if not math.isfinite(loss.item()):
            print(f"loss is {loss.item()} at step {step}", file=sys.stderr)
            sys.exit(3)
        opt.zero_grad()
        loss.backward()
        opt.step()  # HERE
        print(f"{step:3d} {loss.item():.4g}")


if __name__ == "__main__":
    main(sys.argv[1:])
"""
        },
        args=("optim.lr=30", "model.hidden=48"),
        says=(("learning rate", "lr="), ("30",)),
        exit_code=3,
    ),
    Project(
        "anomaly_mode_at_a_duplicate_pair",
        {
            "train.py": """\
import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)


def contrastive(a, b, same, margin=1.0):
    d = (a - b).pow(2).sum(1).sqrt()  # HERE
    return torch.where(same, d, (margin - d).clamp(min=0)).mean()


def pairs(step, g):
    left = torch.randn(16, 12, generator=g)
    right = torch.randn(16, 12, generator=g)
    same = torch.rand(16, generator=g) < 0.5
    right[same] = left[same] + 0.1 * torch.randn(int(same.sum()), 12, generator=g)
    if step == 8:
        right[2], same[2] = left[2], True  # the same photo was uploaded twice
    return left, right, same


def train():
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(9)
    tower = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
    opt = torch.optim.Adam(tower.parameters(), lr=3e-3)
    for step in range(15):
        left, right, same = pairs(step, g)
        loss = contrastive(tower(left), tower(right), same)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


train()
"""
        },
        step=9,
        says=(("sqrt", "pow"), ("zero", "at 0", "of 0", "eps", "clamp"), ("backward", "gradient")),
        exit_code=1,
    ),
    Project(
        "try_and_except_around_each_step",
        {
            "train.py": """\
import json

import torch
from torch import nn

torch.manual_seed(21)
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)


def masked_loss(logits, target, mask):
    per_pixel = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (per_pixel * mask).sum() / mask.sum()  # HERE


def train_step(image, target, mask):
    optimizer.zero_grad()
    loss = masked_loss(net(image), target, mask)
    if not loss.isfinite():
        raise ValueError(f"bad loss {loss.item()}")
    loss.backward()
    optimizer.step()
    return loss.item()


losses, failed = [], []
for i in range(14):
    image = torch.rand(4, 1, 12, 12)
    target = (image > 0.6).float()
    mask = (torch.rand(4, 1, 12, 12) < 0.3).float()
    if i in (5, 11):
        mask.zero_()  # nobody has annotated these yet
    try:
        losses.append(train_step(image, target, mask))
    except (ValueError, RuntimeError) as error:
        failed.append({"batch": i, "why": str(error)})
        continue
with open("failed.json", "w") as f:
    json.dump(failed, f, indent=1)
print(f"mean loss {sum(losses) / len(losses):.4f}; {len(failed)} of 14 batches failed")
"""
        },
        step=6,
        says=(("div", "0 / 0", "0/0"), ("zero", "0 / 0", "0/0", "empty")),
        files_written=("failed.json",),
    ),
    Project(
        "matcher_that_refuses_nan",
        {
            "train.py": """\
import torch
from torch import nn

from matcher import match


class Slots(nn.Module):
    def __init__(self, slots=6, width=16):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, slots * width))
        self.slots, self.width = slots, width

    def forward(self, x):
        return self.encode(x).view(-1, self.slots, self.width)


def scenes(count):
    g = torch.Generator().manual_seed(4)
    for i in range(count):
        objects = torch.rand(4, 5, 16, generator=g)
        if i == 5:
            objects[2, 1] = 0.0  # an object outside of the picture
        yield objects.flatten(1)[:, :20], objects


torch.manual_seed(0)
net = Slots()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for i, (x, objects) in enumerate(scenes(12)):
    slots = net(x)
    loss = 0.0
    for predicted, wanted in zip(slots, objects):
        rows, columns = match(predicted, wanted)
        loss = loss + nn.functional.mse_loss(predicted[rows], wanted[columns])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, f"{loss.item():.4f}")
""",
            "matcher.py": """\
import torch
from scipy.optimize import linear_sum_assignment


def cosine_cost(predicted, wanted):
    a = predicted / predicted.norm(dim=1, keepdim=True)
    b = wanted / wanted.norm(dim=1, keepdim=True)  # HERE
    return 1 - a @ b.t()


@torch.no_grad()
def match(predicted, wanted):
    rows, columns = linear_sum_assignment(cosine_cost(predicted, wanted).numpy())
    return torch.as_tensor(rows), torch.as_tensor(columns)
""",
        },
        step=6,
        says=(("div", "norm", "0 / 0", "0/0"), ("zero", "0 / 0", "0/0", "eps")),
        exit_code=1,
    ),
    Project(
        "validation_is_the_first_to_be_nan",
        {
            "train.py": """\
import csv

import torch
from torch import nn

from transforms import stretch_contrast


def images(count, seed, blank=()):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 8, 8, generator=g)
    x[list(blank)] = 0.5
    return x, (x.mean((1, 2, 3)) > 0.5).long()


def evaluate(net, x, y):
    net.eval()
    with torch.no_grad():
        return nn.functional.cross_entropy(net(stretch_contrast(x)), y).item()


def main():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    train_x, train_y = images(64, 10)
    val_x, val_y = images(32, 11, blank=[17])
    best = float("inf")
    with open("metrics.csv", "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["epoch", "train", "val"])
        for epoch in range(5):
            net.train()
            total = 0.0
            for xb, yb in zip(train_x.split(16), train_y.split(16)):
                loss = nn.functional.cross_entropy(net(stretch_contrast(xb)), yb)
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.item()
            val = evaluate(net, val_x, val_y)
            out.writerow([epoch, round(total / 4, 5), round(val, 5)])
            if val < best:
                best = val
                torch.save(net.state_dict(), "best.pt")
    print(f"best validation loss: {best}")


if __name__ == "__main__":
    main()
""",
            "transforms.py": """\
def stretch_contrast(x):
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return (x - low) / (high - low)  # HERE
""",
        },
        steps=0,
        says=(("div", "0 / 0", "0/0"), ("zero", "0 / 0", "0/0", "eps")),
        files_written=("metrics.csv",),
    ),
    Project(
        "generator_whose_scale_outgrows_fp16",
        {
            "train.py": """\
import math

import torch
from torch import nn
from torch.nn import functional as F


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1), nn.Softplus())
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.log_scale.exp() * self.net(x)  # HERE


def training(model, opt, scaler, steps):
    for _ in range(steps):
        x = torch.randn(64, 6)
        price = 250_000 * (1 + 0.3 * torch.tanh(x[:, :1] + x[:, 1:2]))
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = model(x)
        loss = F.l1_loss(predicted.float(), price)
        if not math.isfinite(loss.item()):
            return
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        yield loss.item()


torch.manual_seed(7)
model = Prices()
opt = torch.optim.Adam(
    [
        {"params": model.net.parameters(), "lr": 1e-3},
        {"params": [model.log_scale], "lr": 0.6},
    ]
)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for i, value in enumerate(training(model, opt, scaler, 60)):
    print(f"{i} {value:.5g} scale {model.log_scale.exp().item():.3g}")
print("end")
"""
        },
        steps=0,
        says=(("log_scale",), ("fp16", "float16", "half")),
    ),
]
