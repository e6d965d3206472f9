"""A run in a copy of the first process: the same answer as a fresh one's, and nothing done twice.

Also a run where processes can neither fork nor take signals, as on Windows.
"""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from halfstep.doctor import script as _script
from halfstep.doctor.in_script import run_order
from halfstep.doctor.process import Interrupted, Order, run_in_process
from halfstep.doctor.script import examine_script

SCRIPT = """
import atexit, sys, torch
from torch import nn
told = sys.argv[1]
atexit.register(lambda: open(told, "a").write("ended "))
print("to nowhere")
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    loss = torch.log(model(torch.randn(4, 3)).square().mean() * (i != 2))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

BOTH = """
import atexit, json, os, sys, tempfile
from functools import partial
from halfstep.doctor.in_script import run_order
from halfstep.doctor.process import Order, can_copy, run_in_process
script, told, own = sys.argv[1:]
atexit.register(lambda: open(own, "a").write("once "))
kept = tempfile.TemporaryDirectory()
run = partial(run_order, Order(script, (told,), 4, 0))
found = []
for forked in (True, False):
    assert can_copy()
    one, said = run_in_process(run, os.environ, forked)
    document = one.document
    ops = [fault.op for fault in one.rerun_result.faults]
    found.append([one.first_bad, document.steps, document.losses[:2], ops])
assert os.path.isdir(kept.name)
dead = Order(script + ".dead", (told,), 4, 0)
open(dead.script, "w").write("import os, sys; sys.stderr.write('gone\\\\n'); sys.stderr.flush(); os._exit(3)")
print(json.dumps([*found, run_in_process(partial(run_order, dead), os.environ, True)]))
"""


@pytest.mark.long
def test_a_copy_answers_as_a_fresh_process_does(tmp_path):
    script, told, own = tmp_path / "train.py", tmp_path / "told", tmp_path / "own"
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", BOTH, str(script), str(told), str(own)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr
    forked, fresh, dead = json.loads(done.stdout)
    assert forked == fresh
    assert forked[0] == 2
    assert forked[3] == ["log"]
    assert dead == [None, "gone\n"]
    assert told.read_text() == "ended ended "
    assert own.read_text() == "once "


class Plain(subprocess.Popen):
    """Knows what Windows knows."""

    def __init__(self, command, *, stdout, stderr, env):
        super().__init__(command, stdout=stdout, stderr=stderr, env=env)

    def send_signal(self, number):
        raise ValueError(f"Unsupported signal: {number}")

    def kill(self):
        super().send_signal(signal.SIGKILL)


@pytest.fixture
def plain(monkeypatch):
    """No process can fork."""
    monkeypatch.delattr(os, "fork")
    monkeypatch.setattr(subprocess, "Popen", Plain)


@pytest.mark.long
def test_where_nothing_forks_a_run_is_a_plain_process(plain, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    order = Order(str(script), (str(tmp_path / "told"),), 3, 0)
    found, said = run_in_process(partial(run_order, order), os.environ)
    assert (found.document.steps, found.first_bad, said) == (3, 2, "")


@pytest.mark.long
def test_where_nothing_forks_ctrl_c_reaches_the_run_by_itself(plain, monkeypatch, tmp_path):
    script, began = tmp_path / "train.py", tmp_path / "began"
    script.write_text(
        SCRIPT
        + f"    if i == 1:\n        import time\n        open({str(began)!r}, 'w')\n        time.sleep(60)\n"
    )

    class InterruptedOnce(Plain):
        def wait(self, timeout=None):
            if not began.exists():
                while not began.exists():
                    time.sleep(0.1)
                os.kill(self.pid, signal.SIGINT)  # as a console does with all its processes
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", InterruptedOnce)
    order = Order(str(script), (str(tmp_path / "told"),), 4, 0)
    with pytest.raises(Interrupted) as ended:
        run_in_process(partial(run_order, order), os.environ, patient=True)
    document = ended.value.args[0].document
    assert (document.ended_by, document.steps) == ("interrupt", 2)


SLOW = """
import time, torch
w = torch.nn.Parameter(torch.ones(3))
opt = torch.optim.SGD([w], lr=0.01)
for i in range(60):
    time.sleep(0.05)
    loss = torch.log((w * torch.randn(3)).square().sum() * (i != 53))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.long
def test_a_copy_goes_on_to_a_bad_step_from_one_that_was_held_before_it(tmp_path, monkeypatch):
    """In a long run not every step is held; still one run of the script is enough."""
    runs = []
    monkeypatch.setattr(_script, "run_in_process", lambda run, *how: (runs.append(run()) or runs[-1], ""))
    script = tmp_path / "train.py"
    script.write_text(SLOW)
    (fault,) = examine_script(script, steps=0).faults
    assert (fault.step, fault.op, fault.best.verdict) == (53, "log", "works over 7 steps")
    assert len(runs) == 1
