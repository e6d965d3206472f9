"""What torch's own tests of GradScaler do, with torch's scaler and with ours: the same weights and scales.

Each scene is named after the test of PyTorch whose public aim it has; optimizers are torch's, run in every
way that a CPU has. The count is printed in docs/coverage.md (`python -m tests.behaviour.test_scaler_scenes`).
"""

import itertools
import pickle
import re
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from halfstep.compat import torch_amp

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
MARKS = "<!-- scaler -->", "<!-- end of scaler -->"
ABOUT = """## GradScaler

What torch's own tests of `GradScaler` do (those that need no second device), with torch's scaler and with
ours from `halfstep.compat.torch_amp`, on a CPU. Equal: the same weights, scales and counts, bit for bit."""
KINDS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Rig:
    """Two models of the same start, a scaler each of which is tried, and batches with one bad of four."""

    def __init__(self, amp, kind, way, **scaler):
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
        self.optimizers = [KINDS[kind](m.parameters(), lr=0.1, **WAYS[way]) for m in self.models]
        given = {"init_scale": 128.0, "growth_factor": 2.0, "growth_interval": 1, **scaler}
        self.scaler, self.autocast = amp.GradScaler("cpu", **given), amp.autocast
        self.data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]
        self.seen = []

    def loss(self, x, y, model=0, on=False):
        with self.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            return nn.functional.mse_loss(self.models[model](x), y)

    def spoil(self, batch, model=0):
        if batch == 2:
            self.models[model][1].weight.grad.fill_(float("inf"))

    def end(self):
        self.scaler.update()
        self.seen += [torch.tensor(self.scaler.get_scale()), torch.tensor(self.scaler.get_scale() > 0)]

    def result(self):
        return [*self.seen, *(p.detach() for model in self.models for p in model.parameters())]


def plain(rig, on=False, unscale=False, clip=None):
    for batch, (x, y) in enumerate(rig.data):
        rig.optimizers[0].zero_grad()
        loss = rig.loss(x, y, on=on)
        rig.scaler.scale(loss).backward()
        rig.spoil(batch)
        if unscale:
            rig.scaler.unscale_(rig.optimizers[0])
        if clip is not None:
            nn.utils.clip_grad_norm_(
                rig.models[0].parameters(), clip * (1 if unscale else rig.scaler.get_scale())
            )
        rig.scaler.step(rig.optimizers[0])
        rig.end()


def accumulation(rig):
    for batch, (x, y) in enumerate(rig.data):
        rig.scaler.scale(rig.loss(x, y) / 2).backward()
        if batch % 2:
            rig.scaler.step(rig.optimizers[0])
            rig.end()
            rig.optimizers[0].zero_grad()


def penalty(rig):
    for batch, (x, y) in enumerate(rig.data):
        rig.optimizers[0].zero_grad()
        loss = rig.loss(x, y)
        scaled = torch.autograd.grad(rig.scaler.scale(loss), rig.models[0].parameters(), create_graph=True)
        norm = sum((g / rig.scaler.get_scale()).square().sum() for g in scaled).sqrt()
        rig.scaler.scale(loss + norm).backward()
        rig.spoil(batch)
        rig.scaler.step(rig.optimizers[0])
        rig.end()


def multiple(rig):
    for batch, (x, y) in enumerate(rig.data):
        for optimizer in rig.optimizers:
            optimizer.zero_grad()
        a, b = rig.loss(x, y), rig.loss(x, y, 1)
        rig.scaler.scale(0.3 * a + 0.7 * b).backward(retain_graph=True)
        rig.scaler.scale(0.6 * a - 0.4 * b).backward()
        rig.spoil(batch, 1)
        rig.scaler.unscale_(rig.optimizers[0])
        for optimizer in rig.optimizers:
            rig.scaler.step(optimizer)
        rig.end()


def parameters_replaced(rig):
    """Weights and gradients made anew between unscale_ and step."""
    for x, y in rig.data:
        rig.optimizers[0].zero_grad()
        rig.scaler.scale(rig.loss(x, y)).backward()
        rig.scaler.unscale_(rig.optimizers[0])
        for p in rig.models[0].parameters():
            with torch.no_grad():
                p.set_(p.detach().clone())
            p.grad = p.grad.clone()
        rig.scaler.step(rig.optimizers[0])
        rig.end()


def saved(rig):
    plain(rig)
    state = pickle.loads(pickle.dumps(rig.scaler.state_dict()))
    rig.seen += [torch.tensor(float(state[key])) for key in ("scale", "growth_factor", "backoff_factor")]
    rig.seen += [torch.tensor(state[key]) for key in ("growth_interval", "_growth_tracker")]
    rig.scaler.load_state_dict({**state, "scale": 64.0})
    plain(rig)


