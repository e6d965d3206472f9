"""An accelerator course's loop: `torch.<device>.amp.autocast(amp)` and `GradScaler(enabled=amp)`.

    python examples/mlu_training_loop.py --pyamp
    python examples/mlu_training_loop.py --pyamp --device mlu --plugin torch_mlu

`--plugin` is the module, or the file, whose import makes the vendor's device appear in torch. One call of
`hs.devices.register` then gives the device its `torch.<device>.amp`, unless the plugin brings its own. On cpu
and cuda `install()` puts halfstep in the place of torch's `torch.cpu.amp` and `torch.cuda.amp`.

A small network with batch norm learns the bundled handwritten digits.
"""

import argparse
import importlib
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.compat.torch_amp import install


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def digits():
    bundled = load_digits()
    images = torch.tensor(bundled.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bundled.target)
    order = torch.randperm(len(labels))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def bring_up(name, plugin):
    """Make the device exist, then declare it to halfstep; a plugin that knows halfstep has done so itself."""
    if plugin:
        folder, module = os.path.split(plugin) if plugin.endswith(".py") else (os.getcwd(), plugin)
        sys.path.insert(0, folder or os.getcwd())
        importlib.import_module(module.removesuffix(".py"))
    if name not in hs.devices.available():
        hs.devices.register(name, dtypes=("fp16", "bf16"))


def train(args):
    device, amp = torch.device(args.device), args.pyamp
    device_amp = getattr(torch, args.device).amp  # torch.mlu.amp in the course
    torch.manual_seed(0)
    train_data, test_data = digits()
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True, drop_last=True)

    model = network().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = device_amp.GradScaler(enabled=amp)

    for epoch in range(args.epochs):
        model.train()
        began, total = time.perf_counter(), 0.0
        for images, target in train_loader:
            images, target = images.to(device), target.to(device)
            with device_amp.autocast(amp):
                output = model(images)
                loss = criterion(output, target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(train_loader):.4f}, {time.perf_counter() - began:.2f} s")

    model.eval()
    images, labels = (t.to(device) for t in test_data.tensors)
    with torch.no_grad(), device_amp.autocast(amp):
        output = model(images)
        accuracy = (output.argmax(1) == labels).float().mean().item()
    print(f"{args.device}, output in {output.dtype}, scale {scaler.get_scale():g}: accuracy {accuracy:.3f}")


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plugin", help="module or file that brings the device")
    parser.add_argument("--pyamp", action="store_true", help="mixed precision")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size: expected 1 or more")
    try:
        bring_up(args.device, args.plugin)
        torch.empty(0, device=args.device)
    except (ImportError, RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).split('. ')[0]}")
    with install() if args.device in ("cpu", "cuda") else nullcontext():
        train(args)


if __name__ == "__main__":
    main()
