"""Scripts in which something else than the optimizer meant owns the gradients, the weights or the scale."""

from tests.doctor.people import Project

PROJECTS = [
    Project(
        "head_swapped_after_the_optimizer",
        {
            "finetune.py": """\
import json

import torch
from torch import nn

from backbone import Backbone


def main():
    torch.manual_seed(5)
    model = Backbone(classes=20)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # HERE
    model.head = nn.Linear(32, 3)  # HERE
    history = []
    for epoch in range(3):
        for _ in range(6):
            x = torch.randn(32, 12)
            y = x[:, :3].argmax(1)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(round(loss.item(), 4))
        print(f"epoch {epoch}: {loss.item():.4f}")
    with open("history.json", "w") as f:
        json.dump(history, f)


main()
""",
            "backbone.py": """\
from torch import nn


class Backbone(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))
""",
        },
        says=(("head",), ("optimizer", "adam")),
        files_written=("history.json",),
    ),
    Project(
        "masters_never_copied_back",
        {
            "train.py": """\
import torch
from torch import nn


def masters_of(model):
    return [p.detach().clone().float().requires_grad_() for p in model.parameters()]


def copy_gradients(model, masters):
    for p, master in zip(model.parameters(), masters):
        master.grad = p.grad.float()
        p.grad = None


def copy_weights(masters, model):
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters):
            p.copy_(master)


torch.manual_seed(12)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).bfloat16()
masters = masters_of(model)
optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
for step in range(18):
    x = torch.randn(64, 8).bfloat16()
    y = x[:, :1] - x[:, 1:2]
    loss = nn.functional.mse_loss(model(x).float(), y.float())
    loss.backward()
    copy_gradients(model, masters)
    optimizer.step()
    print(f"{step} {loss.item():.4f}")
"""
        },
        says=(
            (
                "master",
                "copied back",
                "copy",
                "never change",
                "not change",
                "unchanged",
                "not the model",
                "do not move",
            ),
        ),
    ),
    Project(
        "scaler_made_in_each_step",
        {
            "train.py": """\
import torch
from torch import nn

from engine import train_step

torch.manual_seed(14)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 8))
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
for i in range(16):
    x = torch.randn(64, 20)
    target = 3 * x[:, :8] + 1
    print(f"{i:2d} {train_step(net, opt, x, target):.3f}")
""",
            "engine.py": """\
import torch
from torch.nn import functional as F


def train_step(net, opt, x, target):
    scaler = torch.amp.GradScaler("cpu")  # HERE
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = F.mse_loss(out.float(), target, reduction="sum") / len(x)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()
""",
        },
        says=(("scaler",), ("each", "every", "anew", "again", "new ", "loop", "once", "outside")),
    ),
    Project(
        "optimizer_made_in_each_epoch",
        {
            "train.py": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_epoch(net, loader, lr):
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)  # HERE
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    return total / len(loader.dataset)


def main():
    torch.manual_seed(15)
    x = torch.randn(96, 6)
    y = x[:, :1].sin() + 0.1 * torch.randn(96, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    for epoch in range(10):
        print(f"epoch {epoch}: {train_epoch(net, loader, lr=0.05):.4f}")


if __name__ == "__main__":
    main()
"""
        },
        says=(
            ("optimizer", "adam"),
            ("each", "every", "anew", "again", "new ", "loop", "once", "outside", "reset", "moments"),
        ),
    ),
    Project(
        "schedule_of_epochs_stepped_by_batches",
        {
            "train.py": """\
import argparse

import torch
from torch import nn


class Run:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.1)
        self.epochs = args.epochs

    def batches(self):
        for _ in range(12):
            x = torch.randn(32, 10)
            yield x, x[:, :1] + x[:, 1:2]

    def fit(self):
        for epoch in range(self.epochs):
            for x, y in self.batches():
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.net(x), y)
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()  # HERE
            print(f"epoch {epoch} loss {loss.item():.4f} lr {self.scheduler.get_last_lr()[0]:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    Run(parser.parse_args()).fit()
"""
        },
        args=("--epochs", "4"),
        steps=0,
        says=(
            ("scheduler", "schedule", "learning rate", "steplr"),
            (
                "epoch",
                "batch",
                "every step",
                "each step",
                "decay",
                "falls",
                "fell",
                "shrink",
                "too small",
                "vanish",
            ),
        ),
    ),
    Project(
        "gradients_left_by_a_skipped_step",
        {
            "train.py": """\
import torch
from torch import nn


class Loop:
    def __init__(self, net, opt, scaler):
        self.net, self.opt, self.scaler = net, opt, scaler

    def step(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        self.scaler.scale(loss).backward()  # HERE
        before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.opt.zero_grad()  # HERE
        return loss.item()


torch.manual_seed(16)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.02)
loop = Loop(net, opt, torch.amp.GradScaler("cpu", init_scale=2.0**13))
for i in range(18):
    x = torch.randn(32, 8)
    if i == 5:
        x = x * 25  # one loud recording
    y = 2 * x[:, :1]
    print(f"{i:2d} loss {loop.step(x, y):.4f} scale {loop.scaler.get_scale():g}")
"""
        },
        says=(("zero_grad", "left", "stale", "still hold", "cleared", "leftover"), ("skip",)),
    ),
]