def set_by_hand(rig):
    for x, y in rig.data:
        rig.optimizers[0].zero_grad()
        rig.scaler.scale(rig.loss(x, y)).backward()
        rig.scaler.step(rig.optimizers[0])
        rig.scaler.update(16.0)
        rig.seen.append(torch.tensor(rig.scaler.get_scale()))
    rig.scaler.update(torch.tensor(32.0))
    rig.seen.append(torch.tensor(rig.scaler.get_scale()))


def values(rig):
    """inf and NaN in any place of any gradient."""
    for place, bad in itertools.product(range(4), (float("inf"), float("nan"), -float("inf"))):
        rig.optimizers[0].zero_grad()
        x, y = rig.data[0]
        rig.scaler.scale(rig.loss(x, y)).backward()
        grads = [p.grad for p in rig.models[0].parameters()]
        grads[place].view(-1)[place] = bad
        rig.scaler.unscale_(rig.optimizers[0])
        rig.scaler.step(rig.optimizers[0])
        rig.end()


def sparse(rig):
    torch.manual_seed(1)
    table = nn.Embedding(6, 4, sparse=True)
    rig.models.append(table)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for batch in range(4):
        optimizer.zero_grad()
        rig.scaler.scale(table(torch.tensor([0, 2, 2, 5])).square().sum()).backward()
        if batch == 2:
            table.weight.grad._values()[1, 1] = float("nan")
        rig.scaler.step(optimizer)
        rig.end()


def containers(rig):
    scaled = rig.scaler.scale([torch.tensor(2.0), (torch.tensor(3.0), torch.ones(2))])
    rig.seen += [scaled[0], *scaled[1]]


SCENES = {
    "test_grad_scaling_autocast": lambda rig: plain(rig, on=True),
    "test_grad_scaling_autocast (off)": plain,
    "test_grad_scaling_clipping": lambda rig: plain(rig, clip=0.2),
    "test_grad_scaling_clipping_separate_unscale": lambda rig: plain(rig, unscale=True, clip=0.2),
    "test_grad_scaling_penalty": penalty,
    "test_grad_scaling_accumulation": accumulation,
    "test_grad_scaling_multiple": multiple,
    "test_params_invalidated_with_grads_invalidated_between_unscale_and_step": parameters_replaced,
    "test_grad_scaling_state_dict": saved,
    "test_grad_scaling_update_scale": set_by_hand,
    "test_grad_scaling_unscale": values,
    "test_grad_scaling_unscale_sparse": sparse,
    "test_grad_scaling_scale": containers,
}
OPTIONS = {
    "test_grad_scaling_disabled": ({"enabled": False}, accumulation),
    "test_grad_scale_will_not_overflow": ({"init_scale": 2.0**126, "growth_interval": 1}, plain),
    "test_grad_scaling_growth": ({"growth_interval": 2, "backoff_factor": 0.25}, plain),
}
ALIKE = ("test_grad_scaling_unscale_sparse", "test_grad_scaling_scale", "test_grad_scaling_disabled")
CASES = [
    (scene, kind, way)
    for scene in (*SCENES, *OPTIONS)
    for kind, way in itertools.product(KINDS, WAYS)
    if scene not in ALIKE or (kind, way) == ("SGD", "loop")
    if scene != "test_grad_scaling_penalty" or way != "fused"
]


def verdict(scene, kind, way):
    """Nothing where ours does what torch's does; else what differs."""
    options, run = OPTIONS.get(scene, ({}, SCENES.get(scene)))
    results = []
    for amp in (torch.amp, torch_amp):
        rig = Rig(amp, kind, way, **options)
        run(rig)
        results.append(rig.result())
    theirs, ours = results
    same = len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs)
    )
    return "" if same else f"{scene} {kind} {way}: {ours} and {theirs}"


def verdicts():
    return {case: verdict(*case) for case in CASES}


def section(found):
    """The part of docs/coverage.md."""
    lines = ["| torch's test | cases | equal to torch's |", "|---|---|---|"]
    equal, count = Counter(case[0] for case in found if not found[case]), Counter(case[0] for case in found)
    lines += [f"| {scene} | {count[scene]} | {equal[scene]} |" for scene in (*SCENES, *OPTIONS)]
    lines.append(f"| all | {count.total()} | {equal.total()} |")
    return f"{MARKS[0]}\n{ABOUT}\n\n" + "\n".join(lines) + f"\n\n{MARKS[1]}"


def test_scenes_of_torch_s_own_tests_give_torch_s_bits_and_the_page_their_count():
    found = verdicts()
    assert not [said for said in found.values() if said]
    assert section(found) in PAGE.read_text()


if __name__ == "__main__":
    text, new = PAGE.read_text(), section(verdicts())
    pattern = re.compile(re.escape(MARKS[0]) + ".*" + re.escape(MARKS[1]), re.S)
    PAGE.write_text(pattern.sub(lambda _: new, text) if MARKS[0] in text else f"{text.rstrip()}\n\n{new}\n")
