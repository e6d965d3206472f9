"""What a cure says is what it does: the text, the trial and the diff change the same thing, and no other."""

from contextlib import ExitStack

import pytest
import torch

from halfstep.doctor import script as _script
from halfstep.doctor.edit import write_dose
from halfstep.numerics.remedies.base import FAILS, WORKS
from halfstep.numerics.remedies.scale import ScaleAround
from halfstep.numerics.snapshot import StepParticipants
from tests.doctor.test_diff import NOWHERE, examined
from tests.doctor.test_zoo import named

HEAD = """
import torch, halfstep as hs
from torch import nn
import torch.nn.functional as F

torch.manual_seed(1)
"""

LOOP = (
    HEAD
    + """
net = nn.Linear(8, 8)
opt = torch.optim.SGD(net.parameters(), lr=1e-14)
DEFINE
for i in range(8):
    x = torch.randn(6, 8) * (900.0 if i == 4 else 1.0)
    opt.zero_grad()
    loss = made(net(x))
    loss.backward()
    opt.step()
"""
)

BY_HAND = {
    "a softmax": ("e = torch.exp(z)\n    return (e / e.sum(-1, keepdim=True))[:, 0].mean()", "shift"),
    "a weighted softmax": (
        "e = z.exp() * torch.linspace(0.5, 1.0, 8)\n    return (e / e.sum(1, keepdim=True)).square().mean()",
        "shift",
    ),
    "a softmax that takes exp twice": (
        "return (z.exp() / z.exp().sum(-1, keepdim=True)).square().mean()",
        "shift",
    ),
    "a masked softmax": (  # the largest may be masked, and is no measure of the others then
        "e = z.exp() * (torch.arange(8) < 5)\n    return (e / e.sum(1, keepdim=True)).square().mean()",
        "clamp",
    ),
    "attention": ("e = z.exp()\n    return ((e @ z.T @ z) / e.sum(1, keepdim=True)).abs().mean()", "shift"),
    "logsumexp": ("e = z.exp()\n    return (e.sum(-1).log() - z[:, 0]).mean()", "logsumexp"),
    "logsumexp in a line": ("return torch.log(torch.exp(z * 2).sum(1, keepdim=True)).mean()", "logsumexp"),
    "an exponential": ("return (1 + z.exp()).log().mean()", "clamp"),
}  # fmt: skip


#: Written in other ways; CI runs them.
LONG = {"a weighted softmax", "a softmax that takes exp twice", "attention", "logsumexp in a line"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in BY_HAND])
def test_a_softmax_by_hand_is_shifted_and_a_logsumexp_is_torchs(name, tmp_path, monkeypatch):
    body, kind = BY_HAND[name]
    text = LOOP.replace("DEFINE", f"def made(z):\n    {body}")
    document = examined(text, tmp_path / "train.py", 8, monkeypatch, diff=True)
    first = document.faults[0].cures[0]
    assert (first.doses[0].kind, first.status) == (kind, WORKS)
    assert document.diff


def test_a_scale_around_a_layer_leaves_its_bias_alone(tmp_path, monkeypatch):
    """In the trial as in the text: the layer gives what it gave, in fp32."""
    path = tmp_path / "layer.py"
    path.write_text("def run(layer, x):\n    return layer(x)\n")
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    layer.bias.data.fill_(100.0)
    dose = ScaleAround("linear", str(path), 2, 3, True)

    def run(text):
        space = {}
        exec(compile(text, str(path), "exec"), space)
        return space["run"](layer, x)

    plain = run(path.read_text())
    with ExitStack() as stack:
        dose.apply(StepParticipants(None, [layer]), stack)
        tried = run(path.read_text())
    edited = run(next(write_dose(path.read_text(), dose, NOWHERE)))
    assert torch.allclose(tried, plain, rtol=1e-5)
    assert torch.equal(edited, tried)


STORED = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.a(x).float() / 1e4)

model = Net()
model.a.weight.data *= 1e4
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=1024.0)
model.forward = amp.autocast()(model.forward)
for i in range(8):
    x = torch.randn(6, 8) * (10 if i == 3 else 1)
    loss = model(x).float().square().mean()
    amp.backward(loss)
    amp.step()
"""
)


@pytest.mark.parametrize("way", [True, False])
def test_a_policy_is_tried_in_a_region_that_was_opened_before(way, tmp_path, monkeypatch):
    document = examined(STORED, tmp_path / "train.py", 8, monkeypatch, copies=way)
    first = document.faults[0].cures[0]
    assert (first.code, first.verdict) == ('hs.prepare(..., policy="full=linear")', "works over 5 steps")


def test_warnings_that_are_cut_or_left_out_say_so():
    said = "\n".join(f"train.py:{i}: UserWarning: {'long ' * 80 if i == 0 else i}" for i in range(8))
    told = _script._warnings(said)
    assert told[0].endswith("long ...") or told[0].endswith("...")
    assert told[-1] == "and 3 other things"


BLOWS_UP = (
    HEAD
    + """
w = nn.Parameter(torch.ones(4))
opt = torch.optim.SGD([w], lr=1e-6)
for i in range(12):
    d = torch.full((4,), 0.0 if i >= 5 else 1.0)
    opt.zero_grad()
    loss = (w / d).square().mean()
    loss.backward()
    opt.step()
