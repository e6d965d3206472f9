"""The recipes by name: each is data that says model, optimizer, loss, data and how long to train."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.optim import SGD, AdamW
from halfstep.policy.levels import level_of
from halfstep.recipes import data as _data
from halfstep.recipes import models as _models


@dataclass(frozen=True)
class Task:
    """What a recipe trains on: `train(seed)` gives endless batches, `test` is a fixed list of batches."""

    name: str
    train: Callable[[int], _data.Batches]
    test: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Recipe:
    """One training set-up. `metric` is what the table shows: test "accuracy" (higher is better) or "loss".

    `steps` is a training that ends well, `demo_steps` one short enough to be run at every level in a row.
    `scales` are the loss scales that the demo compares; none given means each level's own.
    """

    name: str
    about: str
    metric: str
    steps: int
    demo_steps: int
    batch_size: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Any], str | None], Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[int, str | None], Task]
    scales: tuple[str, ...] = ()

    def build(self, seed: int, level: str = "O2") -> tuple[nn.Module, Optimizer]:
        """Return a freshly initialised model and its optimizer; the global generator is left as it was.

        The optimizer keeps no masters where `level` has none.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model()
        master = "exact" if level_of(level)[0].masters else None
        return model, self.optimizer(model.parameters(), master)

    def task(self, folder: str | None = None) -> Task:
        """Return the data, from `folder` (MNIST's IDX files) where the recipe can use one."""
        return self.data(self.batch_size, folder)

    def batches(self, seed: int) -> _data.Batches:
        """Return the training batches, in the order of `seed`."""
        return self.task().train(seed)


def _images(
    mean: float, std: float, target: Callable[[Tensor, Tensor], Tensor] = lambda images, labels: labels
) -> Callable[[int, str | None], Task]:
    def build(batch_size: int, folder: str | None) -> Task:
        data = _data.normalise(_data.image_data(folder), mean, std)
        train_y, test_y = target(data.train_x, data.train_y), target(data.test_x, data.test_y)
        return Task(
            data.name,
            lambda seed: _data.Batches(data.train_x, train_y, batch_size, seed=seed),
            tuple(zip(data.test_x.split(250), test_y.split(250))),
        )

    return build


def _ink(images: Tensor, labels: Tensor) -> Tensor:
    """Return where an image has its ink: each pixel's share of it."""
    return images.flatten(1) / images.flatten(1).sum(1, keepdim=True).clamp_min(1e-6)


_CONTEXT = 128


def _text(batch_size: int, folder: str | None) -> Task:
    if folder is not None:
        raise ConfigError("text-gpt reads the standard library's source; --data is for the digits recipes")
    train, test = _data.stdlib_text()
    test_batches = _data.TextBatches(test, 32, _CONTEXT, seed=0)
    batches = tuple(batch for _, batch in zip(range(6), test_batches))
    return Task(
        "stdlib text", lambda seed: _data.TextBatches(train, batch_size, _CONTEXT, seed=seed), batches
    )


_ALL = (
    Recipe(
        name="digits-mlp",
        about="784-512-512-10 perceptron on handwritten digits",
        metric="accuracy",
        steps=400,
        demo_steps=300,
        batch_size=64,
        model=_models.digits_mlp,
        optimizer=lambda parameters, master: SGD(parameters, lr=0.02, momentum=0.9, master=master),
        loss=F.cross_entropy,
        data=_images(0.1307, 0.3081),
    ),
    Recipe(
        name="digits-faint",
        about="784-512-784 autoencoder with gradients below fp16's range and updates below its spacing",
        metric="loss",
        steps=500,
        demo_steps=500,
        batch_size=64,
        model=_models.ink_autoencoder,
        # The loss averages over all 64 x 784 elements: the rate is 784 times what a sum over pixels needs.
        optimizer=lambda parameters, master: SGD(parameters, lr=784 * 0.4, momentum=0.9, master=master),
        loss=lambda predicted, target: F.kl_div(predicted, target, reduction="none").mean(),
        data=_images(0.0, 1.0, target=_ink),
        scales=("dynamic", "none"),
    ),
    Recipe(
        name="digits-cnn",
        about="two 5x5 convolutions on handwritten digits, log_softmax and negative log-likelihood",
        metric="accuracy",
        steps=300,
        demo_steps=200,
        batch_size=64,
        model=_models.DigitsCNN,
        optimizer=lambda parameters, master: SGD(parameters, lr=0.02, momentum=0.9, master=master),
        loss=F.nll_loss,
        data=_images(0.5, 0.5),
    ),
    Recipe(
        name="text-gpt",
        about="4-layer GPT of width 128 on the standard library's source, character by character",
        metric="loss",
        steps=200,
        demo_steps=45,
        batch_size=16,
        model=lambda: _models.TextGPT(_data.VOCABULARY, _CONTEXT),
        optimizer=lambda parameters, master: AdamW(
            parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, master=master
        ),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        data=_text,
    ),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
"""Every recipe by name."""


def recipe_of(name: str) -> Recipe:
    """Return the recipe called `name`; ConfigError with the nearest names otherwise."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown recipe {name!r}; expected one of {', '.join(RECIPES)}{hint}")
