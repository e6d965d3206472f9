"""Draw docs/images/curves.svg: fine-tuning with bf16 weights, under torch's AdamW and ours.

    python docs/generate_curves.py    # about a minute on two cores

The GPT of the recipe text-gpt is trained in fp32 for 50 steps, then fine-tuned at a learning rate of 1e-5
three times, on the same batches; the loss is that on held-out text, in fp32 arithmetic.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from generate_images import GREY, picture, text
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.recipes import recipe_of

IMAGE = Path(__file__).parent / "images" / "curves.svg"
BEFORE, STEPS, EVERY, RATE = 50, 100, 5, 1e-5
COLOURS = {"fp32, torch": "#c98a00", "bf16, torch": "#d0564b", "bf16, halfstep": "#3b82d0"}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss on a batch."""
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def held_out(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """The mean loss of the weights as they are, computed in fp32."""
    with torch.no_grad():
        twin = copy.deepcopy(model).float()
        return sum(float(loss_of(twin, x, y)) for x, y in batches) / len(batches)


def fine_tune(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> list[float]:
    """The losses on held-out text before, and after every so many steps."""
    task = recipe_of("text-gpt").task()
    optimizer, test = make(model.parameters()), list(task.test[:1])
    losses = [held_out(model, test)]
    for step, (x, y) in zip(range(1, STEPS + 1), iter(task.train(1))):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            losses.append(held_out(model, test))
    return losses


def curves() -> dict[str, list[float]]:
    """What each way to keep weights comes to."""
    recipe = recipe_of("text-gpt")
    start, optimizer = recipe.build(0, "O0")
    for _, (x, y) in zip(range(BEFORE), iter(recipe.task().train(0))):
        loss_of(start, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def torchs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)

    def ours(parameters: Any) -> torch.optim.Optimizer:
        return hs.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)

    return {
        "fp32, torch": fine_tune(copy.deepcopy(start), torchs),
        "bf16, torch": fine_tune(copy.deepcopy(start).bfloat16(), torchs),
        "bf16, halfstep": fine_tune(copy.deepcopy(start).bfloat16(), ours),
    }


def draw(losses: dict[str, list[float]]) -> str:
    """The curves over steps as one SVG file."""
    values = [value for curve in losses.values() for value in curve]
    low, high = min(values), max(values)
    left, right, top, base = 56, 410, 34, 184

    def at(step: float, loss: float) -> tuple[float, float]:
        return left + step / STEPS * (right - left), base - (loss - low) / (high - low) * (base - top)

    parts = [text(0, 16, "loss on held-out text, learning rate 1e-5", size=15)]
    parts.append(f'<path d="M{left} {top}V{base}H{right}" fill="none" stroke="{GREY}"/>')
    for loss in (low, (low + high) / 2, high):
        parts.append(text(left - 8, at(0, loss)[1] + 4, f"{loss:.3f}", size=12, anchor="end"))
    for step in (0, STEPS // 2, STEPS):
        anchor = "end" if step == STEPS else "middle"
        parts.append(text(at(step, low)[0], base + 16, str(step), size=12, anchor=anchor))
    for i, (name, curve) in enumerate(losses.items()):
        points = " ".join("{:.1f},{:.1f}".format(*at(EVERY * k, loss)) for k, loss in enumerate(curve))
        style = 'stroke-dasharray="7 6"' if name == "bf16, halfstep" else ""
        line = f'fill="none" stroke="{COLOURS[name]}" stroke-width="2.5" {style}'
        parts.append(f'<polyline points="{points}" {line}/>')
        x = 140 * i
        parts.append(f'<path d="M{x} 224h22" {line}/>')
        parts.append(text(x + 28, 228, name, size=12))
    return picture(
        244, "Loss on held-out text over 100 steps: bf16 weights under two optimizers, and fp32", parts, 420
    )


if __name__ == "__main__":
    found = curves()
    for name, curve in found.items():
        print(f"{name:16} {curve[0]:.4f} -> {curve[-1]:.4f}")
    IMAGE.write_text(draw(found), encoding="utf-8")
