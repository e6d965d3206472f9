"""`--diff` and `--write-plan`: cures that can be pasted were run before, and change nothing else."""

import dataclasses
import io
import sys
import warnings

import pytest
import torch

import halfstep as hs
from halfstep.cli import main
from halfstep.doctor import script as _script
from halfstep.doctor.edit import is_gone, with_plan, write_dose
from halfstep.doctor.script import examine_script
from halfstep.numerics.remedies.base import WORKS, Both
from halfstep.numerics.remedies.bf16 import UseBf16
from halfstep.numerics.remedies.chain import CastBack
from halfstep.numerics.remedies.edge import KeepFromEdge, LargerEpsilon
from halfstep.numerics.remedies.exponent import LogSumExp, Shift
from halfstep.numerics.remedies.full import RunInFp32
from halfstep.numerics.remedies.loss import DivideLoss
from halfstep.numerics.remedies.scale import ScaleAround
from halfstep.numerics.tape import OpLocation
from tests.doctor.test_zoo import FAULTS, FIRST, cases, named, run_here

#: One for each way to write a cure; the rest belongs to the exhaustive runs.
DAILY = {
    "overflow_that_is_swallowed", "adam_in_half", "distance_of_equal_points", "updates_lost_to_rounding",
}  # fmt: skip
LONG = {"norm_by_hand_in_half", "second_behind_the_first", "summed_loss", "squares_summed_in_half"}
#: Cures that some scripts are too unlike others to be edited for.
BY_HAND = ("bf16", "full")


def examined(text, path, steps, monkeypatch, **asked):
    monkeypatch.setattr(_script, "run_in_process", run_here)
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return examine_script(path, [], steps, 0, **asked)


def applied(text, diff, path):
    """The text after `patch`, which not every machine has: each hunk must be where it says, word for word."""
    old, new, at = [*io.StringIO(text, newline="\n")], [], 0
    for line in [*io.StringIO(diff, newline="\n")][2:]:
        if line.startswith("@@"):
            start = int(line.split()[1].split(",")[0].removeprefix("-")) - 1
            new, at = [*new, *old[at:start]], start
        elif line.startswith("\\"):
            new[-1] = new[-1].rstrip("\r\n")
        elif line[0] in " -":
            assert old[at].rstrip("\r\n") == line[1:].rstrip("\r\n")
            new += [old[at]] if line[0] == " " else []
            at += 1
        else:
            new.append(line[1:])
    result = "".join([*new, *old[at:]])
    path.write_text(result, newline="")
    return result


@pytest.mark.parametrize(
    "script",
    cases(FAULTS, DAILY, LONG),
)
def test_the_diff_cures_the_fault_or_it_is_said_why_there_is_none(script, tmp_path, monkeypatch):
    path = tmp_path / f"{script.name}.py"
    document = examined(script.text, path, script.steps, monkeypatch, diff=True)
    fault = document.faults[0]
    assert path.read_text() == script.text
    if not document.diff:
        assert script.name not in DAILY
        assert any(note.startswith("no diff for step") for note in document.notes)
        assert not any(c.status == WORKS and c.kind not in BY_HAND for c in fault.cures), document.notes
        return
    new = applied(script.text, document.diff, path)
    after = examined(new, path, script.steps, monkeypatch)
    assert is_gone(fault, after)
    assert after.error is None or after.error == document.error
    assert after.steps >= document.steps


