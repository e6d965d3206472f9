"""Sixty small training programs, as people write them, on tiny sizes, with plain torch or a session.

A program gets a `Kit` and returns the losses of its steps. `kit.prepare` gives what drives it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import halfstep as hs

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
Losses = list[float]


class Plain:
    """The loop that people write with torch alone, behind a session's words."""

    def __init__(self, models: Any, optimizers: Any) -> None:
        self.models = list(models) if isinstance(models, list | tuple) else [models]
        self.optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]

    def autocast(self) -> Any:
        return nullcontext()

    def backward(self, loss: Any, optimizer: Any = None, **kwargs: Any) -> None:
        others = [o for o in self.optimizers if optimizer is not None and o is not optimizer]
        kept = [(p, p.grad) for o in others for g in o.param_groups for p in g["params"]]
        for p, _ in kept:
            p.grad = None
        loss.backward(**kwargs)
        for p, grad in kept:
            p.grad = grad

    def step(self, optimizer: Any = None, *, clip_norm: float | None = None, zero_grad: bool = True) -> None:
        optimizer = self.optimizers[0] if optimizer is None else optimizer
        if clip_norm is not None:
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip_norm)
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad()

    def scale(self, loss: Any) -> Any:
        return loss

    def evaluating(self) -> Any:
        return torch.no_grad()


@dataclass
class Kit:
    """How a program is run: `level` None is plain torch."""

    level: str | None
    losses: Losses = field(default_factory=list)

    def prepare(self, models: Any, optimizers: Any) -> Any:
        if self.level is None:
            return Plain(models, optimizers)
        return hs.prepare(models, optimizers, level=self.level, dtype=None if self.level == "O0" else "bf16")

    def train(self, amp: Any, loss_of: Callable[[int], Any], steps: int = 4, **options: Any) -> Losses:
        """The usual loop over `loss_of(i)`."""
        for i in range(steps):
            with amp.autocast():
                loss = loss_of(i)
            amp.backward(loss)
            amp.step(**options)
            self.losses.append(loss.item())
        return self.losses


PROGRAMS: dict[str, Callable[[Kit], Losses]] = {}


def program(run: Callable[[Kit], Losses]) -> Callable[[Kit], Losses]:
    PROGRAMS[run.__name__] = run
    return run


def mlp(*sizes: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(n: int, classes: int) -> torch.Tensor:
    return torch.arange(n) % classes


# --- optimizers, schedules, parameter groups ---------------------------------------------------------------


@program
def classifier_sgd_momentum(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4))
    return kit.train(amp, lambda i: F.cross_entropy(net(x), y))


@program
def regression_adamw_clipped(kit: Kit) -> Losses:
    net, x = mlp(8, 16, 1), noise(16, 8)
    amp = kit.prepare(net, AdamW(net.parameters(), lr=1e-2))
    return kit.train(amp, lambda i: F.mse_loss(net(x), x.sum(1, keepdim=True)), clip_norm=0.5)


@program
def two_optimizers_on_one_loss(kit: Kit) -> Losses:
    encoder, decoder, x = mlp(8, 8), mlp(8, 8), noise(16, 8)
    one, two = SGD(encoder.parameters(), lr=0.1), Adam(decoder.parameters(), lr=1e-2)
    amp = kit.prepare([encoder, decoder], [one, two])
    for _ in range(4):
        with amp.autocast():
            loss = F.mse_loss(decoder(encoder(x)), x)
        amp.backward(loss)
        amp.step(one)
        amp.step(two)
        kit.losses.append(loss.item())
    return kit.losses


@program
def warm_up_of_the_learning_rate(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    optimizer = SGD(net.parameters(), lr=0.2, momentum=0.9)
    schedule = LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 4))
    amp = kit.prepare(net, optimizer)
    for _ in range(5):
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=1)
        schedule.step()
    return kit.losses


