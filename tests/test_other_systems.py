"""halfstep on a system that lacks what Linux has: no fork, fcntl, resource, /proc, affinity or mallopt."""

import subprocess
import sys

import pytest

HIDE = """
import builtins, ctypes, io, os, sys
import torch, numpy, numba

SYSTEM = {system!r}
for name in ("fork", "sched_getaffinity", "getpgid", "killpg", "setsid"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("fcntl", "resource"):
    sys.modules[name] = None
sys.platform = SYSTEM
real_open, real_cdll = io.open, ctypes.CDLL


def without_proc(file, *args, **options):
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "no such file", file)
    return real_open(file, *args, **options)


def without_libc(name=None, *args, **options):
    if name is None or "libc" in str(name):
        raise OSError("no such library")
    return real_cdll(name, *args, **options)


builtins.open = io.open = without_proc
ctypes.CDLL = without_libc
"""
TRAIN = """
import tempfile
from pathlib import Path
import halfstep as hs

folder = Path(tempfile.mkdtemp())
LEVELS = ("O0", None), ("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")
for level, dtype in LEVELS:
    torch.manual_seed(0)
    for make in (hs.optim.AdamW, torch.optim.SGD):
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))
        opt = make(net.parameters(), lr=1e-2)
        amp = hs.prepare(net, opt, level=level, dtype=dtype)
        for _ in range(3):
            with amp.autocast():
                loss = net(torch.randn(4, 8)).float().square().mean()
            amp.backward(loss)
            amp.step(clip_norm=1.0)
        assert all(p.isfinite().all() for p in net.parameters())
        before = amp.state_dict()
        amp.save(folder / f"{level}{dtype}{make.__name__}")
        amp.save(folder / f"{level}{dtype}{make.__name__}")  # over what is there
        amp.load(folder / f"{level}{dtype}{make.__name__}")
        again = amp.state_dict()
        same = torch.utils._pytree.tree_map(
            lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else True, before, again
        )
        assert all(torch.utils._pytree.tree_leaves(same))
        amp.revert()
print("trained")
"""
DOCTOR = """
from halfstep.cli import main

Path = __import__("pathlib").Path
folder = Path(__import__("tempfile").mkdtemp())
(folder / "train.py").write_text('''
import torch
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(6):
    x = torch.rand(6, 4) - int(step == 3)
    loss = (net(x) + torch.log(x)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    open("log.txt", "a").write(f"{step}")
''')
os.chdir(folder)
assert main(["doctor", "train.py", "--json"]) == 1
assert (folder / "log.txt").read_text() == "012345"
assert main(["formats", "0.1", "--json"]) == 0
"""


@pytest.mark.parametrize("system", [pytest.param("darwin", marks=pytest.mark.long), "win32"])
def test_training_saving_and_the_doctor_need_nothing_of_linux_alone(system, tmp_path):
    code = HIDE.replace("{system!r}", repr(system)) + TRAIN + (DOCTOR if system == "win32" else "")
    run = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert "trained" in run.stdout
    assert system == "darwin" or "logarithm" in run.stdout
