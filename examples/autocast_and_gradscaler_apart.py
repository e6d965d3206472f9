"""autocast and GradScaler are two things: each works without the other.

    python examples/autocast_and_gradscaler_apart.py

1. autocast alone: bf16 has fp32's range, so no scale is needed.
2. GradScaler alone: a model that is fp16 by itself, cast by hand, whose small gradients would become 0.
3. Both, with what neither does by itself: clipping needs unscaled gradients.
Each trains the same small network on the bundled digits and prints its accuracy.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import halfstep as hs

torch.manual_seed(0)
bundled = load_digits()
images = torch.tensor(bundled.data, dtype=torch.float32) / 16
labels = torch.tensor(bundled.target)
train, test = torch.randperm(len(labels)).split([1437, 360])


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(epochs=20):
    for _ in range(epochs):
        yield from train[torch.randperm(len(train))].split(64)


def accuracy(model, dtype=torch.float32):
    with torch.no_grad():
        return (model(images[test].to(dtype)).argmax(1) == labels[test]).float().mean().item()


def autocast_alone():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches():
        optimizer.zero_grad()
        with hs.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    print(f"autocast alone, bf16:        accuracy {accuracy(model):.3f}")


def scaler_alone():
    """fp16 weights and gradients, no region: gradients that torch's scaler refuses, this one unscales.

    The loss has a weight of 2^-20, as one term among others might, which gradients and learning rate make up.
    """
    for scaler in (hs.GradScaler(enabled=False), hs.GradScaler(init_scale=2.0**16)):
        model = network().half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * 2**5, momentum=0.9)
        zeros = []
        for batch in batches():
            optimizer.zero_grad()
            out = model(images[batch].half())
            loss = nn.functional.cross_entropy(out.float(), labels[batch]) * 2.0**-20
            scaler.scale(loss).backward()
            zeros.append((model[0].weight.grad == 0).float().mean().item())
            for p in model.parameters():
                p.grad *= 2.0**15
            scaler.step(optimizer)
            scaler.update()
        name = f"scale {scaler.get_scale():g}" if scaler.is_enabled() else "no scale"
        print(f"fp16 alone, {name:>12}:    accuracy {accuracy(model, torch.float16):.3f}, "
              f"{sum(zeros) / len(zeros):.0%} of the first layer's gradients are 0")  # fmt: skip


def both_with_clipping():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler, skipped = hs.GradScaler(init_scale=2.0**24, growth_interval=100), 0
    for batch in batches():
        optimizer.zero_grad()
        with hs.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # clip what the optimizer will see, not 2^24 times that
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        outcome = scaler.step(optimizer)
        skipped += not outcome.taken
        scaler.update()
    print(
        f"both, fp16, clipped:         accuracy {accuracy(model):.3f}, {skipped} steps skipped on the way "
        f"from scale 2^24 to {scaler.get_scale():g}; last gradient norm {outcome.grad_norm:.3f}"
    )


if __name__ == "__main__":
    autocast_alone()
    scaler_alone()
    both_with_clipping()