@program
def warm_up_of_momentum_by_group(kit: Kit) -> Losses:
    """YOLOv5's: momentum rises, the bias group's rate falls."""
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    biases = [p for n, p in net.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in net.named_parameters() if not n.endswith("bias")]
    optimizer = SGD([{"params": weights, "weight_decay": 1e-3}, {"params": biases}], lr=0.05, momentum=0.0)
    amp = kit.prepare(net, optimizer)
    for i in range(5):
        for j, group in enumerate(optimizer.param_groups):
            group["momentum"], group["lr"] = 0.2 * i, (0.05 if j == 0 else 0.1 - 0.01 * i)
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=1)
    return kit.losses


@program
def one_cycle(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    optimizer = Adam(net.parameters(), lr=1e-2)
    schedule = OneCycleLR(optimizer, max_lr=2e-2, total_steps=8)
    amp = kit.prepare(net, optimizer)
    for _ in range(5):
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=1)
        schedule.step()
    return kit.losses


@program
def cosine_restarts_and_rates_by_layer(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 16, 4), noise(16, 8), labels(16, 4)
    linears = [m for m in net if isinstance(m, nn.Linear)]
    groups = [{"params": m.parameters(), "lr": 0.1 * 0.5**i} for i, m in enumerate(reversed(linears))]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    schedule = CosineAnnealingWarmRestarts(optimizer, T_0=2)
    amp = kit.prepare(net, optimizer)
    for _ in range(5):
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=1)
        schedule.step()
    return kit.losses


@program
def gradient_accumulation(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
    for _ in range(3):
        for part in range(4):
            with amp.autocast():
                loss = F.cross_entropy(net(x[part::4]), y[part::4]) / 4
            amp.backward(loss)
            kit.losses.append(loss.item())
        amp.step()
    return kit.losses


@program
def freezing_and_thawing(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    for frozen in (True, False, True):
        net[0].requires_grad_(not frozen)
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=2)
    return kit.losses


@program
def changing_batch_sizes(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    return kit.train(amp, lambda i: F.cross_entropy(net(x[: 2 + 3 * i]), y[: 2 + 3 * i]), steps=5)


@program
def rmsprop_and_label_smoothing(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, torch.optim.RMSprop(net.parameters(), lr=1e-3))
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    return kit.train(amp, lambda i: F.cross_entropy(net(x), y, weight=weight, label_smoothing=0.1))


# --- averages ----------------------------------------------------------------------------------------------


@program
def average_by_hand(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    average = copy.deepcopy(net)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    for _ in range(4):
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=1)
        with amp.evaluating():
            for a, p in zip(average.parameters(), net.parameters()):
                a.lerp_(p, 0.1)
    return [*kit.losses, F.cross_entropy(average(x), y).item()]


@program
def average_made_after_prepare(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    average = copy.deepcopy(net)
    for _ in range(4):
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=1)
        for a, p in zip(average.state_dict().values(), net.state_dict().values()):
            a.mul_(0.9).add_(p.detach(), alpha=0.1)
    return [*kit.losses, F.cross_entropy(average(x), y).item()]


@program
def averaged_model(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for _ in range(4):
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=1)
        with amp.evaluating():
            average.update_parameters(net)
    return [*kit.losses, F.cross_entropy(average(x), y).item()]


# --- models that change ------------------------------------------------------------------------------------


@program
def pruning_by_a_mask(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    mask = (noise(16, 8, seed=5) > 0).float()
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    for _ in range(4):
        with torch.no_grad():
            net[0].weight.mul_(mask.to(net[0].weight.dtype))
        kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=1)
    return kit.losses


@program
def pruning_by_torch(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    prune.l1_unstructured(net[0], "weight", amount=0.5)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    return kit.train(amp, lambda i: F.cross_entropy(net(x), y))


@program
def a_layer_is_added(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    optimizer = SGD(net.parameters(), lr=0.1)
    amp = kit.prepare(net, optimizer)
    kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=2)
    more = nn.Linear(4, 4)
    optimizer.add_param_group({"params": more.parameters(), "lr": 0.05})
    return kit.train(amp, lambda i: F.cross_entropy(more(net(x).float()), y), steps=3)


@program
def a_layer_is_shrunk_between_sessions(kit: Kit) -> Losses:
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    kit.train(amp, lambda i: F.cross_entropy(net(x), y), steps=2)
    if kit.level is not None:
        amp.revert()
    first, last = nn.Linear(8, 10), nn.Linear(10, 4)
    with torch.no_grad():
        first.weight.copy_(net[0].weight[:10])
        last.weight.copy_(net[2].weight[:, :10])
    small = nn.Sequential(first, nn.GELU(), last)
    amp = kit.prepare(small, SGD(small.parameters(), lr=0.1))
    return kit.train(amp, lambda i: F.cross_entropy(small(x), y), steps=2)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(noise(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(noise(base.out_features, rank, seed=2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@program
def low_rank_adapters(kit: Kit) -> Losses:
    net = nn.Sequential(Adapted(nn.Linear(8, 16)), nn.GELU(), Adapted(nn.Linear(16, 4)))
    x, y = noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2))
    return kit.train(amp, lambda i: F.cross_entropy(net(x), y))


@program
def tied_weights(kit: Kit) -> Losses:
    words, body = nn.Embedding(12, 8), mlp(8, 16, 8)
    out = nn.Linear(8, 12, bias=False)
    out.weight = words.weight
    net, tokens = nn.Sequential(words, body, out), torch.arange(24).reshape(4, 6) % 12
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    return kit.train(
        amp, lambda i: F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    )


@program
def spectral_norm(kit: Kit) -> Losses:
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 16)), nn.GELU(), nn.Linear(16, 4))
    x, y = noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    return kit.train(amp, lambda i: F.cross_entropy(net(x), y))


@program
def weight_norm(kit: Kit) -> Losses:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 16)), nn.GELU(), nn.Linear(16, 4))
    x, y = noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    return kit.train(amp, lambda i: F.cross_entropy(net(x), y))


