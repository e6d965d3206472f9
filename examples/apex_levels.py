"""Apex's opt_levels on one small network: what each keeps in which dtype; only the import line has changed.

    python examples/apex_levels.py [--steps 60] [--opt-level O2 --loss-scale 128.0 --keep-batchnorm-fp32 True]

Trains on bundled handwritten digits at O0 to O3, or at one level with the overrides that Apex's scripts
pass on.
"""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

from halfstep.compat.apex import amp


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    )


def names(tensors):
    found = {str(t.dtype).removeprefix("torch.") for t in tensors if t is not None and t.is_floating_point()}
    return "+".join(sorted(found))


def train(opt_level, steps, loss_scale=None, keep_batchnorm_fp32=None):
    """Train one level; returns a row of what was seen."""
    bundled = load_digits()
    images = torch.tensor(bundled.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bundled.target)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=opt_level,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        loss_scale=loss_scale,
        verbosity=0,
    )
    began = time.perf_counter()
    for step in range(steps):
        batch = torch.randint(0, 1500, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        output = model(images[batch])
        loss = F.cross_entropy(output, labels[batch])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        gradients = names(p.grad for p in model.parameters())
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        optimizer.step()
    seconds = time.perf_counter() - began
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    row = {
        "level": opt_level,
        "parameters": names(model.parameters()),
        "gradients": gradients,
        "masters": names(amp.master_params(optimizer)),
        "output": names([output]),
        "checkpoint": names(model.state_dict().values()),
        "scale": amp.state_dict()["loss_scaler0"]["loss_scale"],
        "loss": round(loss.item(), 3),
        "accuracy": round(accuracy, 3),
        "seconds": round(seconds, 1),
    }
    amp.shutdown()
    return row


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--loss-scale", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: expected 1 or more")
    levels = [args.opt_level] if args.opt_level else ["O0", "O1", "O2", "O3"]
    try:
        rows = [train(level, args.steps, args.loss_scale, args.keep_batchnorm_fp32) for level in levels]
    except RuntimeError as error:  # what apex raises for options it does not know
        parser.error(str(error))
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    print("  ".join(key.ljust(width) for key, width in widths.items()))
    for row in rows:
        print("  ".join(str(row[key]).ljust(width) for key, width in widths.items()))


if __name__ == "__main__":
    main()
