"""Gives this process, or a tree of processes, a CUDA device: call `install()` before torch is imported.

The library is loaded before torch, what a CUDA build has in `torch._C` is put there before `torch.cuda` is
imported (whose own Python code then runs), and Triton's interpreter is taught the device's memory.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.falsecuda import build, control

SOURCE = build.ROOT / "src"
TESTS_DEVICE = "HALFSTEP_TESTS_DEVICE"  # where tests that say nothing of devices put their tensors


def install() -> None:
    """Install the device in this process; a second call does nothing."""
    if control.installed():
        return
    assert "torch" not in sys.modules, "install the false CUDA device before torch is imported"
    os.environ["TRITON_INTERPRET"] = "1"
    control.load(str(build.library()))
    if TESTS_DEVICE in os.environ:
        control.library().falsecuda_host_generators_too(1)
    sys.meta_path.insert(0, _Around())
    atexit.register(_let_autograd_rest)


def _let_autograd_rest() -> None:
    """Wait for autograd's threads: what they let go of after the interpreter's end aborts Python 3.11."""
    busy = True
    while busy:
        time.sleep(0.001)
        tasks = [t for t in Path("/proc/self/task").iterdir() if "autograd" in (t / "comm").read_text()]
        busy = any((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "R" for task in tasks)


def environment() -> dict[str, str]:
    """The environment under which every Python process has the device, its children too."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join((str(build.HERE / "site"), *filter(None, before), *map(str, (SOURCE, build.ROOT))))
    return {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "PYTEST_PLUGINS": "tests.falsecuda.plugin"}


def _before_torch_cuda() -> None:
    from tests.falsecuda import torch_cuda

    torch_cuda.provide()


def _after_torch() -> None:
    from tests.falsecuda import torch_cuda

    torch_cuda.complete()


def _before_process_groups() -> None:
    from tests.falsecuda import group

    group.provide()


def _after_capabilities() -> None:
    """A device without a time of its own says that 16-bit products take a fifth of fp32's."""
    from halfstep.devices import capabilities

    measure = capabilities._compare
    capabilities._compare = lambda device, dtype: 0.2 if device.type == "cuda" else measure(device, dtype)


def _after_tiles() -> None:
    """An interpreted op takes as long on a few elements as on many: items are one tile each."""
    from halfstep.optim.backends import triton

    triton.TILE = triton.ITEM


def _after_triton() -> None:
    from tests.falsecuda import triton_interpreter

    triton_interpreter.teach()


Step = Callable[[], None] | None
STEPS: dict[str, tuple[Step, Step]] = {
    "torch": (None, _after_torch),
    "torch.cuda": (_before_torch_cuda, None),
    "torch.distributed.distributed_c10d": (_before_process_groups, None),
    "halfstep.devices.capabilities": (None, _after_capabilities),
    "halfstep.optim.backends.triton": (None, _after_tiles),
    "triton.runtime.interpreter": (None, _after_triton),
}


class _Around:
    """Finds the modules that need something done before or after they are executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in STEPS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        before, after = STEPS[name]
        execute: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if before is not None:
                before()
            execute(module)
            if after is not None:
                after()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
