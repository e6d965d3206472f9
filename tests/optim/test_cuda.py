"""The tests of tests/gpu on a CPU, and the kernels compiled for a GPU.

Each run is a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import ConfigError, HalfstepWarning, UnsupportedError
from halfstep.kernels.cuda import launch as cuda
from halfstep.optim import AdamW
from halfstep.optim.backends import Backends
from tests.falsecuda import build

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ROOT = Path(__file__).parents[2]
SOURCE = Path(halfstep.__file__).parents[1]


BARE = ROOT / "tests" / "gpu" / "bare"


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = f"{SOURCE}{os.pathsep}{ROOT}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": path} | more
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=560, env=env, cwd=ROOT
    )


NO_DEVICE = build.missing()


def on_a_cpu(*options: str) -> None:
    """The tests of tests/gpu on the false CUDA device, with no more packages than a bare machine has.

    Where there is no such device, in Triton's interpreter on a CPU.
    """
    command = ("-m", "pytest", "-p", "no:cacheprovider", "--confcutdir=tests", "-x", "--tb=short", *options)
    if not NO_DEVICE:
        command = (*command, "-p", "tests.falsecuda.plugin")
    path = os.pathsep.join(map(str, (BARE, SOURCE, ROOT)))
    done = run(*command, TRITON_INTERPRET="1", PYTHONPATH=path)
    if "only 0-dimensional arrays can be converted" in done.stdout:
        pytest.skip("the interpreter of this Triton does not run under this numpy")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


KERNELS = "tests/gpu/test_kernels.py"
TWO_DEVICES = ("--ignore", "tests/gpu/test_numbers.py")  # the CPU and another


@needs_triton
def test_the_kernels_on_a_cpu():
    on_a_cpu(KERNELS, "-m", "not exhaustive and not long")


@needs_triton
@pytest.mark.skipif(bool(NO_DEVICE), reason=NO_DEVICE)
def test_the_other_gpu_tests_on_a_cpu():
    on_a_cpu("tests/gpu", "--ignore", KERNELS, *TWO_DEVICES, "-m", "not exhaustive and not long")


@needs_triton
@pytest.mark.long
def test_more_of_the_gpu_tests_on_a_cpu():
    on_a_cpu("tests/gpu", *TWO_DEVICES, "-m", "long and not exhaustive")


@needs_triton
@pytest.mark.exhaustive
def test_every_combination_on_a_cpu():
    on_a_cpu(KERNELS, "-m", "exhaustive")


def compiled(tmp_path: Path, *arguments: str) -> None:
    """Run tests/optim/assembly.py, which reads the PTX."""
    place = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = run("tests/optim/assembly.py", *arguments, **place)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
@pytest.mark.parametrize("arch", ["80", "90"])
def test_compiled_code_has_wide_loads_and_no_fused_arithmetic(tmp_path: Path, arch: str):
    compiled(tmp_path, arch)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("arch", ["80", "90"])
def test_all_compiled_code_has_wide_loads_and_no_fused_arithmetic(tmp_path: Path, arch: str):
    compiled(tmp_path, arch, "all")


def kind_for(choice: str) -> str:
    return type(Backends().of(choice, torch.device("cuda"))).__name__


@pytest.fixture
def fresh():
    caches = (cuda.kernels, cuda.usable, cuda.why_not)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_without_triton_cuda_runs_the_reference_and_says_so_once(
    fresh: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "halfstep.kernels.cuda.update", None)
    monkeypatch.delattr("halfstep.kernels.cuda.update", raising=False)
    with pytest.warns(HalfstepWarning, match="pip install triton") as said:
        names = [kind_for("auto") for _ in range(2)]
    assert names == ["Reference", "Reference"]
    assert len(said) == 1
    assert kind_for("reference") == "Reference"


def test_where_no_kernel_compiles_one_sentence_says_so_and_the_reference_runs(
    fresh: None, monkeypatch: pytest.MonkeyPatch
):
    def launch(*args: object, **constants: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda, "kernels", lambda: SimpleNamespace(total=None))
    with pytest.warns(
        HalfstepWarning, match=r"Failed to find C compiler.*needs a C compiler.*python3-dev"
    ) as said:
        names = [kind_for("auto") for _ in range(2)]
    assert names == ["Reference", "Reference"]
    assert len(said) == 1
    with pytest.raises(UnsupportedError, match="Failed to find C compiler"):
        kind_for("triton")


def test_demanding_triton_on_a_plain_cpu_is_an_error(fresh: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(UnsupportedError, match="leave backend at 'auto'"):
        AdamW([p], backend="triton").step()
    with pytest.raises(ConfigError, match="'auto', 'reference', 'triton'"):
        AdamW([p], backend="cuda")


def test_triton_is_imported_by_nobody_who_does_not_run_it():
    code = "import sys, halfstep; assert not any(m.split('.')[0] == 'triton' for m in sys.modules)"
    assert run("-c", code).returncode == 0


def test_launches_on_cuda_switch_fused_arithmetic_off(monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, object]] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    kernel = {(3,): lambda *args, **options: seen.append(options)}
    cuda.launch(kernel, torch.device("cuda"), 3, TILE=1024)
    assert seen == [{"TILE": 1024, "num_warps": 4, "enable_fp_fusion": False}]
