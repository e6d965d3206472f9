"""The doctor end to end: recipes and scripts, its exit codes, its JSON and its page."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from html.parser import HTMLParser

import pytest
import torch

from halfstep.cli import main
from halfstep.doctor import script as _script
from halfstep.doctor.script import examine_script
from halfstep.report.doctor import render_doctor

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=float(sys.argv[1]))
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for i in range(9):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
        if i == FAULT:
            out = out * 1e7
        loss = (out.float() - x[:, :1]).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

SESSION = """
import torch
from torch import nn
import halfstep as hs

model = nn.Linear(4, 1)
amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), dtype="bf16")
for i in range(6):
    with amp.autocast():
        loss = model(torch.randn(8, 4)).float().pow(2).mean()
        if i == 0:
            loss = loss / (loss - loss)
    amp.backward(loss)
    amp.step()
"""


def write(folder, text, fault=-1):
    path = folder / "train.py"
    path.write_text(text.replace("FAULT", str(fault)))
    return path


@pytest.fixture
def here(monkeypatch):
    """Scripts run in this process: what is tested is what the hooks see, not that a process starts."""
    monkeypatch.setattr(_script, "run_in_process", lambda run, *how: (run(), ""))


def test_a_script_with_a_fault(tmp_path, here, capsys):
    page = tmp_path / "report.html"
    path = write(tmp_path, SCRIPT, 5)
    assert main(["doctor", str(path), "--steps", "9", "--report", str(page), "--json", "--", "0.01"]) == 1
    document = json.loads(capsys.readouterr().out)
    bad = document["bad"][0]
    assert (bad["step"], bad["phase"], bad["module"], bad["op"]) == (5, "forward", "", "mul")
    assert "mul outside any module, train.py:15 is the first" in bad["summary"]
    assert bad["where"] == "train.py:15"
    assert bad["cause"]["kind"] == "range"
    tried = {c["kind"]: c["status"] for c in bad["cures"]}
    # In fp32 the forward would hold, but its gradient overflows where it re-enters fp16.
    assert tried == {"full": "does not help", "scale": "does not help", "bf16": "works"}
    assert [n["step"] for n in document["history"] if not n["taken"]] == [5]
    assert document["format"] == "fp16"
    assert "out = out * 1e7" in page.read_text()


def test_a_script_runs_in_a_process_of_its_own(tmp_path):
    document = examine_script(write(tmp_path, SCRIPT), ["0.01"], 2, 0)
    assert document.healthy
    assert document.steps == 2


@pytest.mark.long
def test_the_command_gives_the_same_verdict_where_no_process_is_copied(tmp_path, capsys, monkeypatch):
    """As with an accelerator, where each look is a fresh process."""
    path = write(tmp_path, SCRIPT, 2)
    command = ["doctor", str(path), "--steps", "6", "--", "0.01"]
    by_copies = main(command), capsys.readouterr().out

    def fork():
        raise AssertionError("a process was copied")

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr("halfstep.cli.doctor.can_copy", lambda: False)
    monkeypatch.setattr("halfstep.cli.doctor.examine_script", partial(examine_script, copies=False))
    assert (main(command), capsys.readouterr().out) == by_copies
    assert by_copies[0] == 1


ROUNDED = """
import torch, halfstep as hs
from torch import nn

