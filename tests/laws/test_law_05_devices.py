"""Law 5 on a plugged-in device: the same policy gives the same dtypes there as on the CPU."""

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
PROBE = """
import json, sys
import torch
from halfstep import autocast
from halfstep.policy import Policy
from halfstep.conformance.probe import probe_casting
import tests.python_device

seen = {}
for table in sys.argv[1:]:
    for dtype in (torch.bfloat16, torch.float16):
        policy = Policy(compute_dtype=dtype, table=table)
        for device in ("cpu", "pydev"):
            found = probe_casting(device, dtype, policy.rows(), lambda: autocast(device, policy=policy))
            seen[f"{table} {dtype} {device}"] = {o.op: (o.verdict, str(o.output)) for o in found.values()}
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(once: Any) -> dict[str, dict[str, list[str]]]:
    """What each op gives back on each device, looked at in a process that has the Python device."""
    return once("casting", _probed)


def _probed() -> dict[str, dict[str, list[str]]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PROBE, "halfstep", "paper", "mlu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
@pytest.mark.parametrize("table", ["halfstep", "paper", "mlu"])
def test_the_python_device_gives_the_dtypes_of_the_cpu(seen, table: str, dtype: str) -> None:
    cpu, device = (seen[f"{table} {dtype} {kind}"] for kind in ("cpu", "pydev"))
    both = [op for op in cpu if "absent" not in (cpu[op][0], device[op][0])]
    assert len(both) > 0.85 * len(cpu)
    assert {op: (cpu[op], device[op]) for op in both if cpu[op] != device[op]} == {}
    assert {op: found for op, found in device.items() if found[0] == "differs"} == {}
