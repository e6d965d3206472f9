"""Choosing precision by hand: per module with to_float, per tensor with a cast; natively and as in MindSpore.

    python examples/manual_casting.py

Every variant trains the same small network on bundled digits; parameters stay stored in fp32 in all of them.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import halfstep as hs
import halfstep.compat.mindspore as ms

STEPS = 150


class Native(nn.Module):
    """64-128-10, in plain torch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        return self.layers(x)


class NativeByTensor(Native):
    """Casts what a matmul reads, and casts back what it gives."""

    def forward(self, x):
        x = x.to(torch.float16)
        # the region lets fp16 activations meet fp32 weights: linear runs in fp16, nothing else is cast
        with hs.autocast(x.device.type, "fp16", policy="low"):
            x = self.layers(x)
        return x.to(torch.float32)


class ByCell(ms.nn.Cell):
    """MindSpore's way, per module."""

    def __init__(self):
        super().__init__()
        self.layers = ms.nn.SequentialCell(
            ms.nn.Dense(64, 128).to_float(ms.float16), ms.nn.ReLU(), ms.nn.Dense(128, 10).to_float(ms.float16)
        )

    def construct(self, x):
        return self.layers(x)


class ByTensor(ms.nn.Cell):
    """MindSpore's way, per tensor."""

    def __init__(self):
        super().__init__()
        self.layers = ms.nn.SequentialCell(ms.nn.Dense(64, 128), ms.nn.ReLU(), ms.nn.Dense(128, 10))

    def construct(self, x):
        x = x.astype(ms.float16)
        x = self.layers(x)
        return x.astype(ms.float32)


def native_by_module():
    model = Native()
    hs.to_float(model.layers[0], "fp16")  # everything inside computes in fp16
    hs.to_float(model.layers[2], "fp16")
    return model


def train(model, x, y):
    """Returns the last loss, the accuracy, and the dtypes of weights and hidden layer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = hs.GradScaler(init_scale=2.0**10)
    seen = []
    handle = model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    handle.remove()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    weights = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return loss.item(), accuracy, "+".join(weights), str(seen[-1]).removeprefix("torch.")


def main():
    bundled = load_digits()
    x = ms.Tensor(torch.tensor(bundled.data, dtype=torch.float32) / 16)  # also a torch.Tensor
    y = torch.tensor(bundled.target)
    for name, make in {
        "fp32": Native,
        "native, per module (hs.to_float)": native_by_module,
        "native, per tensor (x.to)": NativeByTensor,
        "MindSpore, per module (Cell.to_float)": ByCell,
        "MindSpore, per tensor (x.astype)": ByTensor,
    }.items():
        torch.manual_seed(0)
        loss, accuracy, weights, hidden = train(make(), x, y)
        print(f"{name:40} loss {loss:.4f}, accuracy {accuracy:.3f}, weights {weights}, hidden layer {hidden}")


if __name__ == "__main__":
    main()
