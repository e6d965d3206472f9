"""`halfstep memory`: what it counts is what training holds, and models without values can be trained."""

import json
import math
import tempfile

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import cli
from halfstep.cli.memory import footprint_of_parameters, footprint_of_script, make_optimizer
from halfstep.errors import ConfigError
from halfstep.recipes.measure import storage_bytes
from halfstep.session.memory import Footprint, footprint
from tests.ranks import run as run_ranks

SCRIPT = """
import sys, torch
from torch import nn
import halfstep as hs

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 128)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 512) for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(128), nn.Linear(128, 500, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))

def build():
    model = Net().to("cpu", memory_format=torch.contiguous_format)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    if "hs" in sys.argv:
        return model, hs.optim.AdamW(model.parameters(), state_dtype="8bit")
    return model, torch.optim.AdamW(model.parameters(), fused=True)

data = torch.randint(0, 500, (8, 16))
if __name__ == "__main__":
    assert 0 < data.float().mean().item() < 500
    model, optimizer = build()
    if "plain" not in sys.argv:
        amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    model(data)
    raise RuntimeError("values are needed")
"""


def held_by(kind, level):
    """Bytes of weights, gradients and states after a real backward of the script's model."""
    space = {"__name__": "script"}
    exec(SCRIPT.replace("sys.argv", repr([kind])), space)
    model, optimizer = space["build"]()
    amp = hs.prepare(model, optimizer, level=level, dtype=None if level == "O0" else "bf16")
    for _ in range(2):
        with amp.autocast():
            loss = model(space["data"]).float().square().mean()
        amp.backward(loss)
        grads = [p.grad for p in model.parameters()]
        amp.step()
    tensors = [*model.parameters(), *model.buffers()]
    for p, entry in optimizer.state.items():
        tensors += [p, *(t for t in entry.values() if isinstance(t, torch.Tensor))]
    rest = sum(storage_bytes(tensors).values())
    copies = 4 if kind == "torch" and level == "O2" else 0  # of so few, all are there in fp32 at once
    return rest, rest + sum(g.nbytes + copies * g.numel() * (g.dtype == torch.bfloat16) for g in grads)


def test_a_script_is_counted_as_it_trains(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    found = footprint_of_script(str(tmp_path / "train.py"), ["hs"], None, None, 1)
    assert isinstance(found, Footprint), found
    assert (found.at_rest, found.step) == pytest.approx(held_by("hs", "O2"), rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "level"), [("torch", "O2"), ("plain", "O0")])
def test_the_command_counts_a_script_as_it_trains(tmp_path, capsys, kind, level):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert cli.main(["memory", str(tmp_path / "train.py"), "--json", "--", kind]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["at_rest"], found["step"]) == pytest.approx(held_by(kind, level), rel=0.01)


def count(level, optimizer="hs.AdamW", states=None, master=None, ranks=1):
    found = footprint_of_parameters(
        10**8, level, lambda p: make_optimizer(optimizer, states, master, p), ranks
    )
    return [round(size * ranks / found.parameters, 1) for size in (found.at_rest, found.step)]


def test_bytes_a_parameter_of_each_way():
    assert count("O1", "torch.AdamW") == [12, 16]
    assert count("O2", "torch.AdamW") == [14, 16.6]  # of which 0.6 is 64 MiB
    assert count("O2", "torch.AdamW", ranks=4) == [12, 16]
    assert count("O2") == [12, 14]
    assert count("O2", states="8bit") == count("O2", states="8bit", ranks=4) == [6, 8]
    assert count("O2", states="8bit", master="stochastic") == [4, 6]
    assert count("O2", "torch.SGD") == [10, 12.6]
    assert count("O3", "torch.AdamW") == [6, 8]


def test_released_gradients_are_there_one_at_a_time():
    model = nn.Sequential(*(nn.Linear(32, 32, device="meta") for _ in range(8)))
    optimizer = hs.optim.SGD(model.parameters(), lr=0.1, release_gradients=True)
    assert footprint([model], [optimizer], "O2").gradients == 32 * 32 * 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "--parameters 7e9"),
        (["--parameters", "7"], "expected 10000 or more"),
        (["--parameters", "1e6", "--ranks", "0"], "--ranks 0"),
        (["--parameters", "1e6", "--optimizer", "Adam"], "--optimizer Adam: expected one such as hs.AdamW"),
        (["--parameters", "1e6", "--optimizer", "torch.SGD", "--states", "8bit"], "hs.SGD has"),
        (
            ["--parameters", "1e6", "--optimizer", "torch.Adafactor"],
            "takes no step on tensors without values",
        ),
    ],
)
def test_what_cannot_be_counted(given, says, capsys):
    assert cli.main(["memory", *given]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print(1)", "before an optimizer is made"),
        ("import torch\ntorch.nn.Linear(2, 2).weight.sum().item()", "its parameters have no values here"),
        (
            "import torch, halfstep as hs\nm = torch.nn.Linear(2, 2)\n"
            "hs.prepare(m, torch.optim.SGD(m.parameters()), level='auto')",
            "give --level",
        ),
    ],
)
def test_scripts_that_cannot_be_counted(text, says, tmp_path, capsys):
    (tmp_path / "train.py").write_text(text)
    assert cli.main(["memory", str(tmp_path / "train.py")]) == 2
    assert says in capsys.readouterr().err