ENDINGS = """
import torch
from torch import nn
# a form\x0cfeed
torch.manual_seed(0)
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), lr=1e-6)
for i in range(4):
    x = torch.randn(8, 4) * 20
    BODY
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
IN_PLACE = "e = torch.exp(net(x) * 30); loss = (e / e.sum()).square().sum()"
ABOVE = """with torch.autocast("cpu", torch.float16):
        h = net(x) @ net(x).T * 60
    loss = h.mean()"""


@pytest.mark.parametrize("body", [IN_PLACE, ABOVE], ids=["in place", "above"])
def test_a_script_keeps_its_line_endings(body, tmp_path, monkeypatch, capfdbinary):
    """`patch` reads the diff of one whose lines end in CRLF, and so do all lines of what it makes."""
    text = ENDINGS.replace("BODY", body)
    path, crlf = tmp_path / "crlf.py", text.replace("\n", "\r\n").encode()
    path.write_bytes(crlf)
    monkeypatch.setattr(_script, "run_in_process", run_here)
    assert main(["doctor", str(path), "--steps", "4", "--diff"]) == 1
    diff = capfdbinary.readouterr().out
    assert diff.startswith(f"--- {path}\n+++ {path}\n".encode())
    new = applied(crlf.decode(), diff.decode(), path).encode()
    assert new != crlf
    assert new.count(b"\n") == new.count(b"\r\n")


def test_the_command_prints_the_diff_alone_and_the_verdict_beside_it(tmp_path, monkeypatch, capsys):
    script = named("distance_of_equal_points")
    path = tmp_path / "train.py"
    path.write_text(script.text)
    monkeypatch.setattr(_script, "run_in_process", run_here)
    assert main(["doctor", str(path), "--steps", str(script.steps), "--diff"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith(f"--- {path}\n+++ {path}\n@@ ")
    assert "not healthy" in said.err
    assert "not healthy" not in said.out
    assert ".clamp_min(0.0001))" in applied(script.text, said.out, path)


def test_data_and_learning_rates_have_no_diff_and_no_plan(tmp_path, monkeypatch):
    script = named("nan_in_the_target")
    document = examined(script.text, tmp_path / "x.py", script.steps, monkeypatch, diff=True, plan=True)
    assert (document.diff, document.plan) == ("", "")
    told = "\n".join(document.notes)
    assert "no diff for step 5 (data): what cures it, above, is to be written by hand" in told
    assert "no plan rule for step 5 (data): a plan says in which precision the ops of a module run" in told


def test_the_plan_alone_cures_an_overflow_in_a_module(tmp_path, monkeypatch):
    text, path, plan = FIRST.replace("STEP", "3"), tmp_path / "train.py", tmp_path / "plan.toml"
    path.write_text(text)
    monkeypatch.setattr(_script, "run_in_process", run_here)
    assert main(["doctor", str(path), "--steps", "8", "--write-plan", str(plan)]) == 1
    (rule,) = hs.Plan.read(plan).rules
    assert (rule.pattern, {op: r.value for op, r in rule.ops.items()}) == ("a", {"linear": "full"})
    assert rule.reason.startswith("step 4, train.py:11: range: the result reaches")
    assert rule.reason.endswith("; works over 5 steps")
    planned = text.replace("loss_scale=1024.0", f"loss_scale=1024.0, plan={str(plan)!r}")
    assert not examined(text, path, 8, monkeypatch).healthy
    assert examined(planned, path, 8, monkeypatch).healthy


@pytest.mark.parametrize("option", ["--diff", "--write-plan=p.toml"])
def test_a_recipe_has_no_text_to_change(option, capsys):
    assert main(["doctor", "digits-mlp", option]) == 2
    assert "expect a script, ending in .py" in capsys.readouterr().err


NOWHERE = OpLocation("", "", None, "", 0)

WRITTEN = {
    "both operands": (RunInFp32("mul", "", 1), "y = a * (b + 1)", "y = a.float() * ((b + 1).float())"),
    "in place": (RunInFp32("add", "", 1), "y += x", "y = y.float() + (x)"),
    "a method": (RunInFp32("sum", "", 1), "y = x.half().sum(-1)", "y = x.half().float().sum(-1)"),
    "a product": (
        ScaleAround("matmul", "", 1, 4, False),
        "y = q @ k",
        "y = (((q * 2.0**-4) @ k).float() * 2.0**4)",
    ),
    "a factor that is a sum": (
        ScaleAround("mul", "", 1, 4, False),
        "y = (a + b) * c",
        "y = (((((a + b) * 2.0**-4)) * c).float() * 2.0**4)",
    ),
    "a module with a bias": (
        ScaleAround("linear", "", 1, 4, True),
        "y = self.a(x)",
        "y = ((self.a((x * 2.0**-4)).float() - self.a.bias) * 2.0**4 + self.a.bias)",
    ),
    "a function with a bias": (
        ScaleAround("linear", "", 1, 4, True),
        "y = F.linear(x, w, b)",
        "y = ((F.linear((x * 2.0**-4), w, b).float() - b) * 2.0**4 + b)",
    ),
    "a softmax by hand": (
        Shift("exp", "", 1, (-1,)),
        "e = (q @ k).exp()",
        "e = (((q @ k) - (q @ k).amax(-1, keepdim=True))).exp()",
    ),
    "logsumexp by hand": (
        LogSumExp("exp", "", 1, 1, (1,)),
        "y = torch.log(torch.exp(a + b).sum(1))",
        "y = torch.logsumexp(a + b, 1)",
    ),
    "a divisor": (KeepFromEdge("div", "", 1, 1e-4), "y = a / (b - c)", "y = a / ((b - c).clamp_min(0.0001))"),
    "a divisor of either sign": (
        KeepFromEdge("div", "", 1, 1e-4, True),
        "y = a / b",
        "y = a / torch.where((b).abs() < 0.0001, 0.0001, b)",
    ),
    "a norm by hand": (
        Both(RunInFp32("pow", "", 1), CastBack("mul", "", 2)),
        "m = x.pow(2).mean(-1)\nx = x * torch.rsqrt(m)",
        "m = x.float().pow(2).mean(-1)\nx = (x * torch.rsqrt(m)).half()",
    ),
    "an epsilon": (LargerEpsilon("add", "", 1, 6.1e-5), "y = x / (n + 1e-8)", "y = x / (n + 6.1e-05)"),
    "a comment stays": (DivideLoss(3), "loss.backward()  # mine\n", "(loss / 8).backward()  # mine\n"),
    "a scaler's loss": (DivideLoss(3), "s.scale(a + b).backward()", "s.scale(((a + b) / 8)).backward()"),
    "a sum's loss": (DivideLoss(3), "(a + b).backward()", "(((a + b) / 8)).backward()"),
    "bf16 of a sum": (
        UseBf16(),
        "z = (y.half() - x.to(torch.half)).half()",
        "z = (y.bfloat16() - x.to(torch.bfloat16)).bfloat16()",
    ),
    "letters of two bytes": (RunInFp32("mul", "", 1), "y = ä * b", "y = ä.float() * b"),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_cure_is_written_into_the_expression_it_is_about(case):
    dose, before, after = WRITTEN[case]
    assert after in write_dose(before, dose, NOWHERE)


def test_an_op_that_autocast_would_cast_again_leaves_the_region():
    dose = RunInFp32("matmul", "", 2, code='with torch.autocast("cuda", enabled=False): ...')
    in_region = dataclasses.replace(NOWHERE, in_region=True)
    (first, *_) = write_dose("def f(q, k):\n    return q @ k\n", dose, in_region)
    assert first == (
        'def f(q, k):\n    with torch.autocast("cuda", enabled=False):\n        return q.float() @ k\n'
    )


def test_a_rule_is_added_where_the_session_is_made():
    plain, own = "amp = hs.prepare(m, o)\n", "amp = hs.prepare(m, o, policy=p, level='O1')\n"
    dose = RunInFp32("linear", "", 1, by_rule=True)
    assert next(write_dose(plain, dose, NOWHERE)) == 'amp = hs.prepare(m, o, policy="full=linear")\n'
    told = "amp = hs.prepare(m, o, policy=hs.Policy.parse(p).with_rules(full=[\"linear\"]), level='O1')\n"
    assert next(write_dose(own, dose, NOWHERE)) == told


def test_the_diff_is_of_the_text_that_was_run(tmp_path, monkeypatch):
    """A script that reads beside itself, and its own name, runs in another text as in its own."""
    text = (
        "import os, sys, torch, beside\n"
        "assert os.path.samefile(__file__, sys.argv[0]) and beside.here\n"
        "w = torch.nn.Parameter(torch.ones(3))\n"
        "opt = torch.optim.SGD([w], lr=0.1)\n"
        "for i in range(5):\n"
        "    opt.zero_grad()\n"
        "    (w / (w.detach() - w.detach() if i == 3 else w.detach())).sum().backward()\n"
        "    opt.step()\n"
    )
    (tmp_path / "beside.py").write_text("here = True\n")
    document = examined(text, tmp_path / "train.py", 5, monkeypatch, diff=True)
    sys.modules.pop("beside", None)
    assert (
        "torch.where((w.detach() - w.detach() if i == 3 else w.detach()).abs() < 0.0001" in document.diff
        or (".clamp_min(0.0001)" in document.diff)
    )


def test_the_plan_keeps_a_module_in_fp32_whose_weights_a_conversion_lost(tmp_path, monkeypatch):
    script = named("parameter_flushed_by_prepare")
    document = examined(script.text, tmp_path / "x.py", script.steps, monkeypatch, plan=True)
    (rule,) = hs.Plan.from_toml(document.plan).rules
    assert (rule.pattern, rule.dtype, dict(rule.ops)) == ("1", torch.float32, {})
    assert rule.reason.startswith("x.py:17: precision: 4 of the 4 values of 1.gate")


def test_a_rate_of_an_optimizer_in_an_object_is_held_back(tmp_path, monkeypatch):
    script = named("learning_rate_spike")
    document = examined(script.text, tmp_path / "x.py", script.steps, monkeypatch, diff=True)
    assert "+            for group, most in zip(self.opt.param_groups, (0.01,)):\n" in document.diff


def test_that_there_is_nothing_to_write_is_said_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_script, "run_in_process", run_here)
    path = tmp_path / "train.py"
    loop = "for i in range(3):\n    w.square().sum().backward()\n    opt.step()\n    opt.zero_grad()\n"
    head = "import torch\nw = torch.nn.Parameter(torch.ones(3))\nopt = torch.optim.SGD([w], lr=0.1)\n"
    path.write_text(f"{head}loss = torch.nn.BCELoss()\n{loop}")
    assert main(["doctor", str(path), "--diff"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "the doctor wrote no cure: what lint found stands with its cure above" in said.err
    path.write_text(head + loop)
    assert main(["doctor", str(path), "--diff"]) == 0
    assert "the doctor found nothing to cure" in capsys.readouterr().err


SWALLOWED = """
import torch, halfstep as hs
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(model.parameters(), lr=1e-5)
amp = hs.prepare(model, opt, level="O3", dtype="bf16")
for i in range(14):
    x = torch.randn(16, 8)
    with amp.autocast():
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
    amp.backward(loss)
    amp.step()
