"""After the doctor the files of a script are those of a plain run, whatever it tried."""

import contextlib
import gc
import os
import random
import shutil
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest

from halfstep.doctor import script as _script
from halfstep.doctor.files import Layer
from halfstep.doctor.process import replace, run_main
from halfstep.doctor.script import examine_script
from tests.doctor.test_zoo import run_here

WRITES = """
import csv, glob, json, logging, os, shutil, sqlite3, tempfile
from pathlib import Path
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
log = logging.getLogger("of a script")
handler = logging.FileHandler("run.log")
log.addHandler(handler)
log.setLevel(logging.INFO)
table = open("table.csv", "w", newline="")
base = sqlite3.connect("runs.db")
base.execute("create table if not exists losses (step int, loss real)")
curve = np.memmap("curve.dat", dtype="float32", mode="w+", shape=(12,))
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
start = 0
if found := sorted(glob.glob("checkpoints/*/model.pt")):
    saved = torch.load(found[-1])
    net.load_state_dict(saved["net"])
    start = saved["step"]
for step in range(start, 12):
    torch.manual_seed(step)
    x = torch.rand(6, 4)
    if step == 5:
        x[2] = -1.0
    loss = (net(x) + torch.log(x)).square().mean()
    if not torch.isfinite(loss):
        log.info("no loss in step %d", step)
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
    log.info("%d %f", step, loss.item())
    csv.writer(table).writerow([step, loss.item()])
    table.flush()
    base.execute("insert into losses values (?, ?)", (step, loss.item()))
    base.commit()
    curve[step] = loss.item()
    with open("metrics.jsonl", "a") as lines:
        lines.write(json.dumps({"step": step}) + "\\n")
    if step % 3 == 2:
        folder = Path("checkpoints") / f"{step:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"net": net.state_dict(), "step": step + 1}, folder / "model.tmp")
        os.replace(folder / "model.tmp", folder / "model.pt")
        for old in sorted(os.listdir("checkpoints"))[:-2]:
            shutil.rmtree(os.path.join("checkpoints", old))
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as best:
            best.write("best")
        os.replace(best.name, "best.txt")
    np.save("weights.npy", net.weight.detach().numpy())
table.close()
base.close()
handler.close()
log.removeHandler(handler)
"""


def contents(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
        if "__pycache__" not in p.parts
    }


