"""Scripts that look as if something were wrong, and train well."""

from tests.doctor.people import Project

PROJECTS = [
    Project(
        "guards_that_never_fire",
        {
            "train.py": """\
import logging
import sys

import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)
logging.basicConfig(filename="train.log", filemode="w", level=logging.INFO, format="%(message)s")
torch.manual_seed(41)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(18):
    x = torch.randn(32, 8)
    loss = nn.functional.mse_loss(net(x), x[:, :1] - x[:, 1:2])
    if not torch.isfinite(loss):
        logging.error("NaN at step %d", step)
        sys.exit(1)
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 5.0, error_if_nonfinite=True)
    assert all(torch.isfinite(p.grad).all() for p in net.parameters()), "NaN in a gradient"
    try:
        opt.step()
    except RuntimeError as error:
        raise FloatingPointError("step failed") from error
    logging.info("step %d loss %.5f norm %.4f", step, loss.item(), norm)
""",
        },
        files_written=("train.log",),
    ),
    Project(
        "scaler_that_skips_at_the_start",
        {
            "train.py": """\
import torch
from torch import nn

torch.manual_seed(42)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=15000.0)
skipped = 0
for step in range(24):
    x = torch.randn(32, 16)
    y = x[:, :4].argmax(1)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = nn.functional.cross_entropy(logits.float(), y, reduction="sum")
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
        print(f"step {step} skipped, scale {before:g} -> {scaler.get_scale():g}")
print(f"{skipped} of 24 steps skipped, loss {loss.item() / 32:.4f}")
"""
        },
        steps=0,
    ),
    Project(
        "masks_of_minus_infinity",
        {
            "train.py": """\
import math

import torch
from torch import nn
from torch.nn import functional as F


class CausalBlock(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        future = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        self.register_buffer("mask", future)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + self.mask
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, words=11, width=24, length=12):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.block = CausalBlock(width, length)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        logits = self.head(self.block(self.embed(x) + self.place))
        return logits.masked_fill(torch.arange(11) == 0, float("-inf"))  # 0 is never predicted


torch.manual_seed(43)
model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(18):
    start = torch.randint(0, 10, (16, 1))
    text = 1 + (start + torch.arange(13)) % 10
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{step} perplexity {math.exp(loss.item()):.2f}")
"""
        },
    ),
    Project(
        "padding_of_nan",
        {
            "train.py": """\
import torch
from torch import nn

from series import collate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(2, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        known = torch.isfinite(x)
        filled = torch.cat([torch.nan_to_num(x), known.float()], dim=2)
        return self.out(self.rnn(filled)[0])


torch.manual_seed(44)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(16):
    x, y = collate([torch.randn(int(n)) for n in torch.randint(5, 15, (12,))])
    error = (net(x) - y).abs()
    loss = error[torch.isfinite(y)].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step}: {loss.item():.4f}, {torch.isnan(error).float().mean():.0%} padding")
""",
            "series.py": """\
import torch
from torch.nn.utils.rnn import pad_sequence


def collate(series):
    padded = pad_sequence(series, batch_first=True, padding_value=float("nan"))
    return padded[:, :-1, None], padded[:, 1:, None]
""",
        },
    ),
    Project(
        "resume_that_works",
        {
            "runs/train.py": """\
import argparse
import pathlib

import torch

from .state import State


def steps(state, until):
    for step in range(state.step, until):
        g = torch.Generator().manual_seed(1000 + step)
        x = torch.randn(32, 8, generator=g)
        loss = (state.net(x) - x[:, :1]).abs().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.step = step + 1
        yield loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, default="out")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    last = args.folder / "last.pt"
    lines = []
    for until in (8, 16):
        state = State(seed=45)
        if last.exists():
            state.load(last)
        lines += [f"{loss:.6f}" for loss in steps(state, until)]
        state.save(last)
    (args.folder / "losses.txt").write_text("\\n".join(lines) + "\\n")
    print(f"{len(lines)} steps, last loss {lines[-1]}")


if __name__ == "__main__":
    main()
""",
            "runs/__init__.py": "",
            "runs/state.py": """\
import os

import torch
from torch import nn


class State:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=16)
        self.step = 0

    def save(self, path):
        parts = {name: getattr(self, name).state_dict() for name in ("net", "optimizer", "scheduler")}
        torch.save({**parts, "step": self.step}, f"{path}.new")
        os.replace(f"{path}.new", path)

    def load(self, path):
        kept = torch.load(path, weights_only=True)
        for name in ("net", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(kept[name])
        self.step = kept["step"]
""",
        },
        args=("--folder", "results"),
        module="runs.train",
        steps=0,
        files_written=("results/last.pt", "results/losses.txt"),
    ),
    Project(
        "infinity_in_the_log",
        {
            "train.py": """\
import json
import math

import torch
from torch import nn


class Best:
    def __init__(self):
        self.loss, self.step = math.inf, -1

    def update(self, loss, step):
        improved = loss < self.loss
        if improved:
            self.loss, self.step = loss, step
        return improved


torch.manual_seed(46)
net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
x_val = torch.randn(64, 6)
best = Best()
with open("log.jsonl", "w") as log:
    val = math.nan
    for step in range(15):
        log.write(json.dumps({"step": step, "best": best.loss, "val": val}) + "\\n")
        x = torch.randn(32, 6)
        loss = nn.functional.mse_loss(net(x), x[:, :1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 4:
            with torch.no_grad():
                val = nn.functional.mse_loss(net(x_val), x_val[:, :1]).item()
            if best.update(val, step):
                torch.save({"net": net.state_dict(), "best": best.loss}, "best.pt")
        low, high = torch.full((), math.inf), torch.full((), -math.inf)
        for p in net.parameters():
            low, high = torch.minimum(low, p.detach().min()), torch.maximum(high, p.detach().max())
    print(f"best {best.loss:.4f} at {best.step}, weights in {low:.2f} .. {high:.2f}")
"""
        },
        steps=0,
        files_written=("log.jsonl", "best.pt"),
    ),
    Project(
        "early_stopping_at_a_plateau",
        {
            "train.py": """\
import csv

import torch
from torch import nn


class EarlyStopping:
    def __init__(self, patience, threshold=1e-3):
        self.patience, self.threshold = patience, threshold
        self.best, self.bad = float("inf"), 0

    def __call__(self, value):
        if value < self.best - self.threshold:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad > self.patience


torch.manual_seed(47)
net = nn.Linear(5, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.1, patience=1)
stop = EarlyStopping(patience=4)
x = torch.randn(96, 5)
y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [1.5]]) + 0.5 * torch.randn(96, 1)
rows = []
for epoch in range(200):
    total = 0.0
    for xb, yb in zip(x.split(32), y.split(32)):
        loss = nn.functional.mse_loss(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() / 3
    rows.append([epoch, round(total, 5), opt.param_groups[0]["lr"]])
    plateau.step(total)
    if stop(total):
        print(f"stopped after epoch {epoch}, lr {opt.param_groups[0]['lr']:.0e}")
        break
with open("epochs.csv", "w", newline="") as f:
    csv.writer(f).writerows(rows)
"""
        },
        steps=0,
        files_written=("epochs.csv",),
    ),
    Project(
        "loop_that_ends_by_stop_iteration",
        {
            "train.py": """\
import os

import numpy as np
import torch
from torch import nn


def stream(path):
    pixels = np.memmap(path, dtype=np.uint8, mode="r", shape=(120, 6, 6))
    order = torch.randperm(120)
    for part in order.split(8):
        yield torch.from_numpy(pixels[part.numpy()]).float() / 255


def write(path):
    rng = np.random.default_rng(48)
    table = np.memmap(path, dtype=np.uint8, mode="w+", shape=(120, 6, 6))
    table[:] = rng.integers(0, 256, table.shape)
    table[:, :3] //= 4
    table.flush()


torch.manual_seed(48)
write("pixels.dat")
net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 36))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
source = stream("pixels.dat")
seen = 0
while True:
    try:
        x = next(source)
    except StopIteration:
        break
    loss = nn.functional.binary_cross_entropy_with_logits(net(x), x.flatten(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    seen += 1
del source
os.remove("pixels.dat")
torch.save(net.state_dict(), "net.pt")
print(f"{seen} batches, last loss {loss.item():.4f}")
"""
        },
        files_written=("net.pt",),
    ),
    Project(
        "half_precision_done_with_care",
        {
            "train.py": """\
import sqlite3
import tempfile

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from precision import Masters

MICRO = 4


def main():
    torch.manual_seed(49)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).bfloat16()
    masters = Masters(model)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=3e-3)
    average = AveragedModel(masters, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    db = sqlite3.connect("losses.sqlite")
    db.execute("create table losses (step integer primary key, value real)")
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        for step in range(16):
            total = 0.0
            for _ in range(MICRO):
                x = torch.randn(16, 8)
                loss = nn.functional.mse_loss(model(x.bfloat16()).float(), x[:, :1])
                (loss / MICRO).backward()
                masters.collect()
                total += loss.item() / MICRO
            nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            masters.publish()
            average.update_parameters(masters)
            db.execute("insert into losses values (?, ?)", (step, total))
            torch.save(model.state_dict(), f"{scratch}/{step}.pt")
    db.commit()
    db.close()


if __name__ == "__main__":
    main()
""",
            "precision.py": """\
import torch
from torch import nn


class Masters(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = [model]
        self.copies = nn.ParameterList(nn.Parameter(p.detach().float()) for p in model.parameters())

    def pairs(self):
        return zip(self.model[0].parameters(), self.copies)

    def collect(self):
        for p, copy in self.pairs():
            copy.grad = p.grad.float() if copy.grad is None else copy.grad + p.grad.float()
            p.grad = None

    @torch.no_grad()
    def publish(self):
        for p, copy in self.pairs():
            p.copy_(copy)
""",
        },
        steps=0,
        files_written=("losses.sqlite",),
    ),
    Project(
        "new_head_two_groups_and_a_frozen_body",
        {
            "finetune.py": """\
import logging
import logging.handlers

import torch
from torch import nn

log = logging.getLogger("finetune")
log.setLevel(logging.INFO)
log.addHandler(logging.handlers.RotatingFileHandler("finetune.log", maxBytes=600, backupCount=2))


def pretrained():
    return nn.ModuleDict(
        {
            "body": nn.Sequential(nn.Linear(10, 32), nn.ReLU()),
            "neck": nn.Linear(32, 16),
            "head": nn.Linear(16, 100),
        }
    )


def forward(net, x):
    with torch.no_grad():
        h = net["body"](x)
    return net["head"](net["neck"](h).relu())


torch.manual_seed(50)
net = pretrained()
net["body"].requires_grad_(False)
net["head"] = nn.Linear(16, 3)
opt = torch.optim.SGD(net["head"].parameters(), lr=0.1, momentum=0.9)
opt.add_param_group({"params": net["neck"].parameters(), "lr": 0.02})
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.2, 0.05], total_steps=20)
for step in range(20):
    x = torch.randn(32, 10)
    loss = nn.functional.cross_entropy(forward(net, x), x[:, :3].argmax(1), label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
    log.info("step %2d loss %.4f lr %.5f and %.5f", step, loss.item(), *schedule.get_last_lr())
"""
        },
        steps=0,
        files_written=("finetune.log", "finetune.log.1"),
    ),
]
PROJECTS = [Project(**{**vars(p), "healthy": True}) for p in PROJECTS]
