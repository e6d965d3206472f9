"""Mixed Precision Training (Micikevicius et al., ICLR 2018), by hand and by halfstep: the same weights.

    python examples/paper_method.py [--steps 200] [--scale 1048576]

By hand, the method's three parts as summaries of the paper write them:

1. an fp32 master copy of the fp16 weights, which the optimizer updates;
2. loss scaling: the loss times S, the gradients divided by S in fp32 before clipping, a step with inf or NaN
   skipped and S halved;
3. products that accumulate in fp32, with 16-bit numbers going in and coming out.

Where a device multiplies fp16 numbers by kernels of its own, sums may round in another order there.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import halfstep as hs

CLIP = 1.0


def digits():
    """Images (N, 64) in [0, 1] and labels, split into training and test."""
    bundled = load_digits()
    images = torch.tensor(bundled.data, dtype=torch.float32) / 16
    labels = torch.tensor(bundled.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (images[order[:1437]], labels[order[:1437]]), (images[order[1437:]], labels[order[1437:]])


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(data, steps):
    images, labels = data
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (64,), generator=generator)
        yield images[chosen], labels[chosen]


def linear(x, weight, bias):
    """fp16 in, products and sums in fp32, fp16 out."""
    return F.linear(x.float(), weight.float(), bias.float()).half()


def by_hand(data, steps, scale):
    model = network()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    skipped = 0
    for x, y in batches(data, steps):
        weights = [m.detach().half().requires_grad_() for m in masters]
        hidden = linear(x.half(), weights[0], weights[1]).relu()
        loss = F.cross_entropy(linear(hidden, weights[2], weights[3]).float(), y)
        (loss * scale).backward()
        for master, weight in zip(masters, weights):
            master.grad = weight.grad.float() / scale
        if all(master.grad.isfinite().all() for master in masters):
            nn.utils.clip_grad_norm_(masters, CLIP)
            optimizer.step()
        else:
            scale /= 2
            skipped += 1
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters):
            p.copy_(master)
    return model, loss.item(), skipped


def by_halfstep(data, steps, scale):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_scale = hs.DynamicLossScale(init=scale, interval=steps + 1, max=scale)
    amp = hs.prepare(model, optimizer, level="O2", dtype="fp16", loss_scale=loss_scale)
    for x, y in batches(data, steps):
        with amp.autocast():
            loss = F.cross_entropy(model(x), y)
        amp.backward(loss)
        amp.step(clip_norm=CLIP)
    skipped = sum(not outcome.taken for outcome in amp.history)
    amp.revert()  # the masters become the model's weights
    return model, loss.item(), skipped


def accuracy(model, data):
    with torch.no_grad():
        return (model(data[0]).argmax(1) == data[1]).float().mean().item()


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--scale", type=float, default=2.0**20, help="the first loss scale")
    args = parser.parse_args()
    if args.steps < 1 or not 1 <= args.scale <= 2.0**100:
        parser.error("--steps: expected 1 or more; --scale: expected a number from 1 to 2^100")
    train, test = digits()
    weights = []
    for name, method in (("by hand", by_hand), ("halfstep", by_halfstep)):
        model, loss, skipped = method(train, args.steps, args.scale)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        print(f"{name}: last loss {loss:.5f}, accuracy {accuracy(model, test):.3f}, {skipped} steps skipped")
    print(f"largest difference between their weights: {(weights[0] - weights[1]).abs().max().item():g}")


if __name__ == "__main__":
    main()