model = nn.Linear(64, 64).to(torch.bfloat16)
optimizer = OPTIMIZER.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
for i in range(4):
    loss = (model(torch.randn(8, 64, dtype=torch.bfloat16)).float() - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("report", ["", "--json"])
def test_the_first_page_shows_what_weights_and_optimizer_hold_with_cures(report, tmp_path, here, capsys):
    page = tmp_path / "report.html"
    path = write(tmp_path, ROUNDED.replace("OPTIMIZER", "torch.optim"))
    assert main(["doctor", str(path), "--report", str(page), *([report] if report else [])]) == 0
    out = capsys.readouterr().out
    cure = "write hs.optim.AdamW(model.parameters(), lr=0.01) for torch's, or prepare at level O2"
    if report:
        (row,) = json.loads(out)["audit"]
        assert (row["rule"], row["where"], row["cure"]) == ("low weights", "AdamW group 0", cure)
    else:
        before, shown, after = out.partition(
            "audit:\nlow weights  AdamW group 0  AdamW keeps no fp32 copy of 4,160"
        )
        assert shown
        assert cure in after.splitlines()[1]
        assert before.startswith("train.py: healthy over 4 steps\n")
    html = page.read_text()
    assert "<td>AdamW keeps no fp32 copy of 4,160 bf16 weights" in html
    assert html.index("id='audit'") < html.index("id='dtypes'")


def test_an_audit_without_a_row_is_not_shown(tmp_path, here, capsys):
    page = tmp_path / "report.html"
    path = write(tmp_path, ROUNDED.replace("OPTIMIZER", "hs.optim"))
    assert main(["doctor", str(path), "--report", str(page)]) == 0
    assert "audit:" not in capsys.readouterr().out
    assert "id='audit'" not in page.read_text()


def test_a_healthy_script(tmp_path, here):
    document = examine_script(write(tmp_path, SCRIPT), ["0.01"], 6, 0)
    assert document.healthy
    assert document.bad == []
    assert len(document.losses) == 6
    assert torch.optim.Optimizer.step.__name__ == "step"
    assert "bracketed" not in torch.amp.GradScaler.step.__name__
    assert {"fp16", "fp32"} <= {c["dtype"] for c in document.counts}
    assert "aminmax" not in {c["op"] for c in document.counts}, "the doctor's own look at the weights"


def test_compiled_code_is_run_as_it_was_written(tmp_path, here):
    text = SCRIPT.replace("optimizer =", "model = torch.compile(model, backend='eager')\noptimizer =", 1)
    document = examine_script(write(tmp_path, text, 3), ["0.01"], 6, 0)
    assert (document.warnings, document.bad[0].step, document.bad[0].op) == ([], 3, "mul")
    assert {"linear", "tanh"} <= {c["op"] for c in document.counts}


@pytest.mark.filterwarnings("ignore:step 1. gradients hold inf")
def test_a_session_in_a_script_whose_first_step_is_bad(tmp_path, here):
    document = examine_script(write(tmp_path, SESSION), [], 4, 0)
    bad = document.bad[0]
    assert (bad.step, bad.phase, bad.op, bad.cause.kind) == (
        0,
        "forward",
        "div",
        "mathematics",
    )


@pytest.mark.filterwarnings("ignore:no op ran in bf16")
def test_a_script_that_forgets_the_region_is_not_healthy(tmp_path, here):
    text = SESSION.replace("        if i == 0:\n            loss = loss / (loss - loss)\n", "")
    assert examine_script(write(tmp_path, text), [], 4, 0).healthy
    document = examine_script(write(tmp_path, text.replace("with amp.autocast():", "if True:")), [], 4, 0)
    assert not document.healthy
    assert "no op ran in bf16" in document.headline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "took no training step: it ended without"),
        ("def (", "is not a Python script"),
        ("raise ValueError('no data')", "no data"),
    ],
)
def test_scripts_that_cannot_be_examined(tmp_path, here, capsys, text, message):
    assert main(["doctor", str(write(tmp_path, text))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [["digits-mpl"], ["nowhere.py"], ["digits-mlp", "--steps", "0"], ["digits-mlp", "--", "--lr"],
     ["digits-mlp", "--report", "/nowhere/at/all.html"], ["digits-mlp", "--level", "O7"]],
)  # fmt: skip
def test_bad_input_is_one_line(args, capsys):
    assert main(["doctor", *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_recipe_is_healthy_and_says_which_op_ran_in_which_dtype(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["doctor", "digits-mlp", "--dtype", "fp16", "--steps", "14", "--report", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("digits-mlp O1 fp16: healthy over 14 steps")
    assert re.search(r"fp16 +.*linear", out)
    assert 20_000 < page.stat().st_size < 2_000_000


def test_the_history_of_a_script_begins_with_its_first_step(tmp_path, here):
    document = examine_script(write(tmp_path, SCRIPT), ["0.01"], steps=9)
    assert [row["step"] for row in document.history] == list(range(9))
    assert document.lost[0]["step"] == 0
    assert {"gradient", "update", "weight"} <= {s["kind"] for s in document.series if s["steps"][0] == 0}


class Collector(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "action", "style") and v]


def nasty():
    """A document in which every text tries to break out."""
    evil = "</script><img src=x onerror=alert(1)>'\""
    sample = {
        "step": 1,
        "amax": 1.0,
        "dtype": "fp16",
        "first": -9,
        "counts": [1, 2],
        "zeros": 0,
        "infs": 0,
        "nans": 0,
        "scale": 1.0,
    }
    series = [
        {"kind": kind, "path": f"{evil}{i}", "steps": [0, 1], "amax": [1.0, 2.0], "samples": [sample]}
        for i in range(200)
        for kind in ("activation", "gradient")
    ]
    tensor = [{"what": evil, "amax": "inf"}]
    bad = {
        "step": 0,
        "harmless": False,
        "phase": "forward",
        "module": evil,
        "module_class": evil,
        "op": evil,
        "aten": evil,
        "where": evil,
        "code": evil,
        "origin": True,
        "underflow": False,
        "hidden": evil,
        "inputs": tensor,
        "outputs": tensor,
        "cause": {"kind": "range", "text": evil},
        "cures": [{"kind": "full", "text": evil, "code": evil, "status": "works"}],
        "spoiled": evil,
        "spoiled_lasting": [],
        "reached": [evil],
        "passed_on": [evil],
        "summary": evil,
    }
    note = {"step": 0, "scale": 2.0, "taken": False, "amax": 1.0, "worst": evil}
    return {
        "target": evil,
        "steps": 2,
        "healthy": False,
        "losses": [],
        "error": evil,
        "notes": [evil],
        "bad": [bad],
        "torch": "2",
        "counts": [{"phase": "forward", "op": evil, "dtype": "fp16", "count": 1}],
        "format": "fp16",
        "series": series,
        "lint": [{"rule": evil, "where": evil, "text": evil, "cure": evil}],
        "history": [note, {**note, "step": 1, "taken": True}],
        "forecasts": [evil],
        "lost": [{"step": 0, "share": 0.5, "worst": evil, "worst_share": 1.0, "dtype": "bf16"}],
        "verdict": [evil, evil],
    }


def test_the_page_is_one_offline_file_and_escaped():
    page = render_doctor(nasty())
    seen = Collector()
    seen.feed(page)
    assert "img" not in seen.tags
    assert seen.tags.count("script") == 2
    assert all(link.startswith("#") for link in seen.links)
    assert not re.search(r"https?://|@import|url\(", page)
    numbers = re.search(r"id='numbers'>(.*?)</script>", page, re.DOTALL)
    rows = json.loads(numbers[1])["rows"]
    assert len(rows["activation"]) == len(rows["gradient"]) == 200
    assert rows["activation"][0]["path"].startswith("</script>")


def test_the_page_can_be_used_by_keyboard():
    page = render_doctor(nasty())
    assert re.search(r"id='heat'[^>]*tabindex='0'", page)
    assert "role='listbox'" in page
    for key in ("ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "PageDown", "Home", "End"):
        assert key in page
    for control in re.findall(r"<(?:select|input|button) [^>]*>", page):
        assert "id=" in control


def test_ctrl_c_in_the_middle_tells_and_reports_what_was_seen(tmp_path):
    script = tmp_path / "long.py"
    script.write_text(
        "import pathlib, time, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for i in range(10**6):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    if i == 3:\n"
        "        pathlib.Path(__file__).with_name('begun').touch()\n"
        "        time.sleep(60)\n"
    )
    report = tmp_path / "report.html"
    report.write_text("the report before")
    # A job that was started in the background ignores SIGINT, and so do its children: as at a terminal, then.
    command = (
        "import signal, sys, halfstep_command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(halfstep_command.main())"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", command, "doctor", str(script), "--report", str(report)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "begun").exists() and run.poll() is None:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (130, "")
    assert out.startswith("long.py: healthy over 4 steps, then it was interrupted\n")
    assert "healthy over 4 steps, then it was interrupted" in report.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["begun", "long.py", "report.html"]


TWO = """
import torch
from torch import nn

torch.manual_seed(0)
first, second = nn.Linear(4, 1), nn.Linear(4, 1)
pair = [(m, torch.optim.SGD(m.parameters(), lr=1e-3)) for m in (first, second)]
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for i in range(9):
    for model, optimizer in pair:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        if i == FAULT and model is second:
            loss = loss * torch.log(loss * 0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    scaler.update()
"""


def test_steps_of_two_optimizers_are_counted_as_iterations(tmp_path, here):
    path = write(tmp_path, TWO, 2)
    document = examine_script(path, [], 3, 0)
    assert [fault.step for fault in document.faults] == [2]
    assert document.steps == 3
    assert "1 of 3 steps skipped, the last at step 3" in document.verdict
    assert max(row["step"] for row in document.history) < 3
    sound = examine_script(path, [], 2, 0)
    assert sound.healthy
    assert "healthy over 2 steps" in sound.headline


OUTLIER = """
import torch
from torch import nn
from halfstep.trainer import Trainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        return torch.exp(self.body(x))

torch.manual_seed(0)
model = Net()
data = [torch.randn(8, 4) for _ in range(9)]
data[4][3] *= FAULT
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
trainer = Trainer(model, optimizer, lambda out, y: out.float().mean(), dtype="bf16", progress=False)
trainer.fit([(x, x) for x in data], steps=9)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_batch_beyond_all_before_it_is_named_with_its_row(tmp_path, here):
    document = examine_script(write(tmp_path, OUTLIER, -30000), [], 6, 0)
    fault = document.faults[0]
    assert (fault.step, fault.phase, fault.op) == (4, "forward", "exp")
    assert re.search(r"x of batch 5 reaches \S+ in row 3, at most \S+ before it", document.headline)
    assert "data" in [cure.kind for cure in fault.cures]
