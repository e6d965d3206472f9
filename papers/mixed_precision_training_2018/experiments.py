"""The paper's phenomena, each as a function that returns plain numbers; nothing here draws.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv 1710.03740.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from halfstep.numerics.histogram import Counts, count, what_if
from halfstep.recipes import RECIPES

from . import rescue
from .tasks import SETTINGS, TASKS, Detector, Run, dense_detector, detection_loss, load, take


def run_task(index: int, setting: str, seed: int, effort: float) -> Run:
    """Train one task once, on one thread; what a worker process is sent."""
    torch.set_num_threads(1)
    return TASKS[index].run(setting, seed, effort)


def parity(pool: Executor, seeds: int, effort: float) -> list[dict[str, Any]]:
    """Table 1 to 3 and section 4: final scores in fp32 and mixed, without and with a loss scale."""
    columns = [name for name in SETTINGS if name != "fp16 weights, no masters"]
    jobs = {
        (task, setting, seed): pool.submit(run_task, task, setting, seed, effort)
        for task in range(len(TASKS))
        for setting in columns
        for seed in range(seeds)
    }
    rows = []
    for index, task in enumerate(TASKS):
        cells = {}
        for setting in columns:
            runs = [jobs[index, setting, seed].result() for seed in range(seeds)]
            scores = [run.score for run in runs]
            cells[setting] = {
                "mean": statistics.fmean(scores),
                "spread": statistics.stdev(scores) if seeds > 1 else 0.0,
                "skipped": sum(run.skipped for run in runs),
                "diverged": sum(not math.isfinite(score) for score in scores),
            }
        about = {"task": task.name, "score": task.score, "more": task.more_is_better}
        rows.append({**about, "nothing": task.nothing, "paper": task.paper, "cells": cells})
    return rows


def pictures(pool: Executor, effort: float) -> dict[str, Any]:
    """Figure 6 and table 2, to look at: what the GAN draws and the detector finds, in fp32 and mixed."""
    columns = ("fp32", "mixed, dynamic scale")
    wanted = {"DCGAN": "generated", "detection": "found"}
    jobs = {
        (kind, setting): pool.submit(run_task, index, setting, 0, effort)
        for index, task in enumerate(TASKS)
        for word, kind in wanted.items()
        if word in task.name
        for setting in columns
    }
    return {kind: {s: jobs[kind, s].result().shown for s in columns} for kind in wanted.values()}


def language_model(pool: Executor, effort: float) -> dict[str, Any]:
    """Section 4.5 and figure 5: an LSTM language model at several loss scales."""
    steps = max(8, int(64 * effort))
    jobs = {name: pool.submit(rescue.language_model, name, steps) for name in rescue.RESCUES}
    runs = {name: job.result() for name, job in jobs.items()}
    return {
        "curves": {name: rescue.smooth(run["losses"]) for name, run in runs.items()},
        "final": {name: run["final"] for name, run in runs.items()},
        "flushed": {name: run["flushed"] for name, run in runs.items()},
        "micro_batches": rescue.MICRO_BATCHES,
    }


def rescued_detector(pool: Executor, effort: float) -> dict[str, Any]:
    """Section 4.2: a detector that falls behind without a scale."""
    steps = max(8, int(96 * effort))
    jobs = {name: pool.submit(dense_detector, how, steps) for name, how in rescue.RESCUES.items()}
    runs = {name: job.result() for name, job in jobs.items()}
    return {
        "curves": {name: rescue.smooth(run["losses"], 24) for name, run in runs.items()},
        "final": {name: statistics.fmean(run["losses"][-8:]) for name, run in runs.items()},
        "score": {name: run["score"] for name, run in runs.items()},
    }


def sums_in_training(pool: Executor, effort: float) -> dict[str, Any]:
    """Section 3.3, in training: products that sum in fp16; and the machine's fp16 beside rounded fp32."""
    steps = max(8, int(120 * effort))
    jobs = {name: pool.submit(rescue.train_with_sums, name, steps) for name in rescue.SUMS}
    apart = pool.submit(rescue.native_and_pseudo, steps)
    runs = {name: job.result() for name, job in jobs.items()}
    return {
        "curves": {name: rescue.smooth(run["losses"]) for name, run in runs.items()},
        "accuracy": {name: run["accuracy"] for name, run in runs.items()},
        "native and pseudo": apart.result(),
    }


