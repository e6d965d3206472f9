"""Apex's DCGAN: two models, two optimizers, three losses with a scale each; only the import line has changed.

    python examples/apex_dcgan.py [--opt-level O1] [--steps 150] [--inject-overflow G@20 D@40 D@60 D@80]

A small DCGAN draws handwritten digits (scikit-learn's, 8x8 scaled up to 16x16). `--inject-overflow`
makes a loss infinite at a step (G: the generator's, D: the discriminator's on fakes): its scaler halves and
its optimizer alone skips that step.
"""

import argparse
import re
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits

from halfstep.compat.apex import amp

NZ, NGF, NDF = 32, 16, 16


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, NGF * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(NGF * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF * 2, NGF, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, NDF, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF, NDF * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NDF * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF * 2, 1, 4, 1, 0, bias=False),
        )

    def forward(self, image):
        return self.main(image).view(-1)


def weights_init(module):
    if "Conv" in type(module).__name__:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in type(module).__name__:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def train(opt_level="O1", steps=150, batch_size=64, inject_overflow=None, verbosity=1, loss_scale=None):
    """Train; returns losses, scales and, for the injected steps, what moved."""
    torch.manual_seed(0)
    small = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(small, size=(16, 16), mode="bilinear")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    netG, netD = Generator().to(device), Discriminator().to(device)
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    [netD, netG], [optimizerD, optimizerG] = amp.initialize(
        [netD, netG],
        [optimizerD, optimizerG],
        opt_level=opt_level,
        num_losses=3,
        loss_scale=loss_scale,
        verbosity=verbosity,
    )

    inject_overflow = inject_overflow or {}
    seen = {"lossD": [], "lossG": [], "moved": []}
    for step in range(steps):
        real = images[torch.randint(0, len(images), (batch_size,))].to(device)
        ones, zeros = torch.ones(batch_size, device=device), torch.zeros(batch_size, device=device)
        before = [[p.clone() for p in net.parameters()] for net in (netD, netG)]

        # (1) the discriminator: a real batch and a fake batch, each with its own loss and scale
        netD.zero_grad()
        errD_real = criterion(netD(real), ones)
        with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
            errD_real_scaled.backward()
        fake = netG(torch.randn(batch_size, NZ, 1, 1, device=device))
        errD_fake = criterion(netD(fake.detach()), zeros)
        if inject_overflow.get(step) == "D":
            errD_fake = errD_fake * float("inf")
        with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
            errD_fake_scaled.backward()
        optimizerD.step()

        # (2) the generator
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        if inject_overflow.get(step) == "G":
            errG = errG * float("inf")
        with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
            errG_scaled.backward()
        optimizerG.step()

        seen["lossD"].append((errD_real + errD_fake).item())
        seen["lossG"].append(errG.item())
        if step in inject_overflow:
            now = [list(net.parameters()) for net in (netD, netG)]
            moved = [any(not torch.equal(a, b) for a, b in zip(*pair)) for pair in zip(before, now)]
            seen["moved"].append({"D": moved[0], "G": moved[1]})
    seen["scales"] = [row["loss_scale"] for row in amp.state_dict().values()]
    netG.eval()
    with torch.no_grad():
        samples = netG(torch.randn(16, NZ, 1, 1, device=device)).float().cpu()
    seen["finite"] = bool(samples.isfinite().all())
    seen["spread"] = samples.std().item()
    amp.shutdown()
    return seen


def main():
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--inject-overflow", nargs="*", default=["G@20", "D@40", "D@60", "D@80"])
    args = parser.parse_args()
    if args.steps < 1 or args.opt_level not in ("O0", "O1", "O2", "O3"):
        parser.error("--steps: expected 1 or more; --opt-level: expected O0, O1, O2 or O3")
    if not all(re.fullmatch(r"[GD]@\d+", word) for word in args.inject_overflow):
        parser.error("--inject-overflow: expected words such as G@20 and D@40")
    began = time.perf_counter()
    injected = {int(step): name for name, step in (word.split("@") for word in args.inject_overflow)}
    seen = train(args.opt_level, args.steps, inject_overflow=injected)
    for step in range(0, args.steps, 25):
        print(f"step {step:4d}: loss D {seen['lossD'][step]:.3f}, loss G {seen['lossG'][step]:.3f}")
    real, fake, generator = seen["scales"]
    print(f"loss scales: real {real:g}, fake {fake:g}, generator {generator:g}")
    for (step, name), moved in zip(injected.items(), seen["moved"]):
        print(f"overflow of {name} at step {step}: D stepped: {moved['D']}, G stepped: {moved['G']}")
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
