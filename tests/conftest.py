"""What every test needs: one thread, the same kernels everywhere, and a clean autocast state afterwards."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HALFSTEP_KERNELS", str(Path(__file__).parent / "kernels.toml"))
os.environ.pop("COLUMNS", None)  # set by workers of a parallel run; output would be folded to it

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing here
hypothesis.settings.load_profile("untimed")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded_and_left_clean():
    torch.manual_seed(0)
    yield
    assert not torch.is_autocast_enabled("cpu"), "a test left autocast enabled on the CPU"


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """`once(name, make)`: what `make()` gives, made by one process of the run for all of them."""
    here = tmp_path_factory.getbasetemp()
    shared = here.parent if "PYTEST_XDIST_WORKER" in os.environ else here

    def found(name: str, make: Callable[[], Any]) -> Any:
        path = shared / f"once-{name}"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                torch.save(make(), f"{path}.part")
                os.replace(f"{path}.part", path)
        return torch.load(path, weights_only=False)

    return found


@pytest.fixture
def rounded_kernels(monkeypatch):
    """16-bit ops rounded around fp32: the numbers of the policy, and no machine is slow in them."""
    monkeypatch.setenv("HALFSTEP_KERNELS", "rounded")


@pytest.fixture
def no_limits(monkeypatch):
    """The environment hides no instruction set."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
