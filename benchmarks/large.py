"""Time and memory of what surrounds the steps of a large model: prepare, save, load; beside torch's own.

    python benchmarks/large.py [--parameters 4e8] [--rows NAME ...] [--out FILE]

Each row is a process of its own, and each act in it is measured by the clock and by the kernel's count
of resident memory (`VmHWM`, reset before the act): bytes at rest before the act, the peak during it, bytes
at rest after it, all in GiB. The model is a stack of square layers, so that its largest tensor is a small
part of it. Linux only. Writes large.json.
"""

import argparse
import ctypes
import gc
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _machine import save
from torch import nn

import halfstep as hs

GIB = 2**30
WIDTH = 4096
ROWS = ("torch fp32", "O1 torch", "O2 torch", "O2 fp32", "O2 bf16", "O2 8bit")


def resident(field: str) -> float:
    """Resident memory in GiB: "VmRSS" now, "VmHWM" at its largest since `reset_peak`."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / GIB


def reset_peak() -> None:
    """Give freed memory back, and count the peak anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measured(act: Callable[[], Any], times: int = 1) -> dict[str, float]:
    """Median seconds of an act; resident GiB before, at the peak, after."""
    reset_peak()
    before, seconds = resident("VmRSS"), list[float]()
    for _ in range(times):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    peak = resident("VmHWM")
    reset_peak()
    rows = {"before": before, "peak": peak, "after": resident("VmRSS")}
    return {"seconds": round(statistics.median(seconds), 2), **{k: round(v, 2) for k, v in rows.items()}}


def model_of(parameters: float) -> nn.Module:
    layers = max(1, round(parameters / WIDTH**2))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def digest_of(folder: Path) -> None:
    """Read every byte below a folder, with a checksum."""
    import hashlib

    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                hashlib.file_digest(file, "sha256")


class Run:
    """One row: a model, its optimizer and, with halfstep, the session."""

    def __init__(self, row: str, parameters: float) -> None:
        self.level, kind = row.split() if row.startswith("O") else ("torch", "torch")
        torch.manual_seed(0)
        self.model = model_of(parameters)
        if kind == "torch":
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=True)
        else:
            self.optimizer = hs.optim.AdamW(self.model.parameters(), state_dtype=kind)
        self.amp: Any = None
        self.x = torch.randn(8, WIDTH)

    def prepare(self) -> None:
        self.amp = hs.prepare(self.model, self.optimizer, level=self.level, dtype="bf16")

    def step(self) -> None:
        if self.amp is None:
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        with self.amp.autocast():
            loss = self.model(self.x).float().square().mean()
        self.amp.backward(loss)
        self.amp.step(clip_norm=1.0)

    def acts(self, folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.level != "torch":
            found["prepare"] = measured(self.prepare)
        found["first steps"] = measured(self.step, 2)
        found["step"] = measured(self.step, 3)
        saved = folder / "saved"
        saves, loads = self._ways(saved)
        for name in saves:
            shutil.rmtree(saved, ignore_errors=True)
            saved.mkdir()
            found[f"save by {name}"] = measured(saves[name])
            found[f"save by {name}"]["bytes"] = sum(p.stat().st_size for p in saved.rglob("*") if p.is_file())
            found[f"load by {name}"] = measured(loads[name])
        found["read with checksum"] = measured(lambda: digest_of(saved))
        found["step after load"] = measured(self.step, 3)
        return found

    def _ways(self, folder: Path) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
        if self.level != "torch":
            at = folder / "run"
            return {"halfstep": lambda: self.amp.save(at)}, {"halfstep": lambda: self.amp.load(at)}
        file = folder / "run.pt"

        def state() -> dict[str, Any]:
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

        def load() -> None:
            read = torch.load(file, mmap=True, weights_only=True)
            self.model.load_state_dict(read["model"])
            self.optimizer.load_state_dict(read["optimizer"])

        def save_dcp() -> None:
            dcp.save(state(), checkpoint_id=folder / "dcp", no_dist=True)

        def load_dcp() -> None:
            dcp.load(state(), checkpoint_id=folder / "dcp", no_dist=True)

        saves = {"torch.save": lambda: torch.save(state(), file), "dcp": save_dcp}
        return saves, {"torch.save": load, "dcp": load_dcp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=4e8)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    parser.add_argument("--row", help="only this, in this process")
    given = parser.parse_args()
    if given.row:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(Run(given.row, given.parameters).acts(Path(folder))))
        return
    models = [model_of(given.parameters)]
    count = sum(p.numel() for p in models[0].parameters())
    found: dict[str, Any] = {"parameters": count, "fp32_gib": round(count * 4 / GIB, 2)}
    found["model.bfloat16()"] = measured(models[0].bfloat16)
    models.clear()
    for row in given.rows:
        command = [sys.executable, __file__, "--parameters", str(given.parameters), "--row", row]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{row}: {done.stderr[-2000:]}")
        found[row] = json.loads(done.stdout.splitlines()[-1])
        for act, numbers in found[row].items():
            print(f"{row:12s} {act:22s} {json.dumps(numbers)}", flush=True)
    save("large", found, given.out)


if __name__ == "__main__":
    main()
