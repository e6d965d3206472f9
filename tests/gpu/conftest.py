"""Every test here runs on CUDA, or with TRITON_INTERPRET=1 on a CPU in its place; elsewhere it is skipped."""

import os

import pytest
import torch

from tests import falsecuda
from tests.gpu.machine import Cuda, FalseCuda, Machine, Mapped


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    if torch.cuda.is_available():
        return FalseCuda() if falsecuda.installed() else Cuda()
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs CUDA, or TRITON_INTERPRET=1 to run on the CPU in its place")
    return Mapped(monkeypatch)
