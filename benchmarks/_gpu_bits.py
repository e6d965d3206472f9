"""Parts of gpu.py that say whether it is right: the machine, one step of each kind, bits, tests."""

import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gpu import DEVICE, TINY, failed, row
from torch import nn

import halfstep as hs
from halfstep.kernels.cuda import launch as cuda

ROOT = Path(__file__).parents[1]
PEERS = ("flashoptim", "torchao", "bitsandbytes", "apex", "transformer_engine")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = ((BF16, "exact"), (FP32, None), (FP16, "exact"), (BF16, "fp32"), (BF16, "stochastic"), (FP16, "fp32"))
SMOKE = ((BF16, "exact", "fp32"), (BF16, "exact", "8bit"), (FP16, "exact", "bf16"), (FP32, None, "fp32"))
SAME = "the reference's bits"


def facts() -> None:
    """The machine, what keeps kernels from running on it, the peers that are installed."""
    row("machine", machine)
    row("what keeps kernels from running (empty: nothing)", lambda: cuda.why_not(DEVICE))
    row("peers installed", lambda: [name for name in PEERS if find_spec(name)])
    row("capabilities", lambda: {name: str(hs.devices.capability(DEVICE, name)) for name in ("bf16", "fp16")})


def machine() -> dict[str, Any]:
    """The GPU, its driver and clocks, the processor, the versions."""
    query = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,ecc.mode.current"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    smi = (
        shutil.which("nvidia-smi") and subprocess.run(command, capture_output=True, text=True).stdout.strip()
    )
    properties = torch.cuda.get_device_properties(DEVICE)
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return {
        "gpu": torch.cuda.get_device_name(DEVICE),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "nvidia-smi": smi,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__ if find_spec("triton") else None,
        "numpy": np.__version__,
        "cpu": next((line.split(":")[1].strip() for line in names if line.startswith("model name")), ""),
        "cpus": os.cpu_count(),
        "rehearsal": TINY,
        "has": [name for name in ("gcc", "clang", "make", "ncu", "compute-sanitizer") if shutil.which(name)],
    }


def smoke() -> None:
    """Some of each kind against the reference, and whole sessions: whether anything of ours runs at all."""
    for dtype, master, states in SMOKE:
        row(
            f"bits, {_name(dtype)} {master} {states}", lambda d=dtype, m=master, s=states: compare(d, m, s, 0)
        )
    for level in ("O1", "O2"):
        for dtype in ("bf16", "fp16"):
            row(f"losses, {level} {dtype}", lambda v=level, d=dtype: losses(v, d))


def bits() -> None:
    """Three steps of each kind, the second skipped: the kernels' weights and states are the reference's."""
    for dtype, master in KINDS[: 1 if TINY else None]:
        for states in ("fp32", "bf16", "8bit"):
            for shift in (3,) if TINY else (0, 3):
                name = f"{_name(dtype)} {master} {states}, {shift} elements off alignment"
                row(name, lambda d=dtype, m=master, s=states, n=shift: compare(d, m, s, n))
    for name in ("Lion",) if TINY else ("Lion", "Adam"):
        row(f"{name} bfloat16 exact 8bit", lambda n=name: compare(BF16, "exact", "8bit", 0, n))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare(dtype: torch.dtype, master: str | None, states: str, shift: int, name: str = "AdamW") -> Any:
    """Whether kernels and reference end with the same bits; else which tensors differ."""
    ours, plain = (three_steps(kind, dtype, master, states, shift, name) for kind in ("triton", "reference"))
    wrong = [i for i, (a, b) in enumerate(zip(ours, plain, strict=True)) if not torch.equal(a, b)]
    return {"error": f"{len(wrong)} of {len(ours)} tensors differ: {wrong[:20]}"} if wrong else SAME


def three_steps(
    backend: str, dtype: torch.dtype, master: str | None, states: str, shift: int, name: str
) -> list[torch.Tensor]:
    """The bytes of weights and states after three steps; weights begin `shift` elements into their memory."""
    made, params = torch.Generator().manual_seed(1), []
    for shape in ((3, 70), (7,)) if TINY else ((3, 768), (40, 100), (7,), (2, 2048), (1, 33000)):
        values = (torch.randn(torch.Size(shape).numel() + shift, generator=made) * 0.02).to(DEVICE, dtype)
        params.append(nn.Parameter(values[shift:].view(shape)))
    optimizer = getattr(hs.optim, name)(params, lr=1e-2, master=master, state_dtype=states, backend=backend)
    half = torch.full((), 0.5, device=DEVICE)
    for step in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=made).to(DEVICE, dtype)
        optimizer.measure(half)
        optimizer.step(inv_scale=half, clip_coef=0.7, found_inf=torch.full((), step == 1, device=DEVICE))
    kept = [*params, *(value for p in params for value in optimizer.state[p].values())]
    return [t.detach().flatten().view(torch.uint8) for t in kept]


def losses(level: str, dtype: str) -> list[float]:
    """Of eight steps of a small network, which fall."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10)).to(DEVICE)
    amp = hs.prepare(net, hs.optim.AdamW(net.parameters(), lr=1e-2), level=level, dtype=dtype)
    x, y = torch.randn(128, 64, device=DEVICE), torch.randint(0, 10, (128,), device=DEVICE)
    seen: list[torch.Tensor] = []
    for _ in range(3 if TINY else 8):
        with amp.autocast():
            loss = nn.functional.cross_entropy(net(x), y)
        amp.backward(loss)
        amp.step(clip_norm=1.0)
        seen.append(loss.detach())
    values = [round(value, 4) for value in torch.stack(seen).tolist()]
    assert values[-1] < values[0], f"losses do not fall: {values}"
    return values


def tests() -> None:
    """The tests of tests/gpu, a process for each file; eight at once where pytest-xdist is."""
    for name in ("numerics",) if TINY else ("step", "training", "numerics", "kernels", "numbers"):
        value = row(f"tests/gpu/test_{name}.py", lambda n=name: run_tests(n))
        if failed(value) and "is not installed" in value["error"]:
            return


def run_tests(name: str) -> dict[str, Any]:
    """What pytest says of a file; only halfstep's own warnings are errors."""
    if find_spec("pytest") is None:
        return {"error": "pytest is not installed: pip install pytest pytest-xdist"}
    quiet = ("-p", "no:cacheprovider", "--confcutdir=tests", "--tb=short", "-W", "ignore")
    ours = ("-W", "error::halfstep.HalfstepWarning", "-m", "not exhaustive and not long")
    many = ("-n", "8") if find_spec("xdist") and not TINY else ()
    command = [sys.executable, "-m", "pytest", *quiet, *ours, *many, f"tests/gpu/test_{name}.py"]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process, lines = subprocess.Popen(command, cwd=ROOT, **pipe), list[str]()
    for line in process.stdout or ():  # at once into the log: the part may be stopped
        print(line, end="", flush=True)
        lines.append(line.strip())
    code = process.wait()
    red = [line[:160] for line in lines if line.startswith(("FAILED", "ERROR"))]
    value = {"pytest": lines[-1:], "red": red[:30]}
    return {**value, "error": f"pytest ended with {code}"} if code else value