"""
)


@pytest.mark.parametrize("way", [True, False])
def test_a_cure_with_which_the_loss_blows_up_does_not_help(way, tmp_path, monkeypatch):
    """Every value stays finite in the few steps of the trial."""
    document = examined(BLOWS_UP, tmp_path / "train.py", 12, monkeypatch, copies=way)
    assert [(c.kind, c.status) for c in document.faults[0].cures] == [("clamp", FAILS)]


@pytest.mark.parametrize("way", [True, False])
def test_the_first_cure_that_works_is_tried_for_the_rest_of_the_steps(way, tmp_path, monkeypatch):
    text = LOOP.replace("DEFINE", "def made(z):\n    return (1 + z.exp()).log().mean()").replace(
        "range(8)", "range(30)"
    )
    document = examined(text, tmp_path / "train.py", 20, monkeypatch, copies=way)
    assert document.faults[0].cures[0].verdict == "works over 16 steps"


GROWS = (
    HEAD
    + """
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
amp = hs.prepare(net, opt, dtype="fp16", loss_scale=256.0)
for i in range(20):
    x = torch.randn(32, 8)
    with amp.autocast():
        out = net(x)
        err = out.float() - x.sum(1, keepdim=True)
        loss = (err * (1 if i < 3 else 1.6 ** i)).square().sum()
    amp.backward(loss)
    amp.step()
"""
)


@pytest.mark.parametrize("way", [True, False])
def test_a_cure_that_is_too_weak_for_later_steps_does_not_help(way, tmp_path, monkeypatch):
    """Four steps from the first bad one on are well with a lower scale, those after them are not."""
    document = examined(GROWS, tmp_path / "train.py", 20, monkeypatch, copies=way)
    assert [c.status for c in document.faults[0].cures if c.kind == "loss_scale"] == [FAILS]


ONE_BATCH = (
    HEAD
    + """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.img, self.txt = nn.Linear(6, 8), nn.Linear(5, 8)

    def forward(self, a, b):
        return self.img(a) @ self.txt(b).T * 150

net = Pair()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
amp = hs.prepare(net, opt, level="O2", dtype="fp16", loss_scale=64.0)
for i in range(12):
    a, b = torch.randn(8, 6) * (300 if i == 6 else 1), torch.randn(8, 5)
    with amp.autocast():
        loss = F.cross_entropy(net(a, b).float(), torch.arange(8))
    amp.backward(loss)
    amp.step()
"""
)


@pytest.mark.parametrize("way", [True, False])
def test_a_cure_helps_though_the_loss_scale_is_too_large_for_that_one_batch(way, tmp_path, monkeypatch):
    """The doctor calls the script healthy with it: one update is skipped."""
    document = examined(ONE_BATCH, tmp_path / "train.py", 12, monkeypatch, copies=way)
    wide = document.faults[0].cures[0]
    assert (wide.kind, wide.doses[0].op, wide.status) == ("full", "mul", WORKS)


def test_a_cure_that_skips_an_update_works_until_the_next_fault(tmp_path, monkeypatch):
    document = examined(named("second_behind_the_first").text, tmp_path / "train.py", 0, monkeypatch)
    (wide,) = [c for c in document.faults[0].cures if c.kind == "full" and c.doses[0].op == "add"]
    assert wide.verdict == "works over 2 steps"


def test_bf16_stands_in_the_words_of_a_script_without_a_region(tmp_path, monkeypatch):
    text = LOOP.replace("DEFINE", "def made(z):\n    return (z.half() * 1e3).float().mean() / 1e3")
    document = examined(text, tmp_path / "train.py", 8, monkeypatch)
    codes = {c.kind: c.code for c in document.faults[0].cures if c.status == WORKS}
    assert codes["bf16"] == ".bfloat16() in place of .half(), torch.bfloat16 in place of torch.float16"


def test_a_logarithm_of_one_more_is_kept_from_its_edge(tmp_path, monkeypatch):
    body = "def made(z):\n    return torch.log1p(z * (0 if i != 4 else z / (1e-30 - z.square()))).mean()"
    text = LOOP.replace("DEFINE", body)
    document = examined(text, tmp_path / "train.py", 8, monkeypatch, diff=True)
    assert ".clamp_min(-0.9999))" in document.diff


POWERS = {
    "2.0 ** (z.half() @ w)": "range",
    "2 ** (z @ w)": "range",
    "torch.pow(2, (z @ w) * 1e4)": "mathematics",
}


@pytest.mark.parametrize("power", POWERS)
def test_a_power_that_is_too_large_is_no_matter_of_its_domain(power, tmp_path, monkeypatch):
    """A softmax with another base than e."""
    wide = "w = torch.eye(8, dtype=z.dtype)" if "half" not in power else "w = torch.eye(8).half()"
    body = (
        f"def made(z):\n    {wide}\n    e = {power}\n    return (e / e.sum(1, keepdim=True)).square().mean()"
    )
    text = LOOP.replace("DEFINE", body)
    document = examined(text, tmp_path / "train.py", 8, monkeypatch, diff=True)
    found = document.faults[0]
    assert (found.op, found.cause.kind) == ("pow", POWERS[power])
    assert "domain" not in found.cause.words
    if found.cause.kind == "mathematics":
        assert "2 to the power of values up to" in found.cause.words
    assert any(c.doses and c.doses[0].kind == "shift" and c.status == WORKS for c in found.cures)
    assert document.diff


@pytest.mark.parametrize(
    ("power", "words"),
    [
        ("(z - z.detach()) ** -1.0", "values are 0"),
        ("(z - z.detach()) ** -0.5", "values are 0"),
        ("(-z.abs()) ** 0.5", "values are negative"),
        ("(z * 1e4) ** 100", "pow of values up to"),
    ],
)
def test_a_power_names_what_is_wrong_with_it(power, words, tmp_path, monkeypatch):
    text = LOOP.replace("DEFINE", f"def made(z):\n    return ({power} if i == 4 else z).mean()")
    document = examined(text, tmp_path / "train.py", 8, monkeypatch)
    assert words in document.faults[0].cause.words
    assert ("domain" in document.faults[0].cause.words) == ("values are" in words)
