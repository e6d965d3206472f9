"""Every test here runs on CUDA or on the false CUDA device; elsewhere it is skipped, but for the kernels'.

Those run with TRITON_INTERPRET=1 on a CPU too.
"""

import os

import pytest
import torch

from tests import falsecuda
from tests.gpu.machine import Cuda, FalseCuda, Machine, Mapped


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if torch.cuda.is_available():
        return FalseCuda(monkeypatch) if falsecuda.installed() else Cuda()
    if os.environ.get("TRITON_INTERPRET") != "1" or not request.path.stem.endswith("kernels"):
        pytest.skip("needs CUDA, or the false CUDA device: python -m tests.falsecuda -m pytest tests/gpu")
    return Mapped(monkeypatch)
