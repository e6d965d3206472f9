"""What one step puts on an accelerator: few launches, counted on the Python device in place of a GPU.

The kernels run in Triton's interpreter; every op on tensors of the device that is no view and no allocation
counts as a launch, and so does each copy to the host.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import halfstep

ROOT = Path(__file__).parents[2]
SOURCE = Path(halfstep.__file__).parents[1]
COUNT = """
import json
import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
import halfstep as hs
from halfstep.gradients import cuda
from halfstep.optim import backends
from halfstep.gradients import outcome
from tests import python_device
from tests.gpu.machine import DeviceOps

launched = []


def launch(kernel, device, programs, *args, **constants):
    launched.append(kernel.fn.__name__)
    with _disable_current_modes(), np.errstate(all="ignore"):
        args = (python_device.to_host(a) if isinstance(a, torch.Tensor) else a for a in args)
        kernel[(programs,)](*args, **constants)


class Sent:
    def __init__(self, tensor):
        launched.append("copy to the host")
        with _disable_current_modes():
            self.tensor = python_device.to_host(tensor).clone()

    def done(self):
        return False

    def wait(self):
        self.tensor.of_host = True
        return self.tensor


cuda.launch, cuda.why_not = launch, lambda device: ""
outcome.send_to_host = backends.send_to_host = Sent


def launches(level, dtype, clip, loss_scale=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)).to("pydev")
    optimizer = hs.optim.AdamW(model.parameters(), lr=1e-3, backend="triton")
    session = hs.prepare(model, optimizer, level=level, dtype=dtype, loss_scale=loss_scale)
    x, grads = torch.randn(4, 8, device="pydev"), None
    for step in range(5):
        with session.autocast():
            loss = model(x).float().square().mean()
        session.backward(loss * (float("inf") if step == 2 and dtype == "fp16" else 1.0))
        grads = grads or [p.grad for p in model.parameters()]
        for p, kept in zip(model.parameters(), grads):
            kept.copy_(p.grad)
            p.grad = kept  # the addresses of the step before, as an allocator gives them
        launched.clear()
        with DeviceOps() as ops:
            session.step(clip_norm=clip)
    session.sync()
    assert [o.taken for o in session.history] == [step != 2 or dtype == "bf16" for step in range(5)]
    noted = ("_local_scalar_dense", "_record_function_enter_new", "_record_function_exit")
    counted = launched + [name for name in ops.names if name not in noted]
    return counted, session.loss_scale.read()


print(json.dumps({
    f"{level} {dtype} {clip}": launches(level, dtype, clip)
    for level in ("O1", "O2") for dtype in ("bf16", "fp16") for clip in (None, 1.0)
}))
"""


@pytest.fixture(scope="module")
def launches(once: Any) -> dict[str, Any]:
    """By level, dtype and clip norm: the launches of the fifth step, and the loss scale after it."""
    return once("launches", _counted)


def _counted() -> dict[str, Any]:
    path = f"{SOURCE}{os.pathsep}{ROOT}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=280, cwd=ROOT, env=env
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton does not run under this numpy")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


KERNELS = ["measure", "total", "scalars", "update"]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("clip", ["None", "1.0"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_takes_few_launches(launches: dict[str, Any], level: str, clip: str) -> None:
    counted, scale = launches[f"{level} bf16 {clip}"]
    assert len(counted) <= len(KERNELS) + 2, counted
    assert set(KERNELS) <= set(counted)
    assert scale == 1.0
    counted, scale = launches[f"{level} fp16 {clip}"]
    assert len(counted) <= 8, counted
    assert {*KERNELS, "adjusted"} <= set(counted)
    assert scale == 2.0**15
