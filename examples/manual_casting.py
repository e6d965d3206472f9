"""Precision by hand, without a region: by module (`hs.to_float`), by tensor (`.to`), by path (a plan).

    python examples/manual_casting.py [--steps 150]

Three ways to run the first two layers of a network in bf16 and its last one in fp32. Each trains on the
bundled digits and prints what the output is and what the weights are stored in.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import halfstep as hs

LOW = torch.bfloat16


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu())


class CastsTensors(Network):
    """Casts inside of forward; the weights are cast where they are used and stay fp32."""

    def forward(self, x):
        x = x.to(LOW)
        for layer in (self.first, self.second):
            x = F.linear(x, layer.weight.to(LOW), layer.bias.to(LOW)).relu()
        return self.head(x.float())


def per_module():
    model = Network()
    for layer in (model.first, model.second):
        hs.to_float(layer, LOW)
    hs.to_float(model.head, torch.float32)
    return model


def per_tensor():
    return CastsTensors()


def per_path():
    model = Network()
    rules = (
        hs.PlanRule("first", dtype=LOW, rule=hs.Rule.LOW, reason="a product: it sums in fp32"),
        hs.PlanRule("second", dtype=LOW, rule=hs.Rule.LOW, reason="a product: it sums in fp32"),
        hs.PlanRule("head", dtype=torch.float32, rule=hs.Rule.FULL, reason="logits go into exp"),
    )
    hs.convert(model, hs.Plan(rules), dtype=LOW)
    return model


def train(model, steps):
    """Test accuracy after `steps` batches, and the dtype of the output."""
    bundled = load_digits()
    images = torch.tensor(bundled.data, dtype=torch.float32) / 16
    labels = torch.tensor(bundled.target)
    train, test = torch.randperm(len(labels)).split([1437, 360])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        batch = train[torch.randint(len(train), (64,))]
        output = model(images[batch])
        loss = F.cross_entropy(output.float(), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (model(images[test]).argmax(1) == labels[test]).float().mean().item(), output.dtype


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    for way in (per_module, per_tensor, per_path):
        torch.manual_seed(0)
        model = way()
        accuracy, output = train(model, args.steps)
        layers = (model.first, model.second, model.head)
        stored = ", ".join(hs.format_of(layer.weight.dtype).name for layer in layers)
        print(f"{way.__name__}: accuracy {accuracy:.3f}, output {output}, weights stored in {stored}")


if __name__ == "__main__":
    main()
