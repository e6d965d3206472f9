"""Scripts that take their settings from files and arguments, and whose settings or targets are wrong."""

from tests.doctor.people import Project

PROJECTS = [
    Project(
        "toml_that_asks_for_half_adam",
        {
            "train.py": """\
import argparse
import tomllib

import torch
from torch import nn

DTYPES = {"float32": torch.float32, "float16": torch.float16}


def build(cfg):
    sizes = [cfg["model"]["inputs"], *cfg["model"]["hidden"], 1]
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1]).to(DTYPES[cfg["model"]["dtype"]])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="config.toml")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    with open(args.config, "rb") as f:
        cfg = tomllib.load(f)
    torch.manual_seed(cfg["seed"])
    net = build(cfg)
    dtype = next(net.parameters()).dtype
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg["optim"]["lr"], eps=cfg["optim"]["eps"])  # HERE
    for step in range(args.steps):
        x = torch.randn(64, cfg["model"]["inputs"], dtype=dtype)
        y = 0.02 * x[:, :1] - 0.01 * x[:, 1:2]
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # HERE
        if step % 5 == 0:
            v = torch.cat([s["exp_avg_sq"].flatten() for s in optimizer.state.values()])
            print(f"{step} loss {loss.item():.5f}, v is zero in {(v == 0).float().mean():.1%}")


if __name__ == "__main__":
    main()
""",
            "config.toml": """\
seed = 3

[model]
inputs = 16
hidden = [64, 64]
dtype = "float16"

[optim]
lr = 1e-3
eps = 1e-4   # 1e-8 gave NaN
""",
        },
        args=("--config", "config.toml"),
        says=(("second moment", "exp_avg_sq", "moment"), ("fp16", "float16", "half")),
    ),
    Project(
        "json_with_one_class_too_few",
        {
            "train.py": """\
import argparse
import json
from pathlib import Path

import torch
from torch import nn


def load(path, overrides):
    config = json.loads(Path(path).read_text())
    for item in overrides:
        key, value = item.split("=", 1)
        config[key] = json.loads(value)
    return config


def batches(config):
    g = torch.Generator().manual_seed(config["seed"])
    for i in range(config["steps"]):
        x = torch.randn(config["batch"], 12, generator=g)
        y = (x[:, :3].argmax(1) + 3 * (x[:, 3:6].argmax(1))).clamp(max=9)
        if i == 4:
            y[7] = 10  # "other", added to the labels last week
        yield x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = load(args.config, args.overrides)
    torch.manual_seed(config["seed"])
    net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, config["classes"]))
    opt = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    for i, (x, y) in enumerate(batches(config)):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)  # HERE
        loss.backward()
        opt.step()
        print(json.dumps({"step": i, "loss": round(loss.item(), 4)}))


main()
""",
            "base.json": '{"seed": 1, "steps": 14, "batch": 16, "classes": 10, "lr": 0.003}\n',
        },
        args=("base.json", "lr=0.01"),
        step=5,
        says=(
            ("target", "class", "label"),
            ("10",),
            ("range", "out of bounds", "outside", "0..9", "0 to 9", "at most 9"),
        ),
        exit_code=1,
    ),
    Project(
        "mixup_whose_targets_do_not_sum_to_one",
        {
            "train.py": """\
import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 5


def mixup(x, y, alpha=0.4):
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    order = torch.randperm(len(x))
    hot = F.one_hot(y, CLASSES).float()
    mixed = lam * x + (1 - lam) * x[order]
    return mixed, lam * hot + lam * hot[order]


torch.manual_seed(13)
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, CLASSES))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(18):
    x = torch.randn(32, 10)
    y = x[:, :CLASSES].argmax(1)
    mixed, soft = mixup(x, y)
    loss = F.cross_entropy(net(mixed), soft)  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        accuracy = (net(x).argmax(1) == y).float().mean().item()
    print(f"step {step:2d} loss {loss.item():.3f} accuracy {accuracy:.2f} sum {soft.sum(1).mean():.2f}")
"""
        },
        says=(("sum",), ("target", "probabilit", "label", "soft")),
    ),
    Project(
        "pixels_of_a_memory_map_as_targets",
        {
            "train.py": """\
import numpy as np
import torch
from torch import nn

from prepare import prepare

SHAPE = (160, 8, 8)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.decode = nn.Linear(16, 64)

    def forward(self, x):
        return self.decode(self.encode(x))


def loader(images, size):
    for i in range(0, len(images), size):
        yield torch.from_numpy(np.array(images[i : i + size])).float()


def main():
    prepare("images.dat", SHAPE)
    images = np.memmap("images.dat", dtype=np.uint8, mode="r", shape=SHAPE)
    torch.manual_seed(0)
    net = Autoencoder()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    for i, x in enumerate(loader(images, 16)):
        loss = criterion(net(x), x.flatten(1))  # HERE
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"batch {i}: {loss.item():.2f}")
    torch.save({"model": net.state_dict(), "shape": SHAPE}, "autoencoder.pt")


if __name__ == "__main__":
    main()
""",
            "prepare.py": """\
import numpy as np


def prepare(path, shape):
    rng = np.random.default_rng(8)
    out = np.memmap(path, dtype=np.uint8, mode="w+", shape=shape)
    for i in range(len(out)):
        row, column = rng.integers(0, 6, 2)
        out[i, row : row + 3, column : column + 3] = rng.integers(120, 256)
    out.flush()
""",
        },
        says=(("target",), ("255", "[0, 1]", "0 and 1", "0 to 1", "0..1", "between 0")),
        files_written=("images.dat", "autoencoder.pt"),
    ),
]