@program
def hypernetwork(kit: Kit) -> Losses:
    net, x, y = mlp(3, 16, 8 * 4), noise(16, 8), labels(16, 4)
    task = noise(3, seed=4)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    return kit.train(amp, lambda i: F.cross_entropy(x @ net(task).view(8, 4).float(), y))


# --- generative --------------------------------------------------------------------------------------------


@program
def gan(kit: Kit) -> Losses:
    maker, judge, real = mlp(4, 16, 8), mlp(8, 16, 1), noise(16, 8) + 1
    makes, judges = Adam(maker.parameters(), lr=1e-3), Adam(judge.parameters(), lr=1e-3)
    amp = kit.prepare([maker, judge], [makes, judges])
    one, zero = torch.ones(16, 1), torch.zeros(16, 1)
    for i in range(3):
        z = noise(16, 4, seed=i)
        with amp.autocast():
            fake = maker(z)
            d = F.binary_cross_entropy_with_logits(judge(real), one)
            d = d + F.binary_cross_entropy_with_logits(judge(fake.detach()), zero)
        amp.backward(d, judges)
        amp.step(judges)
        with amp.autocast():
            g = F.binary_cross_entropy_with_logits(judge(maker(z)), one)
        amp.backward(g, makes)
        amp.step(makes)
        kit.losses += [d.item(), g.item()]
    return kit.losses


@program
def wasserstein_gan_with_clamped_weights(kit: Kit) -> Losses:
    maker, critic, real = mlp(4, 16, 8), mlp(8, 16, 1), noise(16, 8) + 1
    makes = torch.optim.RMSprop(maker.parameters(), lr=1e-3)
    judges = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    amp = kit.prepare([maker, critic], [makes, judges])
    for i in range(3):
        z = noise(16, 4, seed=i)
        with amp.autocast():
            d = critic(maker(z).detach()).mean() - critic(real).mean()
        amp.backward(d, judges)
        amp.step(judges)
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        with amp.autocast():
            g = -critic(maker(z)).mean()
        amp.backward(g, makes)
        amp.step(makes)
        kit.losses += [d.item(), g.item()]
    return kit.losses


