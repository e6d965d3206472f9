"""Ctrl-C and the end of the doctor's own process, which alone gets the signal: its runs end with it."""

import os
import signal
import subprocess
import sys
import time

import pytest

LOOP = """
import os, pathlib, signal, sys, time, torch
w = torch.nn.Parameter(torch.ones(3))
opt = torch.optim.SGD([w], lr=0.01)
def train():
    for i in range(30):
        opt.zero_grad()
        w.square().sum().backward()
        opt.step()
        if i == 3:
            AT_STEP_FOUR
try:
    train()
except KeyboardInterrupt:
    OTHERWISE
"""
MORE = "for _ in range(3): opt.zero_grad(); w.square().sum().backward(); opt.step()"


def doctor(path, *args):
    command = [sys.executable, "-m", "halfstep_command", "doctor", str(path), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)


@pytest.mark.long
@pytest.mark.parametrize("otherwise", ["raise", "pass", "sys.exit(0)", MORE])
def test_an_interrupt_of_the_doctor_alone_reaches_the_script_and_what_was_seen_is_told(otherwise, tmp_path):
    """However the script takes it."""
    path = tmp_path / "train.py"
    text = LOOP.replace("AT_STEP_FOUR", "os.kill(os.getppid(), signal.SIGINT); time.sleep(20)")
    path.write_text(text.replace("OTHERWISE", otherwise))
    done = doctor(path)
    assert done.returncode == 130
    steps = 7 if "range" in otherwise else 4
    assert f"healthy over {steps} steps, then it was interrupted" in done.stdout


@pytest.mark.long
def test_after_an_interrupt_it_is_said_why_there_is_no_diff(tmp_path):
    path = tmp_path / "train.py"
    text = LOOP.replace("AT_STEP_FOUR", "os.kill(os.getppid(), signal.SIGINT); time.sleep(20)")
    path.write_text(text.replace("OTHERWISE", "raise"))
    done = doctor(path, "--diff")
    assert (done.returncode, done.stdout) == (130, "")
    assert "the doctor was interrupted before it had written the cures" in done.stderr


@pytest.mark.long
def test_a_script_ends_with_the_doctor(tmp_path):
    """However that ends."""
    path, own = tmp_path / "train.py", tmp_path / "pid"
    kill = f"pathlib.Path({str(own)!r}).write_text(str(os.getpid())); os.kill(os.getppid(), signal.SIGKILL)"
    path.write_text(LOOP.replace("AT_STEP_FOUR", f"{kill}; time.sleep(60)").replace("OTHERWISE", "raise"))
    assert doctor(path).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int(own.read_text()), 0)
            time.sleep(0.1)
