"""A recipe's training as a script: `as_script.py NAME LEVEL DTYPE LOSS_SCALE SEED DEVICE`, "" for a default.

The doctor runs it as it runs a user's script.
"""

from __future__ import annotations

import itertools
import sys

from halfstep.recipes.registry import recipe_of
from halfstep.session.prepare import prepare


def train(name: str, level: str, dtype: str, loss_scale: str, seed: str, device: str) -> None:
    """Trains without end; whoever watches ends it."""
    recipe = recipe_of(name)
    model, optimizer = recipe.build(int(seed), level)
    model.to(device)
    amp = prepare(model, optimizer, level=level, dtype=dtype or None, loss_scale=loss_scale or None)
    for x, y in itertools.chain.from_iterable(itertools.repeat(recipe.batches(int(seed)))):
        x, y = x.to(device), y.to(device)
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step()


if __name__ == "__main__":
    train(*sys.argv[1:])
