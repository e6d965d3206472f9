"""A recipe at the level that trains it fastest on this machine."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.recipes.registry import Recipe
from halfstep.session.prepare import tune
from halfstep.session.session import Session
from halfstep.tuning.search import SECONDS, Tuning


def tune_recipe(
    recipe: Recipe,
    device: torch.device,
    *,
    dtype: str | None = None,
    folder: str | None = None,
    seconds: float = SECONDS,
) -> Tuning:
    """What `tune` finds for the recipe's model, optimizer and first batch."""
    model, optimizer = recipe.build(0)
    model.to(device)
    x, y = (part.to(device) for part in next(iter(recipe.task(folder).train(0))))

    def step(amp: Session, x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return tune(model, optimizer, step, x, y, dtype=dtype, seconds=seconds)
