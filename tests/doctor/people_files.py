"""Scripts that keep checkpoints, logs and tables, and train wrongly."""

from tests.doctor.people import Project

PROJECTS = [
    Project(
        "resume_of_a_task_without_labels",
        {
            "train.py": """\
import os

import torch
from torch import nn


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
        self.semantic, self.depth = nn.Linear(24, 3), nn.Linear(24, 1)
        self.log_var_semantic = nn.Parameter(torch.zeros(()))
        self.log_var_depth = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h = self.body(x)
        return self.semantic(h), self.depth(h)


def multi_task_loss(net, x, y, depth, valid):
    logits, predicted = net(x)
    ce = nn.functional.cross_entropy(logits, y)
    mse = ((predicted - depth).pow(2) * valid).mean()
    weighted = torch.exp(-net.log_var_semantic) * ce + net.log_var_semantic
    return weighted + torch.exp(-net.log_var_depth) * mse + net.log_var_depth  # HERE


def save(path, net, opt, step):
    torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "step": step}, path + ".part")
    os.replace(path + ".part", path)


torch.manual_seed(0)
net = TwoTasks()
weights = [p for n, p in net.named_parameters() if not n.startswith("log_var")]
opt = torch.optim.SGD(
    [{"params": weights, "lr": 0.01}, {"params": [net.log_var_semantic, net.log_var_depth], "lr": 1.0}]
)
start = 0
if os.path.exists("last.pt"):
    kept = torch.load("last.pt")
    net.load_state_dict(kept["model"])
    opt.load_state_dict(kept["optimizer"])
    start = kept["step"]
    print(f"resumed at step {start}")
for step in range(start, 100):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=g)
    y = x[:, :3].argmax(1)
    depth = torch.zeros(32, 1)
    valid = torch.zeros(32, 1)  # this split has no depth maps
    loss = multi_task_loss(net, x, y, depth, valid)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if (step + 1) % 10 == 0:
        save("last.pt", net, opt, step + 1)
        print(f"{step + 1} {loss.item():.3f} {net.log_var_depth.item():.1f}")
"""
        },
        steps=0,
        says=(("log_var_depth",),),
        files_written=("last.pt",),
    ),
    Project(
        "best_model_of_a_clipped_run",
        {
            "train.py": """\
import csv

import torch
from torch import nn

torch.manual_seed(4)
net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
x_val = torch.randn(128, 12)
y_val = x_val[:, :1] * 2 - x_val[:, 1:2]


def validate():
    with torch.no_grad():
        return nn.functional.mse_loss(net(x_val), y_val).item()


best = float("inf")
with open("metrics.csv", "w", newline="") as f:
    table = csv.DictWriter(f, fieldnames=["step", "train", "val"])
    table.writeheader()
    for step in range(16):
        x = torch.randn(32, 12)
        y = x[:, :1] * 2 - x[:, 1:2]
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x).float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # HERE
        scaler.step(opt)
        scaler.update()
        val = validate()
        table.writerow({"step": step, "train": f"{loss.item():.5f}", "val": f"{val:.5f}"})
        if val < best:
            best = val
            torch.save(net.state_dict(), "best.pt")
print(f"best {best:.5f}")
"""
        },
        says=(("unscale",), ("clip",)),
        files_written=("metrics.csv", "best.pt"),
    ),
    Project(
        "rotation_and_an_auxiliary_loss",
        {
            "train.py": """\
import json
import os

import torch
from torch import nn


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.out, self.early = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x):
        h = self.first(x)
        return self.out(self.second(h)), self.early(h)


def rotate(state, path="ckpt.pt", previous="ckpt.prev.pt"):
    if os.path.exists(path):
        os.replace(path, previous)
    torch.save(state, path)


def main():
    torch.manual_seed(6)
    net = Deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    criterion = nn.CrossEntropyLoss()
    log = open("log.jsonl", "a")
    for step in range(18):
        x = torch.randn(32, 10)
        y = x[:, :4].argmax(1)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits, early = net(x)
            main_loss = criterion(logits.float(), y)
            aux_loss = 0.4 * criterion(early.float(), y)
        scaler.scale(main_loss).backward(retain_graph=True)
        aux_loss.backward()  # HERE
        scaler.step(optimizer)
        scaler.update()
        log.write(json.dumps({"step": step, "main": main_loss.item(), "aux": aux_loss.item()}) + "\\n")
        if step % 6 == 5:
            rotate({"step": step, "net": net.state_dict(), "scaler": scaler.state_dict()})
    log.close()


main()
"""
        },
        says=(("scaler", "scale"), ("aux_loss", "backward", "second loss")),
        files_written=("log.jsonl", "ckpt.pt", "ckpt.prev.pt"),
    ),
    Project(
        "runs_in_sqlite_stepped_twice",
        {
            "train.py": """\
import sqlite3

import torch
from torch import nn


class RunLog:
    def __init__(self, path, name):
        self.db = sqlite3.connect(path)
        self.db.execute("create table if not exists runs (id integer primary key, name text)")
        self.db.execute("create table if not exists losses (run integer, step integer, loss real)")
        self.run = self.db.execute("insert into runs (name) values (?)", (name,)).lastrowid
        self.db.commit()

    def add(self, step, loss):
        with self.db:
            self.db.execute("insert into losses values (?, ?, ?)", (self.run, step, loss))

    def close(self):
        self.db.close()


def train_one(net, optimizer, scaler, x, y):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    optimizer.step()  # HERE
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    log = RunLog("runs.db", "tanh-32")
    for step in range(16):
        x = torch.randn(48, 6)
        log.add(step, train_one(net, optimizer, scaler, x, x[:, :1] * x[:, 1:2]))
    log.close()
    print("logged 16 steps")
"""
        },
        says=(("optimizer.step", "step()", "twice", "two steps", "two updates"), ("scaler", "scaled")),
        files_written=("runs.db",),
    ),
    Project(
        "last_three_checkpoints_and_an_average",
        {
            "train.py": """\
import os
import pathlib
import tempfile

import torch
from torch import nn

KEEP = 3
FOLDER = pathlib.Path("checkpoints")


def save_atomically(state, path):
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as f:
        torch.save(state, f)
    os.replace(f.name, path)


def prune():
    for old in sorted(FOLDER.glob("step_*.pt"))[:-KEEP]:
        old.unlink()


def train():
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(17)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    decay = 0.999
    ema = {name: p.detach().bfloat16() for name, p in net.named_parameters()}  # half the memory
    for step in range(18):
        x = torch.randn(32, 8)
        loss = nn.functional.mse_loss(net(x), x.prod(1, keepdim=True).tanh() + x[:, :1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        for name, p in net.named_parameters():
            ema[name] = (decay * ema[name] + (1 - decay) * p.detach()).bfloat16()  # HERE
        if step % 3 == 2:
            save_atomically({"net": net.state_dict(), "ema": ema}, FOLDER / f"step_{step:05d}.pt")
            prune()
    print(sorted(p.name for p in FOLDER.iterdir()))


train()
"""
        },
        says=(("ema", "average", "averag"), ("bf16", "bfloat16", "16 bits", "16-bit", "rounding", "rounds")),
        files_written=tuple(f"checkpoints/step_{i:05d}.pt" for i in (11, 14, 17)),
    ),
]