def masters(pool: Executor, seeds: int, effort: float) -> dict[str, Any]:
    """Figure 2a: training curves with and without fp32 masters, both with a loss scale."""
    index = next(i for i, task in enumerate(TASKS) if "faint" in task.name)
    columns = ("fp32", "mixed, dynamic scale", "fp16 weights, no masters")
    jobs = {(s, n): pool.submit(run_task, index, s, n, effort) for s in columns for n in range(seeds)}
    runs = {s: [jobs[s, n].result() for n in range(seeds)] for s in columns}
    final = {s: statistics.fmean(run.score for run in runs[s]) for s in columns}
    start = statistics.fmean(run.losses[0] for run in runs["fp32"])
    return {
        "task": TASKS[index].name,
        "curves": {s: _smooth(np.mean([run.losses for run in runs[s]], axis=0)) for s in columns},
        "final": final,
        "start": start,
        # How much worse the loss ends, relative to fp32, as the paper puts it (80 % in its speech model).
        "relative_loss": {s: final[s] / final["fp32"] - 1 for s in columns},
        "skipped": {s: sum(run.skipped for run in runs[s]) for s in columns},
    }


def _smooth(losses: np.ndarray, points: int = 60) -> list[tuple[int, float]]:
    edges = np.linspace(0, len(losses), min(points, len(losses)) + 1).astype(int)
    return [(int(b), float(np.mean(losses[a:b]))) for a, b in pairwise(edges) if b > a]


def weight_gradients(lengths: Mapping[str, float], effort: float) -> list[dict[str, Any]]:
    """Figure 2b: exponents of the weight gradients over an fp32 training, and what fp16 makes of them.

    `lengths`: recipe to how many times its usual number of steps.
    """
    return [_weight_gradients(name, length * effort) for name, length in lengths.items()]