"""


@pytest.mark.parametrize("steps", [14, 0])
def test_updates_that_a_level_swallows_are_cured_by_a_diff_and_by_a_plan(steps, tmp_path, monkeypatch):
    """The trial from outside cannot do it: the script that was changed is the trial. Also to its end."""
    document = examined(SWALLOWED, tmp_path / "x.py", steps, monkeypatch, diff=True, plan=True)
    (fault,) = document.faults
    assert fault.cause.kind == "rounding"
    assert fault.cures[0].status == WORKS
    assert '+amp = hs.prepare(model, opt, level="O2", dtype="bf16")' in document.diff
    (rule,) = hs.Plan.from_toml(document.plan).rules
    assert (rule.pattern, rule.dtype, rule.rule) == ("**", torch.float32, None)


def test_a_plan_cures_what_shows_behind_its_first_rule_too(tmp_path, monkeypatch):
    script = named("checkpointed_block")
    path, plan = tmp_path / "x.py", tmp_path / "plan.toml"
    document = examined(script.text, path, 0, monkeypatch, plan=True)
    plan.write_text(document.plan)
    assert [rule.pattern for rule in hs.Plan.read(plan).rules] == ["blocks.0", "blocks.1"]
    assert examined(with_plan(script.text, str(plan)), path, 0, monkeypatch).healthy


UNCLEARED = """import torch

