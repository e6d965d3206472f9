"""The battery's numbers: the CPU passes, a chip passes without a sin and fails with each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfstep.conformance import numbers

ROOT = Path(__file__).parents[2]


def run(*command):
    """Python in a process of its own: a process keeps the one device it has."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=env)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "check"), list(numbers.checks()))
def test_the_cpu_computes_as_the_battery_asks(name, check, low):
    status, detail = check(torch.device("cpu"), low)
    assert status != "fails", f"{name}: {detail}"


def test_the_battery_fails_every_sin_and_passes_the_honest_chip():
    done = run("-m", "tests.sinful_device")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.pop("none") == []
    assert len(found) >= 12
    assert {sin: failed for sin, failed in found.items() if not failed} == {}
    seen = {sin: " ".join(failed) for sin, failed in found.items()}
    assert "long sums, matrix product fp16" in seen["sums in 16 bits"]
    assert "long sums, gradients fp16" in seen["gradients of filters sum in 16 bits"]
    assert "ties go to even" in seen["ties away from zero"]
    assert "subnormals are kept" in seen["subnormals flushed by casts"]
    assert "another format inside" in seen["bf16 passed off as fp16 in products"]
    assert "overflow gives inf" in seen["no inf from overflow in products"]
    assert not any("Error:" in failed for failed in seen.values())


FP16_ONLY = """
import torch, halfstep as hs
from tests import python_device
torch.set_num_threads(1)
hs.devices.register("pydev", dtypes=("fp16",), policy="mlu")
from halfstep.conformance import run_battery
found = list(run_battery("pydev", levels=("O2",), only=("numbers", "scaling", "masters")))
assert found and all("bf16" not in check.name for check in found)
assert not [check for check in found if check.status == "fails"], found
x = torch.ones(2, 2, device="pydev")
for policy in (None, "torch", "halfstep", "table=apex", "table=mlu,full=tanh", "o=fp32"):
    with hs.autocast("pydev", policy=policy):
        assert (x @ x).dtype == torch.float16, policy
model = torch.nn.Linear(2, 2).to("pydev")
for policy in (None, "torch", "table=apex"):
    session = hs.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O1", policy=policy)
    assert session.policy.compute_dtype == torch.float16
    session.revert()
half = x.half()
with torch.pydev.amp.autocast(True):
    given = {
        "dot": torch.dot(half[0], half[1].float()).dtype,
        "softmax": torch.softmax(half, 1).dtype,
        "sigmoid": torch.sigmoid(half).dtype,
        "batch_norm": torch.nn.BatchNorm1d(2).to("pydev")(half).dtype,
        "mm": (x @ x).dtype,
    }
assert given.pop("mm") == torch.float16
assert set(given.values()) == {torch.float32}, given
with hs.autocast("pydev"):
    assert torch.sigmoid(half).dtype == torch.float16
for wrong in ("no such table", {"softmaxx": "full"}, {"table": 3}, {"full": ["exp"], "exp": "low"}):
    try:
        hs.devices.register("pydev", policy=wrong)
        raise AssertionError(wrong)
    except hs.errors.ConfigError as error:
        print(error)
for own in ({"table": "mlu", "full": ["tanh", torch.exp]}, {"tanh": "full", torch.exp: hs.Rule.FULL}):
    hs.devices.register("pydev", dtypes=("fp16",), policy=own)
    with torch.pydev.amp.autocast(True):
        assert torch.tanh(half).dtype == torch.exp(half).dtype == torch.float32
        assert (x @ x).dtype == torch.float16
assert hs.devices.default_dtype("pydev") == torch.float16, "what is refused changes nothing"
"""


@pytest.mark.long
def test_a_chip_of_fp16_alone_needs_no_flags_and_brings_its_own_table():
    done = run("-c", FP16_ONLY)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert len(said) == 4
    assert "no such table" in said[0]
    assert "unknown op 'softmaxx'" in said[1]
    assert "{'exp': 'full', 'matmul': 'low'}" in said[2]
    assert "named under both" in said[3]


@pytest.mark.parametrize("example", ["examples/mlu_training_loop.py", "examples/detect.py"])
def test_a_plugin_that_is_a_file_finds_the_files_beside_it(example, tmp_path):
    (tmp_path / "chip_beside.py").write_text("from tests import python_device")
    (tmp_path / "chip.py").write_text("import chip_beside\nraise SystemExit('brought up ' + __name__)")
    done = run(example, "--plugin", str(tmp_path / "chip.py"), "--device", "pydev")
    assert done.stderr.strip().splitlines()[-1] == "brought up chip"


@pytest.mark.long
def test_the_detector_trains_on_a_plugged_in_chip():
    small = ["--epochs", "1", "--batch-size", "16", "--train-images", "32", "--image-size", "32"]
    small += ["--cfg", "yolov5n.yaml", "--amp"]
    done = run("examples/detect.py", "--plugin", "tests.python_device", "--device", "pydev", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    missing = run("examples/detect.py", "--plugin", "no_such_chip", *small)
    assert missing.returncode == 2
    assert "--plugin no_such_chip" in missing.stderr
