"""Two ops of one step leave fp16: neither cure works alone, both together do."""

import pytest
import torch
from torch import nn

from halfstep.doctor.script import examine_script
from halfstep.numerics.trace import trace_step

SCRIPT = """
import torch
from torch import nn
model = nn.Linear(4, 4)
nn.init.constant_(model.weight, 0.1)
nn.init.constant_(model.bias, 0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for number in range(6):
    x = torch.full((2, 4), 500.0 if number == 3 else 0.01)
    h = model(x).half()
    a = h * 600
    b = (a * 0.01).half() * 600
    optimizer.zero_grad()
    (b.float().mean() * 1e-4).backward()
    optimizer.step()
"""


def test_two_cures_that_work_together_alone_are_told_as_one_in_place():
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)

    def step(x):
        h = model(x).half()
        a = h * 600
        b = (a * 0.01).half() * 600
        (b.float().mean() * 1e-4).backward()

    bad = trace_step(step, torch.full((2, 4), 500.0), model=model).bad
    assert bad is not None
    assert (bad.op, bad.cause.kind) == ("mul", "range")
    *alone, pair = bad.cures
    assert "works" not in {cure.status for cure in alone}
    assert pair.status == "works"
    (both,) = pair.doses
    assert (both.kind, both.first.line + 1) == ("both", both.second.line)
    assert pair.text.startswith("run mul in fp32 at test_pairs.py:")
    assert ", and run mul in fp32 at test_pairs.py:" in pair.text


@pytest.mark.long
def test_a_script_whose_step_has_two_faults_gets_both_cures_by_either_way(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    found = [examine_script(path, steps=6, copies=copies) for copies in (True, False)]
    for document in found:
        fault = document.faults[0]
        assert (fault.step, fault.where) == (3, "train.py:11")
        assert {c.status for c in fault.cures if c.kind != "bf16"} >= {"does not help", "works"}
        (pair,) = [c for c in fault.cures if c.doses and c.doses[0].kind == "both"]
        assert (pair.status, pair.code.count("inputs .float()")) == ("works", 2)
    assert found[0].verdict == found[1].verdict
