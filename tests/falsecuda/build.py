"""Builds the false CUDA device: one shared library, kept under `build/` by what it is made of.

Several processes may ask at once (workers of a parallel test run): a file lock lets one of them compile.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = ("-O0", "-std=c++20", "-fPIC", "-shared", "-w")


def pinned_torch() -> str:
    """The version of torch in pins.txt, for which alone the device is written."""
    lines = (ROOT / "pins.txt").read_text().splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


def missing() -> str:
    """Why the device cannot be built here, in a sentence; empty where it can."""
    if sys.platform != "linux":
        return "the false CUDA device is for Linux"
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return "torch is not installed"
    if installed.split("+")[0] != pinned_torch():
        return f"the false CUDA device is for torch {pinned_torch()}, and here is {installed}"
    if (Path(_torch_folder()) / "lib" / "libtorch_cuda.so").exists():
        return "this torch has a CUDA of its own"
    return (
        "" if _compiler() else "the false CUDA device needs a C++ compiler (g++ or clang++), and here is none"
    )


def library() -> Path:
    """The path of the library, compiled first where it is not there yet (about 15 s)."""
    problem = missing()
    if problem:
        raise RuntimeError(problem)
    sources = sorted((HERE / "native").iterdir())
    facts = [version("torch"), sys.version, *FLAGS, *(source.read_text() for source in sources)]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    path = ROOT / "build" / f"libfalsecuda-{digest}.so"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    with open(path.with_name("libfalsecuda.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    torch, part = _torch_folder(), path.with_suffix(".part")
    include, lib = f"{torch}/include", f"{torch}/lib"
    folders = (f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{lib}", f"-Wl,-rpath,{lib}")
    source = HERE / "native" / "falsecuda.cpp"
    command = (_compiler(), *FLAGS, *folders, str(source), "-ltorch_cpu", "-lc10", "-o", str(part))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:4000]}")
    os.replace(part, path)


def _compiler() -> str:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++") or ""


def _torch_folder() -> str:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent)


if __name__ == "__main__":
    print(library())
