"""Mistakes of a loop that leave no NaN, each beside a script that does the same rightly.

Who scales, steps and owns the gradients; what a schedule, a loss or a value in 16 bits is given.
"""

import pytest

from tests.doctor.test_zoo import examine
from tests.doctor.zoo import Script

BEGIN = """
import copy
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
"""

SCALED = (
    BEGIN
    + """
opt = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
# BEFORE
for i in range(STEPS):
    # FIRST
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss, aux = F.mse_loss(out.float(), x[:, :1]), out.float().abs().mean()
    opt.zero_grad()
    scaler.scale(loss).backward(retain_graph=True)
    # BACKWARD
    scaler.step(opt)
    scaler.update()
"""
)

PLAIN = (
    BEGIN
    + """
opt = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
# BEFORE
for i in range(STEPS):
    # FIRST
    x = torch.randn(16, 8)
    loss = F.mse_loss(net(x), x[:, :1])
    opt.zero_grad()
    loss.backward()
    opt.step()
    # LAST
"""
)

SKIPPED = (
    BEGIN
    + """
opt = torch.optim.SGD(net.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for i in range(STEPS):
    x = torch.randn(32, 8) * (25 if i == 4 else 1)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    scaler.scale(F.mse_loss(out.float(), 2 * x[:, :1])).backward()  # HERE
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    # CLEAR
"""
)

MASTERS = (
    BEGIN
    + """
net.bfloat16()
masters = [p.detach().clone().float() for p in net.parameters()]
opt = torch.optim.SGD(masters, lr=0.1)
for i in range(STEPS):
    for j in range(MICRO):
        x = torch.randn(4, 8).bfloat16()
        (F.mse_loss(net(x), x[:, :1]) / MICRO).backward()  # BACKWARD
    for p, master in zip(net.parameters(), masters):
        master.grad, p.grad = p.grad.float(), None
    opt.step()  # STEP
    with torch.no_grad():
        for p, master in zip(net.parameters(), masters):
            p.copy_(master)  # COPY
"""
)

#: name, script, what to put in for a fault and its twin, words of the verdict.
CASES = {
    "a loss beside the scaled one": (SCALED, "# BACKWARD", "aux.backward()  # HERE",
        "scaler.scale(aux).backward()", ("not scaled", "scaler.scale(aux).backward()")),
    "a loss added once it is unscaled": (SCALED, "# BACKWARD", "aux.backward()  # HERE",
        "scaler.unscale_(opt); aux.backward()", ("not scaled",)),
    "a step beside the scaler's": (SCALED, "# BACKWARD", "opt.step()  # HERE", "pass",
        ("optimizer.step() updates by gradients that still carry the loss scale, 64",)),
    "a scaler in the loop": (SCALED, "# FIRST",
        'scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # HERE', "pass",
        ("GradScaler is made anew",)),
    "what a skipped step left": (SKIPPED, "# CLEAR", "if scaler.get_scale() >= before: opt.zero_grad()",
        "opt.zero_grad()", ("still holds what the skipped step",)),
    "a second step": (PLAIN, "# LAST", "opt.step()  # HERE", "pass", ("stepped twice",)),
    "an optimizer in the loop": (PLAIN, "# FIRST",
        "opt = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)  # HERE",
        "opt = torch.optim.SGD(net.parameters(), lr=1e-2)", ("SGD is made anew", "moments")),
    "a head after the optimizer": (PLAIN.replace("momentum=0.9)", "momentum=0.9)  # HERE"), "# BEFORE",
        "net[2] = nn.Linear(16, 1)",
        "net[2] = nn.Linear(16, 1); opt.add_param_group({'params': net[2].parameters()})",
        ("2.weight and 1 more of the model get gradients", "in no optimizer")),
    "masters": (MASTERS.replace("# STEP", "# HERE").replace("MICRO", "2"), "p.copy_(master)  # COPY", "pass",
        "p.copy_(master)", ("masters are not copied back",)),
    "micro-batches": (MASTERS.replace("# BACKWARD", "# HERE"), "MICRO", "80", "20",
        ("80 micro-batches", "bf16")),
    "a schedule of epochs": (PLAIN, "# LAST", "plan.step()  # HERE", "if i % 5 == 4: plan.step()",
        ("ExponentialLR is stepped after each batch", "from 0.01")),
    "targets of a mixup": (PLAIN.replace("Linear(16, 1)", "Linear(16, 4)").replace(
        "F.mse_loss(net(x), x[:, :1])", "F.cross_entropy(net(x), soft)  # HERE"), "x = torch",
        "soft = 0.8 * F.one_hot(torch.arange(16) % 4, 4).float(); x = torch",
        "soft = F.one_hot(torch.arange(16) % 4, 4).float() * 0.8 + 0.05; x = torch", ("sum to 0.8", "soft")),
    "targets of pixels": (PLAIN.replace("F.mse_loss(net(x), x[:, :1])",
        "nn.BCEWithLogitsLoss()(net(x), target)  # HERE"), "x = torch",
        "target = torch.rand(16, 1) * 255; x = torch", "target = torch.rand(16, 1) * 1.2; x = torch",
        ("[0, 1]", "target / 2")),
}  # fmt: skip
STEPS = {"a schedule of epochs": 20, "micro-batches": 3, "what a skipped step left": 9}
#: Twins for every day; of the others the healthy scripts of the zoo have as much.
TWINS = {"a loss added once it is unscaled", "an optimizer in the loop", "a head after the optimizer"}


