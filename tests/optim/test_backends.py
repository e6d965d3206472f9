"""What runs the step on a CPU: the compiled kernels where Numba is there, else the reference, with a word."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from halfstep.errors import HalfstepWarning
from halfstep.optim import SGD, Adam, AdamW, Lion, reference
from halfstep.optim.backends import reference as backend

WEIGHTS = [torch.float32, torch.bfloat16, torch.float16]


def take_steps(make, dtype, **options):
    """Three steps with everything a step can do; the weights afterwards."""
    p = nn.Parameter(torch.linspace(-2, 2, 1000).to(dtype))
    optimizer = make([p], lr=1e-3, **options)
    for step in range(3):
        p.grad = (p.detach().float() * 0.1 + step).to(dtype)
        stats = optimizer.measure(0.5)
        optimizer.step(inv_scale=0.5, clip_coef=0.9, found_inf=~stats.finite)
    return p.detach()


@pytest.fixture
def no_reference(monkeypatch):
    """Plain torch is out of reach: measuring and updating by it fails."""
    pytest.importorskip("numba")

    def refuse(*args, **options):
        raise AssertionError("the plain torch reference ran")

    monkeypatch.setattr(reference, "update", refuse)
    monkeypatch.setattr(backend, "measure", refuse)


@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
@pytest.mark.parametrize("make", [AdamW, Adam, SGD, Lion])
def test_by_default_a_cpu_runs_the_compiled_kernels(make, dtype, no_reference):
    moved = take_steps(make, dtype)
    assert not torch.equal(moved, torch.linspace(-2, 2, 1000).to(dtype))


@pytest.mark.parametrize(
    "options", [{"state_dtype": "bf16"}, {"state_dtype": "8bit"}, {"master": None}], ids=str
)
def test_kept_in_other_ways_too(options, no_reference):
    moved = take_steps(AdamW, torch.bfloat16, **options)
    assert moved.isfinite().all()


def test_the_reference_is_what_the_test_above_keeps_out_of_reach(no_reference):
    with pytest.raises(AssertionError, match="reference ran"):
        take_steps(AdamW, torch.bfloat16, backend="reference")


WITHOUT_NUMBA = """
import sys, warnings
sys.modules["numba"] = None
import torch, halfstep as hs
from tests.optim.test_backends import take_steps
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = [take_steps(make, torch.bfloat16) for make in (hs.optim.AdamW, hs.optim.AdamW, hs.optim.SGD)]
assert torch.equal(found[0], found[1])
print(found[0].view(torch.int16).sum().item())
print(*[f"{w.category.__name__}: {w.message}" for w in said], sep="\\n")
"""


def test_where_numba_is_missing_the_same_step_runs_after_one_warning():
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    total, *said = done.stdout.splitlines()
    assert int(total) == take_steps(AdamW, torch.bfloat16).view(torch.int16).sum().item()
    assert len(said) == 1
    assert said[0].startswith(f"{HalfstepWarning.__name__}: Numba cannot be imported")