model = torch.nn.Linear(8, 3)
optimizer = torch.optim.Adam(model.parameters())
for i in range(24):
"""


@pytest.mark.parametrize(
    ("loop", "cleared"),
    [
        (
            "{0}    {1}.backward()\n    optimizer.step()\n",
            "    {0}    {1}.backward()\n    optimizer.step()\n",
        ),
        (
            "    for _ in range(2):\n        {1}.backward()\n    optimizer.step()\n",
            "    {0}    for _ in range(2):\n        {1}.backward()\n    optimizer.step()\n",
        ),
        (
            "    {1}.backward()\n    if i % 3 == 2:\n        optimizer.step()\n",
            "    {1}.backward()\n    if i % 3 == 2:\n        optimizer.step()\n        {0}",
        ),
    ],
    ids=["plain", "micro-batches", "every third"],
)
def test_gradients_that_nobody_clears_are_where_the_script_does_not_accumulate(
    loop, cleared, tmp_path, monkeypatch
):
    loss, clear = "model(torch.randn(16, 8)).square().mean()", "optimizer.zero_grad()\n"
    text = UNCLEARED + loop.format("", loss)
    document = examined(text, tmp_path / "train.py", 24, monkeypatch, diff=True)
    new = applied(text, document.diff, tmp_path / "train.py")
    assert new == UNCLEARED + cleared.format(clear, loss)
    assert document.faults[0].cures[0].status == WORKS