def script_of(name, wrong):
    text, place, fault, twin, _ = CASES[name]
    plan = "plan = torch.optim.lr_scheduler.ExponentialLR(opt, 1e-3)"
    text = text.replace(place, fault if wrong else twin).replace("STEPS", str(STEPS.get(name, 6)))
    return Script("owners", text.replace("# BEFORE", plan if "plan" in text else ""), 0, "optimizer")


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_of_the_loop_is_named_with_its_line(name, tmp_path, monkeypatch):
    script = script_of(name, wrong=True)
    document = examine(script, tmp_path, monkeypatch)
    assert f"owners.py:{script.line}" in document.headline
    assert not [words for words in CASES[name][-1] if words not in "\n".join(document.verdict)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TWINS else pytest.mark.long) for name in CASES]
)
def test_the_same_done_rightly_is_healthy(name, tmp_path, monkeypatch):
    document = examine(script_of(name, wrong=False), tmp_path, monkeypatch)
    assert document.healthy, document.verdict


def test_two_updates_by_one_backward_are_one_iteration(tmp_path, monkeypatch):
    assert examine(script_of("a second step", wrong=True), tmp_path, monkeypatch).steps == 6
    assert examine(script_of("an optimizer in the loop", wrong=True), tmp_path, monkeypatch).steps == 6


#: What a value is begun with and how it is changed; in bf16 and in fp32.
KEPT = {
    "by copy_": ("kept = [p.detach().to(KIND) for p in net.parameters()]",
        "[k.copy_(0.999 * k + 0.001 * p.detach().to(KIND)) for k, p in zip(kept, net.parameters())]"),
    "by rebinding": ("kept = {n: p.detach().to(KIND) for n, p in net.named_parameters()}",
        "kept = {n: (0.999 * kept[n] + 0.001 * p.detach()).to(KIND) for n, p in net.named_parameters()}"),
    "by AveragedModel": (
        "from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn\n"
        "kept = AveragedModel(net, avg_fn=get_ema_avg_fn(0.999)).to(KIND)", "kept.update_parameters(net)"),
    "a sum": ("kept = torch.zeros((), dtype=KIND)", "kept += loss.detach().to(KIND)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_in_16_bits_and_stands_still_is_found_by_its_value(name, kind, tmp_path, monkeypatch):
    first, last = (text.replace("KIND", f"torch.{kind}") for text in KEPT[name])
    text = PLAIN.replace("# BEFORE", first).replace("# LAST", f"{last}  # HERE")
    script = Script("owners", text.replace("STEPS", "42" if name == "a sum" else "5"), steps=0)
    document = examine(script, tmp_path, monkeypatch)
    lint = [(f.rule, f.where) for f in document.lint]
    rule = "sum" if name == "a sum" else "average"
    assert lint == ([] if kind == "float32" else [(rule, f"owners.py:{script.line}")])