@program
def wasserstein_gan_with_gradient_penalty(kit: Kit) -> Losses:
    critic, real, fake = mlp(8, 16, 1), noise(16, 8) + 1, noise(16, 8, seed=2)
    amp = kit.prepare(critic, Adam(critic.parameters(), lr=1e-3))
    for _ in range(3):
        between = (0.5 * real + 0.5 * fake).requires_grad_()
        with amp.autocast():
            out = critic(between)
            (slope,) = torch.autograd.grad(out.float().sum(), between, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + ((slope.float().norm(dim=1) - 1) ** 2).mean()
        amp.backward(loss)
        amp.step()
        kit.losses.append(loss.item())
    return kit.losses


@program
def diffusion_with_an_average(kit: Kit) -> Losses:
    net, x = mlp(9, 32, 8), noise(16, 8)
    average = copy.deepcopy(net)
    betas = torch.linspace(1e-3, 0.2, 10)
    kept = torch.cumprod(1 - betas, 0)

    def loss(t: torch.Tensor, e: torch.Tensor, i: int) -> torch.Tensor:
        noisy = kept[t, None].sqrt() * x + (1 - kept[t, None]).sqrt() * e
        return F.mse_loss(net(torch.cat([noisy, t[:, None] / 10], 1)), e)

    amp = kit.prepare(net, AdamW(net.parameters(), lr=1e-2))
    for i in range(4):
        t, e = torch.arange(16) % 10, noise(16, 8, seed=i)
        kit.train(amp, partial(loss, t, e), steps=1)
        with amp.evaluating():
            for a, p in zip(average.parameters(), net.parameters()):
                a.lerp_(p, 0.2)
    return [*kit.losses, average(torch.ones(1, 9)).square().mean().item()]


@program
def variational_autoencoder(kit: Kit) -> Losses:
    encoder, decoder, x = mlp(8, 16, 8), mlp(4, 16, 8), noise(16, 8)
    net = nn.ModuleList([encoder, decoder])

    def loss(i: int) -> torch.Tensor:
        mean, spread = encoder(x).chunk(2, -1)
        z = mean + noise(16, 4, seed=i) * (0.5 * spread).exp()
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).mean()
        return F.mse_loss(decoder(z), x) + 0.1 * divergence

    return kit.train(kit.prepare(net, Adam(net.parameters(), lr=1e-2)), loss)


@program
def vector_quantised_codes(kit: Kit) -> Losses:
    encoder, decoder, x = mlp(8, 16, 4), mlp(4, 16, 8), noise(16, 8)
    net = nn.ModuleList([encoder, decoder])
    net.register_buffer("codes", noise(6, 4, seed=7))
    net.register_buffer("count", torch.zeros(6, dtype=torch.long))

    def loss(i: int) -> torch.Tensor:
        z = encoder(x).float()
        codes = net.codes.float()
        chosen = torch.cdist(z.detach(), codes).argmin(1)
        net.count += torch.bincount(chosen, minlength=6)
        straight = z + (codes[chosen] - z).detach()
        return F.mse_loss(decoder(straight), x) + 0.25 * F.mse_loss(z, codes[chosen])

    losses = kit.train(kit.prepare(net, Adam(net.parameters(), lr=1e-2)), loss)
    assert int(net.count.sum()) == 64
    return losses


@program
def normalising_flow(kit: Kit) -> Losses:
    net, x = mlp(4, 16, 8), noise(16, 8)

    def loss(i: int) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        scale, shift = net(a).float().tanh().chunk(2, -1)
        z = torch.cat([a, b * scale.exp() + shift], 1)
        return 0.5 * z.square().sum(1).mean() - scale.sum(1).mean()

    return kit.train(kit.prepare(net, Adam(net.parameters(), lr=1e-2)), loss)


@program
def energy_model_with_langevin_samples(kit: Kit) -> Losses:
    net, x = mlp(8, 16, 1), noise(16, 8)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-3))

    def loss(i: int) -> torch.Tensor:
        sample = noise(16, 8, seed=i).requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(net(sample).float().sum(), sample)
            sample = (sample - 0.1 * slope).detach().requires_grad_()
        return net(x).mean() - net(sample.detach()).mean()

    return kit.train(amp, loss)


# --- learning from rewards ---------------------------------------------------------------------------------


@program
def policy_gradient(kit: Kit) -> Losses:
    net, states = mlp(8, 16, 4), noise(16, 8)
    actions, returns = labels(16, 4), noise(16, seed=3)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        chances = torch.distributions.Categorical(logits=net(states).float())
        return -(chances.log_prob(actions) * returns).mean() - 0.01 * chances.entropy().mean()

    return kit.train(amp, loss)