def plainly(text, folder):
    """Runs the script as Python does, and returns what is in its folder then."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    with contextlib.chdir(folder):
        assert run_main("train.py", []) is None
    return contents(folder)


def examine(text, folder, monkeypatch, copies=True, diff=False):
    monkeypatch.setattr(_script, "run_in_process", run_here)
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        document = examine_script(Path("train.py"), [], 0, 0, copies, diff=diff)
        gc.collect()  # a run that ended before the script left files open
    return document


@pytest.mark.parametrize("copies", [True, False])
def test_a_folder_is_as_after_a_plain_run(copies, tmp_path, monkeypatch):
    after = plainly(WRITES, tmp_path / "plain")
    document = examine(WRITES, tmp_path / "doctor", monkeypatch, copies, diff=True)
    assert contents(tmp_path / "doctor") == after
    fault = document.faults[0]
    assert (fault.step, fault.op, fault.where) == (5, "log", "train.py:29")
    assert any(cure.status == "works" for cure in fault.cures)
    assert "clamp_min" in document.diff


@pytest.mark.parametrize("copies", [True, False])
def test_a_script_that_resumes_is_run_again_from_where_it_began(copies, tmp_path, monkeypatch):
    """A second run would go on from what the first one saved, behind the fault."""
    begun = WRITES.replace("range(start, 12)", "range(start, 4)")
    plainly(begun, tmp_path / "doctor")
    shutil.copytree(tmp_path / "doctor", tmp_path / "plain")
    (tmp_path / "plain" / "train.py").write_text(WRITES)
    with contextlib.chdir(tmp_path / "plain"):
        assert run_main("train.py", []) is None
    document = examine(WRITES, tmp_path / "doctor", monkeypatch, copies)
    assert contents(tmp_path / "doctor") == contents(tmp_path / "plain")
    fault = document.faults[0]
    assert (fault.step, fault.op, fault.where) == (2, "log", "train.py:29")
    assert any(cure.status == "works" for cure in fault.cures)


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Landlock is Linux's")
def test_a_library_that_writes_by_itself_is_refused(tmp_path):
    """What C or Rust writes passes Python by: the kernel refuses it, and that run is no verdict on a cure."""
    text = WRITES.replace("    np.save(", "    save_file(net.state_dict(), 'net.safetensors')\n    np.save(")
    text = "from safetensors.torch import save_file\n" + text
    after = plainly(text, tmp_path / "plain")
    (tmp_path / "doctor").mkdir()
    (tmp_path / "doctor" / "train.py").write_text(text)
    command = [sys.executable, "-c", "from halfstep_command import main; main()", "doctor", "train.py"]
    told = subprocess.run(
        command, cwd=tmp_path / "doctor", capture_output=True, text=True, check=False
    ).stdout
    assert contents(tmp_path / "doctor") == after
    assert "logarithm" in told
    assert "does not help" not in told


def tree(root):
    """What a script sees below a folder, by each way of looking."""
    seen = {}
    for folder, folders, files in os.walk(root):
        assert sorted(os.listdir(folder)) == sorted([*folders, *files])
        for name in folders:
            seen[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in files:
            path = os.path.join(folder, name)
            assert os.path.getsize(path) == len(Path(path).read_bytes())
            seen[os.path.relpath(path, root)] = Path(path).read_bytes()
    return seen


def overwrite(path):
    with open(path, "r+b") as file:
        file.write(b"!")


def act(number, root):
    """A random act on files below a folder, as scripts do it; errors count as what it gives."""
    draw = random.Random(number)
    paths = [root / a / b for a in ("", "one", "two") for b in ("x", "y", "one")]
    a, b = draw.choice(paths), draw.choice(paths)
    acts = [
        lambda: a.write_text(f"{number}"),
        lambda: a.open("a").close(),
        lambda: overwrite(a),
        lambda: open(a, "x").close(),
        lambda: a.parent.mkdir(parents=True, exist_ok=True),
        lambda: a.mkdir(),
        lambda: a.unlink(),
        lambda: os.rmdir(a),
        lambda: os.replace(a, b),
        lambda: os.rename(a, b),
        lambda: shutil.copy(a, b),
        lambda: shutil.move(a, b),
        lambda: shutil.rmtree(a),
        lambda: os.truncate(a, 1),
        lambda: os.close(os.open(a, os.O_WRONLY | os.O_CREAT | os.O_EXCL)),
        lambda: a.read_text(),
    ]
    try:
        result = draw.choice(acts)()
        return result.replace(str(root), "") if isinstance(result, str) else None
    except OSError as error:
        missing = isinstance(error, NotADirectoryError | FileNotFoundError)
        return "missing" if missing else type(error).__name__


@pytest.mark.parametrize("seed", range(40))
def test_acts_of_any_order_give_what_they_give_plainly_and_touch_nothing(seed, tmp_path):
    shared, real = tmp_path / "shared", tmp_path / "real"
    plain = shared / "plain"  # which the layer leaves as it is
    for folder in (shared, real, plain):
        folder.mkdir()
    for n in range(4):
        for root in (plain, real):
            act(1000 * seed + n, root)
    before = contents(real)
    with ExitStack() as stack:
        Layer(str(shared), copy=True).install(stack, replace)
        for n in range(4, 24):
            assert act(1000 * seed + n, real) == act(1000 * seed + n, plain), n
            assert tree(real) == tree(plain), n
    assert contents(real) == before


def test_a_script_that_does_not_repeat_is_told_so(tmp_path, monkeypatch):
    """What a run from another draw shows is nothing of the first one."""
    text = LOOP.replace("torch.manual_seed(0)", "torch.manual_seed(time.time_ns() % 2**32)")
    document = examine(text, tmp_path / "doctor", monkeypatch, copies=False)
    assert not document.healthy
    assert not document.faults
    assert "does not repeat" in document.notes[0]
    assert examine(LOOP, tmp_path / "doctor", monkeypatch, copies=False).faults


LOOP = """
import time
import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(8):
    x = torch.rand(6, 4) - int(step == 5)
    loss = (net(x) + torch.log(x)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
