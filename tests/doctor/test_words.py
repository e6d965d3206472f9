"""One fault in the dress of each front door: the doctor writes cures in the words of that door."""

import re

import pytest

from tests.doctor.test_zoo import examine
from tests.doctor.zoo import Script

HEAD = """
import torch
from torch import nn
import halfstep as hs

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)

def loss_of(out, y):
    return ((out * y) * 1e3).float().square().mean().log1p()

def batches():
    for i in range(7):
        yield torch.randn(8, 4), torch.full((8, 1), 1e4 if i == 4 else 1e-3, dtype=torch.float16)
"""
LOOPS = {
    "scaler": """
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for x, y in batches():
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
""",
    "session": """
amp = hs.prepare(model, opt, dtype="fp16", loss_scale=8.0)
for x, y in batches():
    with amp.autocast():
        loss = loss_of(model(x), y)
    amp.backward(loss)
    amp.step()
""",
    "trainer": """
trainer = hs.Trainer(model, opt, loss_of, dtype="fp16", loss_scale=8.0, progress=False)
trainer.fit(list(batches()), steps=7)
""",
    "plain": """
model.half()
for x, y in batches():
    loss = loss_of(model(x.half()), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
}
#: In the code of each cure of a door there is one of the first and none of the second.
WORDS = {
    "scaler": (r"torch\.|2\.0\*\*-?\d", r"hs\.|amp\.step|policy"),
    "session": (r"hs\.prepare|2\.0\*\*-?\d", r"hs\.Trainer|torch\.autocast|GradScaler"),
    "trainer": (r"hs\.Trainer|2\.0\*\*-?\d", r"hs\.prepare|torch\.autocast|GradScaler"),
    "plain": (r"torch\.bfloat16|inputs \.float\(\)|2\.0\*\*-?\d", r"hs\.|amp\.|policy|GradScaler|autocast"),
}


@pytest.mark.parametrize("door", LOOPS)
@pytest.mark.filterwarnings("ignore")
def test_cures_are_written_in_the_words_of_the_script(door, tmp_path, monkeypatch):
    document = examine(Script(door, HEAD + LOOPS[door]), tmp_path, monkeypatch)
    fault = document.faults[0]
    assert (fault.step, fault.phase, fault.cause.kind) == (4, "forward", "range")
    own, other = WORDS[door]
    codes = [cure.code for cure in fault.cures if cure.code]
    assert len(codes) >= 2
    assert [code for code in codes if not re.search(own, code) or re.search(other, code)] == []


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("out = x * net(x) / x.norm(dim=1)", "out = x * net(x) / x.norm(dim=1).clamp_min(0.0001)"),
        ("out = torch.div(x * net(x), x.sum(1))", "out = torch.div(x * net(x), x.sum(1).clamp_min(0.0001))"),
        ("out = net(x) + x.sum(1).log()", "out = net(x) + x.sum(1).clamp_min(0.0001).log()"),
    ],
)
def test_a_cure_of_an_op_is_told_as_the_line_that_it_makes(line, written, tmp_path, monkeypatch):
    text = f"""
import torch
net = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for i in range(6):
    x = torch.rand(4, 4) * (i != 3)
    {line}
    loss = out.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
    document = examine(Script("lines", text), tmp_path, monkeypatch)
    assert document.headline.endswith(f"cure: {written}")