@program
def proximal_policy_optimisation(kit: Kit) -> Losses:
    actor, critic, states = mlp(8, 16, 4), mlp(8, 16, 1), noise(16, 8)
    net = nn.ModuleList([actor, critic])
    actions, returns = labels(16, 4), noise(16, seed=3)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    with amp.evaluating():  # the rollout
        before = F.log_softmax(actor(states).float(), -1)[torch.arange(16), actions]
        values = critic(states).float().squeeze(-1)
    advantage = returns - values

    def loss(i: int) -> torch.Tensor:
        now = F.log_softmax(actor(states).float(), -1)[torch.arange(16), actions]
        ratio = (now - before).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -clipped.mean() + 0.5 * F.mse_loss(critic(states).float().squeeze(-1), returns)

    return kit.train(amp, loss, clip_norm=0.5)


@program
def q_learning_with_a_target_network(kit: Kit) -> Losses:
    net, states, rewards = mlp(8, 16, 4), noise(16, 8), noise(16, seed=3)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    target = copy.deepcopy(net)

    def loss(wanted: torch.Tensor, i: int) -> torch.Tensor:
        return F.smooth_l1_loss(net(states).amax(1), wanted)

    for _ in range(2):
        with torch.no_grad():
            wanted = rewards + 0.9 * target(states.roll(1, 0)).float().amax(1)
        kit.train(amp, partial(loss, wanted), steps=2)
        target.load_state_dict(net.state_dict())
    return kit.losses


# --- learning from other models ----------------------------------------------------------------------------


@program
def distillation(kit: Kit) -> Losses:
    teacher, student, x, y = mlp(8, 32, 4), mlp(8, 8, 4), noise(16, 8), labels(16, 4)
    teacher.eval().requires_grad_(False)
    amp = kit.prepare(student, Adam(student.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        out, hint = student(x), teacher(x)
        soft = F.kl_div(F.log_softmax(out / 2, -1), F.softmax(hint / 2, -1), reduction="batchmean")
        return F.cross_entropy(out, y) + 4 * soft

    return kit.train(amp, loss)


@program
def contrastive_with_a_learned_temperature(kit: Kit) -> Losses:
    images, texts = mlp(8, 16, 8), mlp(6, 16, 8)
    net = nn.ModuleDict({"images": images, "texts": texts})
    net.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    a, b = noise(8, 8), noise(8, 6, seed=2)
    amp = kit.prepare(net, AdamW(net.parameters(), lr=1e-3))

    def loss(i: int) -> torch.Tensor:
        u, v = F.normalize(images(a).float(), dim=-1), F.normalize(texts(b).float(), dim=-1)
        logits = net.temperature.float().exp().clamp(max=100) * u @ v.t()
        match = torch.arange(8)
        return 0.5 * (F.cross_entropy(logits, match) + F.cross_entropy(logits.t(), match))

    return kit.train(amp, loss)


@program
def triplets(kit: Kit) -> Losses:
    net, a, b, c = mlp(8, 16, 4), noise(8, 8), noise(8, 8, seed=2), noise(8, 8, seed=3)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.05))
    return kit.train(amp, lambda i: F.triplet_margin_loss(net(a), net(b), net(c)))


@program
def bootstrap_your_own_targets(kit: Kit) -> Losses:
    online, head, x = mlp(8, 16, 8), mlp(8, 8), noise(16, 8)
    net = nn.ModuleList([online, head])
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.05))
    slow = copy.deepcopy(online)

    def loss(wanted: torch.Tensor, i: int) -> torch.Tensor:
        return 1 - F.cosine_similarity(head(online(x)), wanted).mean()

    for i in range(4):
        with torch.no_grad():
            wanted = slow(x + 0.1 * noise(16, 8, seed=i)).float()
        kit.train(amp, partial(loss, wanted), steps=1)
        for a, p in zip(slow.parameters(), online.parameters()):
            a.data.mul_(0.9).add_(p.data, alpha=0.1)
    return kit.losses


