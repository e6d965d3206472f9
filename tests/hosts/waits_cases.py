"""Waits for an accelerator in the loops of accelerate, transformers, Fabric and Lightning."""

import subprocess
import sys

import pytest

from tests.falsecuda import build

NO_DEVICE = build.missing()


@pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)
def test_a_session_adds_no_wait_to_its_host():
    command = [sys.executable, "-m", "tests.falsecuda", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    file = "tests/falsecuda/inside/test_host_waits.py"
    done = subprocess.run([*command, file], capture_output=True, text=True, cwd=build.ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
