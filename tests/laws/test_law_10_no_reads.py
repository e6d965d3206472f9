"""Law 10: the steady step reads nothing back from an accelerator; counted on the Python device.

Every value that the host waits for passes through two kernels of that device, which keep count.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import halfstep

ROOT = Path(__file__).parents[2]
SOURCE = Path(halfstep.__file__).parents[1]
COUNT = """
import json
import warnings
import torch
from torch import nn
import halfstep as hs
from halfstep import outcome
from halfstep.numerics import watch
from halfstep.optim.backends import backend
from tests import python_device


class Late:
    # Stands for an asynchronous copy, which a device without pinned memory has to make at once.
    def __init__(self, tensor):
        self.tensor = tensor

    def done(self):
        return True

    def wait(self):
        return python_device.to_host(self.tensor).clone()


outcome.send_to_host = backend.send_to_host = watch.send_to_host = Late


def reads(kind, level, dtype, watched=False):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)).to("pydev")
    optimizer = getattr(hs.optim if kind == "ours" else torch.optim, "AdamW")(model.parameters(), lr=1e-3)
    session = hs.prepare(model, optimizer, level=level, dtype=dtype)
    seen = watch.watch(model, session, every=1) if watched else None
    x = torch.randn(4, 8, device="pydev")
    for _ in range(4):
        python_device.host_reads.clear()
        python_device.host_uploads.clear()
        with session.autocast():
            loss = model(x).float().square().mean()
        session.backward(loss)
        session.step(clip_norm=1.0)
    if watched:
        waited = python_device.host_reads + python_device.host_uploads
        seen.collect()
        assert len(seen.notes) == 4
        return len(waited)
    return len(python_device.host_reads)


def reads_of_bare_steps():
    # The last is skipped; its warning comes when the host knows.
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3)).to("pydev", torch.bfloat16)
    optimizer = hs.optim.AdamW(model.parameters(), lr=1e-3, clip_norm=0.1, skip_nonfinite=True)
    x = torch.randn(4, 8, device="pydev").bfloat16()
    found = []
    for bad in (1.0, 1.0, 1.0, float("inf")):
        (model(x).float().square().mean() * bad).backward()
        python_device.host_reads.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        found.append(len(python_device.host_reads))
        optimizer.zero_grad()
    assert not optimizer.outcome.taken
    return found[2]


cases = [(k, level, dtype) for k in ("ours", "torch") for level in ("O1", "O2") for dtype in ("bf16", "fp16")]
found = {" ".join(case): reads(*case) for case in cases}
found |= {f"watched {dtype}": reads("ours", "O2", dtype, True) for dtype in ("bf16", "fp16")}
found["bare"] = reads_of_bare_steps()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def reads(once: Any) -> dict[str, int]:
    """Values the host waited for in the fourth step, by optimizer, level and dtype."""
    return once("reads", _counted)


def _counted() -> dict[str, int]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=280, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_one_pass_step_reads_nothing(reads, level: str, dtype: str) -> None:
    assert reads[f"ours {level} {dtype}"] == 0


def test_a_bare_step_that_clips_and_skips_reads_nothing(reads) -> None:
    assert reads["bare"] == 0


@pytest.mark.parametrize(("level", "masters"), [("O1", 0), ("O2", 1)])
def test_a_torch_optimizer_costs_one_flag_and_its_masters_another(reads, level: str, masters: int) -> None:
    assert reads[f"torch {level} bf16"] == masters
    assert reads[f"torch {level} fp16"] == 1 + masters


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_watched_step_waits_for_nothing_though_gradients_have_two_dtypes(reads, dtype: str) -> None:
    assert reads[f"watched {dtype}"] == 0