@program
def learning_to_adapt(kit: Kit) -> Losses:
    """MAML: a step within the step, with its graph."""
    net, x, y = mlp(4, 16, 1), noise(12, 4), noise(12, 1, seed=2)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        weights = dict(net.named_parameters())
        inner = F.mse_loss(functional_call(net, weights, (x[:6],)), y[:6])
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {n: p - 0.1 * g for (n, p), g in zip(weights.items(), grads)}
        return F.mse_loss(functional_call(net, adapted, (x[6:],)), y[6:])

    return kit.train(amp, loss, steps=3)


# --- structures --------------------------------------------------------------------------------------------


@program
def mixture_of_experts_with_empty_ones(kit: Kit) -> Losses:
    gate, experts = nn.Linear(8, 6), nn.ModuleList(mlp(8, 8, 4) for _ in range(6))
    net, x, y = nn.ModuleList([gate, experts]), noise(6, 8), labels(6, 4)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        chances = F.softmax(gate(x).float(), -1)
        best, chosen = chances.max(-1)
        out = torch.zeros(6, 4)
        for e, expert in enumerate(experts):
            rows = (chosen == e).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]).float() * best[rows, None])
        return F.cross_entropy(out, y)

    return kit.train(amp, loss)


@program
def recommender_with_sparse_gradients(kit: Kit) -> Losses:
    users, items = nn.Embedding(20, 4, sparse=True), nn.Embedding(30, 4, sparse=True)
    net = nn.ModuleList([users, items])
    u, v, stars = torch.arange(16) % 20, (torch.arange(16) * 7) % 30, noise(16)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.5))
    return kit.train(amp, lambda i: F.mse_loss((users(u) * items(v)).sum(-1), stars))


@program
def bags_of_words(kit: Kit) -> Losses:
    bag, out = nn.EmbeddingBag(20, 8), nn.Linear(8, 4)
    net, tokens = nn.Sequential(bag, out), torch.arange(48).reshape(8, 6) % 20
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    return kit.train(amp, lambda i: F.cross_entropy(out(bag(tokens)), labels(8, 4)))


@program
def graph_network(kit: Kit) -> Losses:
    message, update, out = nn.Linear(8, 8), nn.Linear(16, 8), nn.Linear(8, 4)
    net, x = nn.ModuleList([message, update, out]), noise(12, 8)
    source, target = torch.arange(24) % 12, (torch.arange(24) * 5 + 1) % 12
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        sent = message(x)[source]
        heard = torch.zeros_like(x, dtype=sent.dtype).index_add(0, target, sent)
        h = F.relu(update(torch.cat([x, heard.to(x.dtype)], 1)))
        return F.cross_entropy(out(h), labels(12, 4))

    return kit.train(amp, loss)


@program
def graph_attention(kit: Kit) -> Losses:
    lift, score, out = nn.Linear(8, 8), nn.Linear(16, 1), nn.Linear(8, 4)
    net, x = nn.ModuleList([lift, score, out]), noise(12, 8)
    source, target = torch.arange(24) % 12, (torch.arange(24) * 5 + 1) % 12
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        h = lift(x)
        weight = F.leaky_relu(score(torch.cat([h[source], h[target]], 1))).float().exp()
        total = torch.zeros(12, 1).scatter_add(0, target[:, None], weight)
        share = weight / total[target]
        mixed = torch.zeros(12, 8).index_add(0, target, share * h[source].float())
        return F.cross_entropy(out(mixed), labels(12, 4))

    return kit.train(amp, loss)