# ---- models that are built without values, or in 16 bits -----------------------------------------------

MAKE = {
    "hs": lambda params: hs.optim.AdamW(params, state_dtype="8bit"),
    "torch": torch.optim.AdamW,
}


def net(blocks=1):
    parts = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(blocks)]
    return nn.Sequential(*parts, nn.Linear(64, 64))


def step(model, amp):
    with amp.autocast():
        loss = model(torch.ones(4, 64)).float().square().mean()
    amp.backward(loss)
    amp.step()


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_parameters_on_meta_are_refused_before_anything_changes(kind, level):
    with torch.device("meta"):
        model = net()
    with pytest.raises(ConfigError, match=r"5 parameters are on the meta device.*to_empty"):
        hs.prepare(model, MAKE[kind](list(model.parameters())[1:]), level=level, dtype="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", MAKE)
def test_a_model_without_values_goes_on_from_a_checkpoint(kind, tmp_path):
    torch.manual_seed(0)
    model = net()
    amp = hs.prepare(model, MAKE[kind](model.parameters()), level="O2", dtype="bf16")
    step(model, amp)
    amp.save(tmp_path / "run")
    with torch.device("meta"):
        other = net()
    other.bfloat16().to_empty(device="cpu")
    for p in other.parameters():
        p.data.fill_(math.nan)
    again = hs.prepare(other, MAKE[kind](other.parameters()), level="O2", dtype="bf16")
    again.load(tmp_path / "run")
    step(model, amp)
    step(other, again)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("kind", MAKE)
def test_masters_begin_with_weights_of_16_bits(kind):
    model = net().bfloat16()
    before = [p.detach().float() for p in model.parameters()]
    optimizer = MAKE[kind](model.parameters())
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    assert all(map(torch.equal, before, (p.float() for p in model.parameters())))
    held = optimizer.masters() if kind == "hs" else amp.masters[0].masters()
    assert all(torch.equal(value, w.float()) for w, value in held.items())
    wide = {name: torch.randn_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    model.load_state_dict(wide)
    held = optimizer.masters() if kind == "hs" else amp.masters[0].masters()
    for name, p in model.named_parameters():
        assert torch.equal(held.get(p, p), wide[name])


def sharded_from_meta(rank, folder, kind, low):
    torch.manual_seed(0)
    model = hs.distributed.shard(net(3))
    amp = hs.prepare(model, MAKE[kind](model.parameters()), level="O2", dtype="bf16")
    step(model, amp)
    amp.save(folder)
    with torch.device("meta"):
        other = net(3)
    other = hs.distributed.shard(other.bfloat16() if low else other)
    optimizer = MAKE[kind](other.parameters())
    with pytest.raises(ConfigError, match="meta"):
        hs.prepare(other, optimizer, level="O2", dtype="bf16")
    other.to_empty(device="cpu")
    again = hs.prepare(other, MAKE[kind](other.parameters()), level="O2", dtype="bf16")
    again.load(folder)
    step(model, amp)
    step(other, again)
    pairs = zip(model.parameters(), other.parameters())
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    states = [
        t.to_local() if hasattr(t, "to_local") else t
        for e in again.optimizers[0].state.values()
        for t in e.values()
    ]
    found = [p.to_local() for p in other.parameters()] + [t for t in states if isinstance(t, torch.Tensor)]
    with torch.device("meta"):
        counted = footprint([plain := net(3)], [MAKE[kind](plain.parameters())], "O2", ranks=2)
    return sum(storage_bytes(found).values()), counted.at_rest


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "low"), [("hs", True), ("hs", False), ("torch", False)])
def test_shards_of_a_model_without_values(kind, low):
    with tempfile.TemporaryDirectory() as folder:
        for measured, counted in run_ranks(sharded_from_meta, 2, folder, kind, low):
            assert counted == pytest.approx(measured, rel=0.05)


@pytest.mark.exhaustive
def test_shards_of_16_bits_need_an_optimizer_of_halfstep():
    with tempfile.TemporaryDirectory() as folder, pytest.raises(AssertionError, match="is a 16-bit shard"):
        run_ranks(sharded_from_meta, 2, folder, "torch", True)
