"""Time and memory of what surrounds the steps of a large model: prepare, save, load; beside torch's own.

    python benchmarks/large.py [--parameters 4e8] [--rows NAME ...] [--rounds 3] [--out FILE]

Each row is a process of its own, and each act in it is measured by the clock, by the processor time that it
took, and by the kernel's count of resident memory (`VmHWM`, reset before the act): bytes at rest before the
act, the peak during it, bytes at rest after it, all in GiB. Acts that are compared take turns: `prepare`
and `model.bfloat16()`; saving and writing as many bytes with a checksum; loading and reading them with one.
The model is a stack of square layers, so that its largest tensor is a small part of it. Linux only. Writes
large_400m.json, say.
"""

import argparse
import ctypes
import gc
import hashlib
import json
import os
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


def measured(act: Callable[[], Any]) -> dict[str, float]:
    """Seconds of an act, by the clock and of the processor; resident GiB before, at the peak and after."""
    reset_peak()
    before, cpu, began = resident("VmRSS"), time.process_time(), time.perf_counter()
    act()
    row = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "before": before}
    row["peak"] = resident("VmHWM")
    reset_peak()
    return {**row, "after": resident("VmRSS")}


def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}


def medians(rounds: int, **acts: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """The median of each number of several acts that take turns."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            rows[name].append(measured(act))
    return {name: median_of(found) for name, found in rows.items()}


def model_of(parameters: float) -> nn.Module:
    """A stack of layers with the same weights, which are quickly made."""
    count, values = max(1, round(parameters / WIDTH**2)), torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    layers = [nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(count)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(values)
    return nn.Sequential(*layers)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_with_checksum(folder: Path) -> None:
    for path in files_in(folder):
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256")


def write_with_checksum(like: Path, folder: Path) -> None:
    """Write as many bytes as a folder holds into another one, which then replaces what has its name."""
    part, new = memoryview(os.urandom(1 << 20)), folder.with_name("new")
    new.mkdir()
    for path in files_in(like):
        digest, left = hashlib.sha256(), path.stat().st_size
        with open(new / path.name, "wb") as file:
            while left:
                chunk = part[: min(left, len(part))]
                digest.update(chunk)
                left -= file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


class Run:
    """One row: a model, its optimizer and, with halfstep, the session."""

    def __init__(self, row: str, parameters: float) -> None:
        self.level, self.kind = row.split() if row.startswith("O") else ("torch", "torch")
        self.parameters, self.x = parameters, torch.randn(8, WIDTH)
        self.build()

    def build(self) -> None:
        """Begin anew."""
        self.model = self.optimizer = self.amp = None
        torch.manual_seed(0)
        self.model = model_of(self.parameters)
        if self.kind == "torch":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        else:
            self.optimizer = hs.optim.AdamW(self.model.parameters(), state_dtype=self.kind)

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

    def acts(self, folder: Path, rounds: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.level != "torch":
            for _ in range(rounds):
                for name in ("model.bfloat16()", "prepare"):
                    self.build()
                    act = self.prepare if name == "prepare" else self.model.bfloat16
                    found.setdefault(name, []).append(measured(act))
            found = {name: median_of(rows) for name, rows in found.items()}
        found |= medians(1, **{"first step": self.step})
        found |= medians(rounds, step=self.step)
        saved, copy = folder / "saved", folder / "copy"
        for name, (write, read) in self._ways(saved).items():
            shutil.rmtree(saved, ignore_errors=True)
            saved.mkdir()
            beside = {f"write as much as {name}": lambda: write_with_checksum(saved, copy)}
            found |= medians(rounds, **{f"save by {name}": write}, **beside)
            found[f"save by {name}"]["bytes"] = sum(path.stat().st_size for path in files_in(saved))
            beside = {f"read what {name} wrote": lambda: read_with_checksum(saved)}
            found |= medians(rounds, **{f"load by {name}": read}, **beside)
        found |= medians(rounds, **{"step after load": self.step})
        return found

    def _ways(self, folder: Path) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
        """How to save and to load, by name."""
        if self.level != "torch":
            return {
                "halfstep": (lambda: self.amp.save(folder / "run"), lambda: self.amp.load(folder / "run"))
            }
        file, at = folder / "run.pt", folder / "dcp"

        def state() -> dict[str, Any]:
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

        def load() -> None:
            read = torch.load(file, mmap=True, weights_only=True)
            self.model.load_state_dict(read["model"])
            self.optimizer.load_state_dict(read["optimizer"])

        def save_dcp() -> None:
            shutil.rmtree(at, ignore_errors=True)
            dcp.save(state(), checkpoint_id=at, no_dist=True)

        def load_dcp() -> None:
            dcp.load(state(), checkpoint_id=at, no_dist=True)

        return {"torch.save": (lambda: torch.save(state(), file), load), "dcp": (save_dcp, load_dcp)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=4e8)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: this machine's folder in results/")
    parser.add_argument("--row", help="only this, in this process")
    given = parser.parse_args()
    if given.row:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(Run(given.row, given.parameters).acts(Path(folder), given.rounds)))
        return
    count = sum(p.numel() for p in model_of(given.parameters).parameters())
    found: dict[str, Any] = {"parameters": count, "fp32_gib": round(count * 4 / GIB, 2)}
    for row in given.rows:
        options = ["--parameters", str(given.parameters), "--rounds", str(given.rounds), "--row", row]
        done = subprocess.run(
            [sys.executable, __file__, *options], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{row}: {done.stderr[-2000:]}")
        found[row] = {**json.loads(done.stdout.splitlines()[-1]), "load_average": os.getloadavg()[0]}
        for act, numbers in found[row].items():
            print(f"{row:12s} {act:28s} {json.dumps(numbers)}", flush=True)
    save(f"large_{given.parameters / 1e6:.0f}m", found, given.out)


if __name__ == "__main__":
    main()