class Spectral(nn.Module):
    """A layer in the frequency domain with complex weights, and a table of complex phases."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(noise(5) * 0.3, noise(5, seed=2) * 0.3))
        self.register_buffer("phase", torch.exp(1j * torch.arange(5)))
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight * self.phase, n=8))


@program
def complex_weights_and_buffers(kit: Kit) -> Losses:
    net, x, y = Spectral(), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))
    losses = kit.train(amp, lambda i: F.cross_entropy(net(x), y))
    assert net.weight.is_complex()
    return losses


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 16, 4)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int32))
        self.register_buffer("on", torch.tensor([True, False, True, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += torch.ones(4, dtype=torch.int32)
        return self.body(x) * self.on


@program
def integer_and_boolean_buffers(kit: Kit) -> Losses:
    net, x, y = Counting(), noise(16, 8), labels(16, 4)
    losses = kit.train(
        kit.prepare(net, Adam(net.parameters(), lr=1e-2)), lambda i: F.cross_entropy(net(x), y)
    )
    assert (int(net.calls), net.seen.tolist()) == (4, [4] * 4)
    return losses


# --- images, sequences -------------------------------------------------------------------------------------


@program
def convolutions_with_batch_norm(kit: Kit) -> Losses:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
    )
    x, y = noise(8, 1, 8, 8), labels(8, 4)
    return kit.train(kit.prepare(net, SGD(net.parameters(), lr=0.1)), lambda i: F.cross_entropy(net(x), y))


@program
def segmentation(kit: Kit) -> Losses:
    down, up = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 3, 2, stride=2)
    net, x = nn.ModuleList([down, up]), noise(2, 1, 8, 8)
    y = torch.arange(128).reshape(2, 8, 8) % 3
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        h = F.relu(down(x))
        rough = F.interpolate(h[:, :3].float(), scale_factor=2, mode="bilinear")
        return F.cross_entropy(up(h) + rough, y)

    return kit.train(amp, loss)


@program
def detection_heads(kit: Kit) -> Losses:
    trunk, kinds, boxes = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 1), nn.Conv2d(4, 4, 1)
    net, x = nn.ModuleList([trunk, kinds, boxes]), noise(2, 1, 6, 6)
    y, where = torch.arange(72).reshape(2, 6, 6) % 3, noise(2, 4, 6, 6, seed=2)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.05, momentum=0.9))

    def loss(i: int) -> torch.Tensor:
        h = F.silu(trunk(x))
        return F.cross_entropy(kinds(h), y) + F.smooth_l1_loss(boxes(h), where)

    return kit.train(amp, loss)


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.cells, self.out = nn.Embedding(12, 8), kind(8, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        h, state = self.cells(self.words(tokens), state)
        return self.out(h), state


def _language(kit: Kit, kind: type[nn.RNNBase]) -> Losses:
    net, tokens = Tagger(kind), torch.arange(28).reshape(4, 7) % 12
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    return kit.train(
        amp, lambda i: F.cross_entropy(net(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
    )


@program
def language_model_lstm(kit: Kit) -> Losses:
    return _language(kit, nn.LSTM)


@program
def language_model_gru(kit: Kit) -> Losses:
    return _language(kit, nn.GRU)


@program
def truncated_backpropagation(kit: Kit) -> Losses:
    net, tokens = Tagger(nn.GRU), torch.arange(52).reshape(4, 13) % 12
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.5))
    state = None
    for start in range(0, 12, 3):
        part = tokens[:, start : start + 4]
        with amp.autocast():
            out, state = net(part[:, :-1], state)
            loss = F.cross_entropy(out.flatten(0, 1), part[:, 1:].flatten())
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        state = state.detach()
        kit.losses.append(loss.item())
    return kit.losses


@program
def transformer_encoder(kit: Kit) -> Losses:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Embedding(12, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    out, tokens = nn.Linear(8, 12), torch.arange(24).reshape(4, 6) % 12
    whole = nn.Sequential(net, out)
    amp = kit.prepare(whole, AdamW(whole.parameters(), lr=1e-2))
    return kit.train(amp, lambda i: F.cross_entropy(whole(tokens).flatten(0, 1), tokens.flatten()))


@program
def attention_with_a_mask(kit: Kit) -> Losses:
    make, out, x = nn.Linear(8, 24), nn.Linear(8, 4), noise(4, 6, 8)
    net = nn.ModuleList([make, out])
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        q, k, v = (t.view(4, 6, 2, 4).transpose(1, 2) for t in make(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(out(h).flatten(0, 1), labels(24, 4))

    return kit.train(amp, loss)


@program
def recomputed_activations(kit: Kit) -> Losses:
    net, x, y = nn.Sequential(*(mlp(8, 16, 8) for _ in range(3))), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))

    def loss(i: int) -> torch.Tensor:
        h: Any = x.to(next(net.parameters()).dtype)
        for block in net:
            h = checkpoint(block, h, use_reentrant=False)
        return F.cross_entropy(h[:, :4], y)

    return kit.train(amp, loss)


@program
def speech_with_ctc(kit: Kit) -> Losses:
    net, x = nn.Linear(8, 5), noise(12, 4, 8)
    targets = torch.arange(12).reshape(4, 3) % 4 + 1
    lengths = torch.full((4,), 12), torch.full((4,), 3)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    return kit.train(amp, lambda i: F.ctc_loss(F.log_softmax(net(x), -1), targets, *lengths))


# --- losses and numbers ------------------------------------------------------------------------------------


@program
def tasks_weighted_by_uncertainty(kit: Kit) -> Losses:
    body, one, two = mlp(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)
    net = nn.ModuleList([body, one, two])
    net.spread = nn.Parameter(torch.zeros(2))
    x, y = noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        h, spread = body(x), net.spread.float()
        parts = torch.stack([F.cross_entropy(one(h), y), F.mse_loss(two(h).squeeze(-1), x[:, 0])])
        return (parts * (-spread).exp() + spread).sum()

    return kit.train(amp, loss)


@program
def quantile_regression(kit: Kit) -> Losses:
    net, x = mlp(8, 16, 3), noise(16, 8)
    q = torch.tensor([0.1, 0.5, 0.9])
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        error = x.sum(1, keepdim=True) - net(x)
        return torch.maximum(q * error, (q - 1) * error).mean()

    return kit.train(amp, loss)


@program
def many_labels(kit: Kit) -> Losses:
    net, x = mlp(8, 16, 5), noise(16, 8)
    y = (noise(16, 5, seed=2) > 0).float()
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    weight = torch.full((5,), 2.0)
    return kit.train(amp, lambda i: F.binary_cross_entropy_with_logits(net(x), y, pos_weight=weight))


@program
def radial_basis_functions(kit: Kit) -> Losses:
    net = nn.Linear(6, 1)
    net.centres = nn.Parameter(noise(6, 8, seed=5))
    x = noise(16, 8)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))
    return kit.train(
        amp,
        lambda i: F.mse_loss(
            net((-torch.cdist(x, net.centres.float()).square() / 16).exp()).squeeze(-1), x[:, 0]
        ),
    )


@program
def physics_informed(kit: Kit) -> Losses:
    """u' = -u, u(0) = 1: the derivative by autograd is part of the loss."""
    net = mlp(1, 16, 1, act=nn.Tanh)
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        t = torch.linspace(0, 1, 16)[:, None].requires_grad_()
        u = net(t).float()
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return (slope + u).square().mean() + (u[0] - 1).square().mean()

    return kit.train(amp, loss)


