"""The PyTorch tutorial's CNN with autocast and GradScaler; only the import of the two names has changed.

Bundled handwritten digits stand in for MNIST: scaled up to 28x28, normalised by (0.5, 0.5), shuffled.

    python examples/torch_cnn_autocast_gradscaler.py [--epochs 10] [--samples 6400]

An epoch draws `--samples` digits with replacement, for there are only 1,437 to train on. Without CUDA, bare
`autocast()` runs on the CPU in fp16, and a warning says so.
"""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from halfstep.compat.torch_amp import GradScaler, autocast


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, padding=2)
        self.fc = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.flatten(1)
        return F.log_softmax(self.fc(x), dim=1)


def digits():
    """Train and test set of (N, 1, 28, 28) images in [-1, 1] and their labels."""
    bundled = load_digits()
    images = torch.tensor(bundled.images, dtype=torch.float32)[:, None] / 16
    images = (F.interpolate(images, size=(28, 28), mode="bilinear") - 0.5) / 0.5
    labels = torch.tensor(bundled.target)
    order = torch.randperm(len(labels))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=6400, help="digits drawn for one epoch")
    args = parser.parse_args()
    if min(args.epochs, args.samples) < 1:
        parser.error("--epochs and --samples: expected 1 or more")

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_data, test_data = digits()
    sampler = RandomSampler(train_data, replacement=True, num_samples=args.samples)
    train_loader = DataLoader(train_data, batch_size=64, sampler=sampler)

    model = CNN().to(device)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    criterion = nn.NLLLoss()
    scaler = GradScaler()

    began, skipped = time.perf_counter(), 0
    for epoch in range(args.epochs):
        total = 0.0
        for data, target in train_loader:
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            with autocast():
                output = model(data)
                loss = criterion(output, target)
            scaler.scale(loss).backward()
            skipped += not scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(train_loader):.4f}, scale {scaler.get_scale():g}")

    with torch.no_grad(), autocast():
        images, labels = (t.to(device) for t in test_data.tensors)
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"test accuracy {accuracy:.3f}, {skipped} steps skipped, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
