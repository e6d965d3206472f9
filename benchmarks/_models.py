"""Eight models as training scripts have them, small enough for one CPU thread: what `never_slower.py` times.

A case builds its models and optimizers (halfstep's, or torch's for the peers), makes a batch and takes one
step through whatever offers `autocast()`, `backward(loss)` and `step(optimizer)`: a Session, or torch's own
tools behind the same three methods. Public API only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.recipes import RECIPES

Batch = tuple[Tensor, ...]
Optimizer = torch.optim.Optimizer
StepOf = Callable[[Any, Sequence[nn.Module], Sequence[Optimizer], Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """A model to train: `build(ours)` gives models and optimizers, `step` makes one whole training step."""

    name: str
    build: Callable[[bool], tuple[list[nn.Module], list[Optimizer]]]
    batch: Callable[[], Batch]
    step: StepOf


def adamw(parameters: Iterable[Any], ours: bool, lr: float = 1e-4) -> Optimizer:
    """halfstep's AdamW, or torch's, with the same arguments."""
    return hs.optim.AdamW(parameters, lr=lr) if ours else torch.optim.AdamW(parameters, lr=lr)


def sgd(parameters: Iterable[Any], ours: bool, lr: float = 0.01) -> Optimizer:
    """halfstep's SGD with momentum, or torch's."""
    kind = hs.optim.SGD if ours else torch.optim.SGD
    return kind(parameters, lr=lr, momentum=0.9)


def supervised(loss_fn: Callable[[Tensor, Tensor], Tensor]) -> StepOf:
    """The step of one model with one loss on (input, target)."""

    def step(amp: Any, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], batch: Batch) -> Tensor:
        x, y = batch
        with amp.autocast():
            loss = loss_fn(models[0](x), y)
        amp.backward(loss)
        amp.step(optimizers[0])
        return loss.detach()

    return step


def images(batch: int, channels: int, size: int, classes: int) -> Batch:
    """Random images and labels."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(batch, channels, size, size, generator=made)
    return x, torch.randint(0, classes, (batch,), generator=made)