@program
def ordinary_differential_equation(kit: Kit) -> Losses:
    field_, out, x, y = mlp(8, 16, 8, act=nn.Tanh), nn.Linear(8, 4), noise(16, 8), labels(16, 4)
    net = nn.ModuleList([field_, out])
    amp = kit.prepare(net, Adam(net.parameters(), lr=1e-2))

    def loss(i: int) -> torch.Tensor:
        h = x
        for _ in range(5):
            h = h + 0.2 * field_(h).float()
        return F.cross_entropy(out(h), y)

    return kit.train(amp, loss)


@program
def smooth_gradients(kit: Kit) -> Losses:
    """The gradient with respect to the input is part of the loss."""
    net, x, y = mlp(8, 16, 4), noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))

    def loss(i: int) -> torch.Tensor:
        given = x.clone().requires_grad_()
        fit = F.cross_entropy(net(given), y)
        (slope,) = torch.autograd.grad(fit, given, create_graph=True)
        return fit + 10 * slope.float().square().sum()

    return kit.train(amp, loss)


@program
def dropout_with_a_seed(kit: Kit) -> Losses:
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 4))
    x, y = noise(16, 8), labels(16, 4)
    amp = kit.prepare(net, SGD(net.parameters(), lr=0.1))

    def loss(i: int) -> torch.Tensor:
        torch.manual_seed(i)
        return F.cross_entropy(net(x), y)

    return kit.train(amp, loss)
