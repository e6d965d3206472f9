"""`hs.doctor.examine`: a step function's document, typed, with everything put back."""

import json

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import ConfigError
from halfstep.report.doctor import render_doctor, write_doctor


def case(gain=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = hs.prepare(model, optimizer, dtype="fp16", loss_scale=8.0)

    def step(x):
        with amp.autocast():
            out = model(x) * gain
            loss = out.float().square().mean()
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return model, amp, step


def test_a_healthy_step():
    model, amp, step = case()
    before = [p.detach().clone() for p in model.parameters()]
    document = hs.doctor.examine(step, torch.randn(8, 4))
    assert document.healthy
    assert document.headline == "step: healthy over 1 steps"
    assert {"linear"} <= {row["op"] for row in document.counts}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert amp.steps == 0


def test_the_first_bad_batch_of_several():
    _, _, step = case(3e6)
    batches = [(torch.zeros(8, 4),), (torch.full((8, 4), 9.0),), (torch.randn(8, 4),)]
    document = hs.doctor.examine(step, batches=batches, label="three batches")
    fault = document.faults[0]
    assert not document.healthy
    assert (fault.phase, fault.op, fault.cause.kind) == ("forward", "mul", "range")
    assert fault.where.startswith("test_step.py:")
    assert document.steps == fault.step + 1
    assert fault.best is not None
    assert fault.best.code in document.headline


def summed_in_half(scale=None):
    """A sum in fp16 overflows in forward; in fp32, only the loss scale is too large for what remains."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp = hs.prepare(model, optimizer, dtype="fp16", loss_scale=scale)

    def step(x):
        with amp.autocast():
            out = model(x)
        loss = ((out.half() - 60) ** 2).sum()
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return hs.doctor.examine(step, torch.randn(64, 4)), amp


def test_a_cure_works_where_only_the_start_of_the_loss_scale_is_left():
    document, amp = summed_in_half()
    fault = document.faults[0]
    assert (fault.phase, fault.op, fault.cures[0].kind, fault.cures[0].status) == (
        "forward", "sum", "full", "works",
    )  # fmt: skip
    assert "cure: with hs.autocast(enabled=False)" in document.headline
    assert amp.loss_scale.read() == 2.0**16


def test_a_scale_that_stays_does_not_go_down_by_itself():
    document, _ = summed_in_half(scale=2.0**16)
    assert {cure.status for cure in document.faults[0].cures} == {"untried"}  # one skip shows neither
    assert "; try: with hs.autocast(enabled=False)" in document.headline


def test_the_document_is_json_and_a_page():
    _, _, step = case(3e6)
    document = hs.doctor.examine(step, torch.full((8, 4), 9.0))
    plain = document.as_dict()
    assert json.loads(json.dumps(plain))["verdict"] == document.verdict
    assert "is the first op that is not finite" in render_doctor(plain)


def test_a_document_is_written_as_it_is(tmp_path):
    _, _, step = case(3e6)
    document = hs.doctor.examine(step, torch.full((8, 4), 9.0))
    page = write_doctor(document, tmp_path / "page.html").read_text()
    assert page == render_doctor(document.as_dict())
    with pytest.raises(ConfigError, match="report of int: expected the doctor's document"):
        write_doctor(3, tmp_path / "page.html")


def test_what_shows_without_a_step_is_told_of_what_the_step_names():
    model = nn.Linear(4, 1).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    document = hs.doctor.examine(step, torch.randn(8, 4).bfloat16())
    assert [f.rule for f in document.lint] == ["learning rate"]
    assert not document.healthy
    assert "2 of 2 bf16 tensors (shape [1, 4], [1]) are too coarse for a step of 1e-07" in document.headline


def test_a_skip_by_torchs_scaler_is_harmless_while_it_is_on():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def step(x):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x) * 4).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    document = hs.doctor.examine(step, torch.randn(1, 4))
    assert [fault.harmless for fault in document.bad] == [True]
    assert document.healthy


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((3,), r"examine\(3\): expected a function"),
        (("train.py",), "expected a function"),
        ((lambda x: None, {"batches": [torch.ones(2)]}), "a batch of type Tensor: expected a tuple"),
    ],
)
def test_what_is_no_step_is_refused(args, words):
    step, options = args[0], args[1] if len(args) > 1 else {}
    with pytest.raises(ConfigError, match=words):
        hs.doctor.examine(step, **options)