def _conv(fan_in: int, fan_out: int, stride: int = 1, size: int = 3, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(fan_out),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut (He et al. 2015, arXiv 1512.03385)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(fan_in, fan_out, stride)
        self.second = _conv(fan_out, fan_out)
        same = stride == 1 and fan_in == fan_out
        self.shortcut = nn.Identity() if same else _conv(fan_in, fan_out, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for 32 x 32: a 3x3 stem, four stages of two residual blocks, 64 to 512 channels."""
    widths = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    stages = [nn.Sequential(Residual(a, b, s), Residual(b, b, 1)) for a, b, s in widths]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(_conv(3, 64), nn.ReLU(), *stages, *head)


class Inverted(nn.Module):
    """Expand, depthwise 3x3, project, with a shortcut (Sandler et al. 2018, arXiv 1801.04381)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        inner = fan_in * expand
        self.body = nn.Sequential(
            _conv(fan_in, inner, size=1),
            nn.ReLU6(),
            _conv(inner, inner, stride, groups=inner),
            nn.ReLU6(),
            _conv(inner, fan_out, size=1),
        )
        self.same = stride == 1 and fan_in == fan_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


def mobilenet() -> nn.Module:
    """A MobileNet-v2-like net for 32 x 32 images."""
    rows = ((16, 24, 1), (24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(_conv(3, 16), nn.ReLU6(), *(Inverted(*row) for row in rows), *head)


class Encoder(nn.Module):
    """A pre-norm transformer block with full attention (Dosovitskiy et al. 2020, arXiv 2010.11929)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class ViT(nn.Module):
    """Patches of 4 x 4, six blocks of width 192, a head on the mean token."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class LSTMLanguageModel(nn.Module):
    """Two LSTM layers between an embedding and a linear head; codes [batch, length] -> logits."""

    def __init__(self, vocabulary: int = 1000, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


def text(batch: int = 16, length: int = 32, vocabulary: int = 1000) -> Batch:
    """Random codes and the codes that follow them."""
    codes = torch.randint(0, vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()


def next_code(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _double(fan_in: int, fan_out: int) -> nn.Sequential:
    return nn.Sequential(_conv(fan_in, fan_out), nn.ReLU(), _conv(fan_out, fan_out), nn.ReLU())


class UNet(nn.Module):
    """Two steps down, two up with concatenated skips (Ronneberger et al. 2015, arXiv 1505.04597)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([_double(1, width), _double(width, 2 * width)])
        self.middle = _double(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [
                nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
                nn.ConvTranspose2d(2 * width, width, 2, 2),
            ]
        )
        self.join = nn.ModuleList([_double(4 * width, 2 * width), _double(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def masks(batch: int = 4, size: int = 64) -> Batch:
    """Random images and masks."""
    x = torch.randn(batch, 1, size, size, generator=torch.Generator().manual_seed(0))
    return x, (x > 0).float()


def generator(latent: int = 64, width: int = 32) -> nn.Module:
    """DCGAN's generator for 32 x 32 (Radford et al. 2015, arXiv 1511.06434)."""
    rows = ((latent, 4 * width, 4, 1, 0), (4 * width, 2 * width, 4, 2, 1), (2 * width, width, 4, 2, 1))
    body: list[nn.Module] = []
    for a, b, size, stride, pad in rows:
        body += [nn.ConvTranspose2d(a, b, size, stride, pad, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*body, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(width: int = 32) -> nn.Module:
    """DCGAN's discriminator for 32 x 32; logits [batch]."""
    body: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for a, b in ((width, 2 * width), (2 * width, 4 * width)):
        body += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*body, nn.Conv2d(4 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def gan_step(amp: Any, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], batch: Batch) -> Tensor:
    """One step of the discriminator on real and made images, then one of the generator."""
    (makes, judges), (for_makes, for_judges), (real, noise) = models, optimizers, batch
    ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
    judge = F.binary_cross_entropy_with_logits
    with amp.autocast():
        made = makes(noise)
        loss = judge(judges(real), ones) + judge(judges(made.detach()), zeros)
    amp.backward(loss, optimizer=for_judges)
    amp.step(for_judges)
    with amp.autocast():
        fooled = judge(judges(made), ones)
    amp.backward(fooled, optimizer=for_makes)
    amp.step(for_makes)
    return loss.detach() + fooled.detach()


def _gan(ours: bool) -> tuple[list[nn.Module], list[Optimizer]]:
    models = [generator(), discriminator()]
    return models, [adamw(model.parameters(), ours, 2e-4) for model in models]


def _noise() -> Batch:
    made = torch.Generator().manual_seed(0)
    return torch.randn(32, 3, 32, 32, generator=made).tanh(), torch.randn(32, 64, 1, 1, generator=made)


def _built(
    model: Callable[[], nn.Module], optimizer: Callable[[Iterable[Any], bool], Optimizer]
) -> Callable[[bool], tuple[list[nn.Module], list[Optimizer]]]:
    def build(ours: bool) -> tuple[list[nn.Module], list[Optimizer]]:
        made = model()
        return [made], [optimizer(made.parameters(), ours)]

    return build


def _recipe(name: str) -> Case:
    recipe = RECIPES[name]
    kind = adamw if name == "text-gpt" else sgd
    return Case(
        name,
        _built(recipe.model, kind),
        lambda: next(iter(recipe.task().train(0))),
        supervised(recipe.loss),
    )


_ALL = (
    _recipe("text-gpt"),
    _recipe("digits-cnn"),
    Case("resnet-18", _built(resnet18, sgd), lambda: images(16, 3, 32, 10), supervised(F.cross_entropy)),
    Case("vit", _built(ViT, adamw), lambda: images(16, 3, 32, 10), supervised(F.cross_entropy)),
    Case("lstm", _built(LSTMLanguageModel, adamw), text, supervised(next_code)),
    Case("mobilenet", _built(mobilenet, sgd), lambda: images(32, 3, 32, 10), supervised(F.cross_entropy)),
    Case("unet", _built(UNet, adamw), masks, supervised(F.binary_cross_entropy_with_logits)),
    Case("dcgan", _gan, _noise, gan_step),
)

CASES: Mapping[str, Case] = {case.name: case for case in _ALL}
"""The eight models by name."""


def build(case: Case, ours: bool) -> tuple[list[nn.Module], list[Optimizer], Batch]:
    """Freshly seeded models, optimizers and batch of a case; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models, optimizers = case.build(ours)
        return models, optimizers, case.batch()