def _weight_gradients(name: str, effort: float) -> dict[str, Any]:
    chosen = RECIPES[name]
    model, optimizer = chosen.build(0)
    total: Counts | None = None
    steps = max(4, int(chosen.demo_steps * effort))
    flushed = dict.fromkeys((0, 3, 10, 16), 0.0)
    by_step: list[tuple[int, float]] = []
    seen = 0
    for step, (x, y) in enumerate(take(steps, chosen.task().train(0))):
        optimizer.zero_grad()
        chosen.loss(model(x), y).backward()
        if step % max(1, steps // 10) == 0:
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            here = count(gradients)
            total = here if total is None else total + here
            by_step.append((step, _share_below(here)))
            seen += 1
            for bits in flushed:
                flushed[bits] += what_if(gradients, "fp16", bits).flushed
        optimizer.step()
    assert total is not None
    histogram = total.read()
    return {
        "name": name,
        "steps": steps,
        "below_by_step": by_step,
        "lowest": histogram.lowest,
        "exponents": list(histogram.exponents),
        "zeros": histogram.zeros,
        "total": histogram.total,
        "below_2^-24": _share_below(total),
        "flushed_by_scale": {str(2**bits): share / seen for bits, share in flushed.items()},
    }


def _share_below(counts: Counts) -> float:
    """The share of the values that are not zero whose exponent lies below -24."""
    histogram = counts.read()
    below = sum(histogram.exponents[: max(0, -24 - histogram.lowest)])
    return below / max(1, histogram.total - histogram.zeros)


def activation_gradients(effort: float) -> dict[str, Any]:
    """Figure 3: exponents of the activation gradients of the detector, and what a scale rescues from zero."""
    torch.manual_seed(0)
    training, _ = load("digits", 48, max(64, int(1024 * effort)))
    model = Detector(10, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    caught: list[torch.Tensor] = []

    def catch(_module: nn.Module, _inputs: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: caught.append(gradient.detach()))

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.SiLU):
            module.register_forward_hook(catch)
    total: Counts | None = None
    scales = (1, 8, 1024, 65536)
    flushed, overflow, seen = dict.fromkeys(scales, 0.0), dict.fromkeys(scales, 0.0), 0
    order = np.random.default_rng(0)
    steps = max(4, int(120 * effort))
    for step in range(steps):
        x, y = training.batch(order.integers(len(training), size=32))
        caught.clear()
        optimizer.zero_grad()
        detection_loss(model(x), y)[0].backward()
        if step % max(1, steps // 8) == 0:
            flat = torch.cat([g.flatten() for g in caught])
            total = count(flat) if total is None else total + count(flat)
            seen += 1
            for scale in scales:
                stored = what_if(flat, "fp16", int(math.log2(scale)))
                flushed[scale] += stored.flushed
                overflow[scale] += stored.overflow
        optimizer.step()
    assert total is not None
    histogram = total.read()
    top = histogram.max_exponent
    return {
        "lowest": histogram.lowest,
        "exponents": list(histogram.exponents),
        "zeros": histogram.zeros,
        "total": histogram.total,
        "max_exponent": top,
        "unused_binades": None if top is None else 15 - top,
        "flushed_by_scale": {str(s): share / seen for s, share in flushed.items()},
        "overflow_by_scale": {str(s): share / seen for s, share in overflow.items()},
    }


def lost_updates() -> list[dict[str, Any]]:
    """Section 3.1: a weight at a power of two, plus or minus weight/ratio, rounded to fp16: does it move?"""
    rows = []
    for ratio in (512, 1024, 2047, 2048, 2049, 4095, 4096, 4097, 8192):
        moved = {"plus": 0, "minus": 0}
        exponents = range(-8, 9)
        for exponent in exponents:
            weight = torch.tensor(2.0**exponent, dtype=torch.float64)
            for sign, name in ((1, "plus"), (-1, "minus")):
                after = (weight + sign * weight / ratio).half().double()
                moved[name] += int(after != weight)
        rows.append({"ratio": ratio, **{name: n / len(exponents) for name, n in moved.items()}})
    return rows


def accumulation(lengths: Sequence[int] = (16, 64, 256, 1024, 4096, 16384)) -> list[dict[str, Any]]:
    """Section 3.3: dot products of fp16 vectors, accumulated in fp16 and in fp32, against float64."""
    rng = np.random.default_rng(0)
    rows = []
    for length in lengths:
        errors: dict[str, list[float]] = {"fp16": [], "fp32": []}
        for _ in range(32):
            a, b = (np.abs(rng.standard_normal(length)).astype(np.float16) for _ in range(2))
            exact = float(np.dot(a.astype(np.float64), b.astype(np.float64)))
            low = float(np.add.accumulate(a * b, dtype=np.float16)[-1])
            products = a.astype(np.float32) * b.astype(np.float32)
            wide = float(np.float16(np.add.accumulate(products, dtype=np.float32)[-1]))
            errors["fp16"].append(abs(low - exact) / exact)
            errors["fp32"].append(abs(wide - exact) / exact)
        rows.append({"length": length, **{name: statistics.median(e) for name, e in errors.items()}})
    return rows


def format_facts() -> dict[str, float]:
    """Numbers the paper leans on, computed from torch's own casts."""
    half = torch.finfo(torch.float16)
    tiny = torch.tensor([2.0**-25, 2.0**-25 * (1 + 2.0**-20), 2.0**-24], dtype=torch.float64).half().double()
    return {
        "fp16 largest": half.max,
        "fp16 smallest subnormal": half.smallest_normal * half.eps,
        "2^-25 becomes": tiny[0].item(),
        "just above 2^-25 becomes": tiny[1].item(),
        "2^-24 becomes": tiny[2].item(),
    }
