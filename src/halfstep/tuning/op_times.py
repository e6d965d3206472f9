"""Where one training step's time goes: seconds by op, direction and module, from torch's profiler.

A forward op is the outermost one that Python called; a backward op is counted under the forward op whose
gradient it is (autograd gives both the same sequence number). Casts stand apart, as the op "cast". What is
neither forward nor backward, the update and Python between ops, is the rest.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from halfstep.names import fqns

CAST = "cast"
ACCUMULATE = "accumulate gradients"

_MODULE = "halfstep module: "
_NODE = "autograd::engine::evaluate_function: "
_USER = 7
_CASTS = ("aten::_to_copy", "aten::to")

Key = tuple[str, str, str]
"""(module path, op, direction)."""


@dataclass(frozen=True)
class OpTime:
    """One op in one direction in one module, and its seconds in a step over all its calls."""

    module: str
    op: str
    direction: str
    seconds: float

    @property
    def key(self) -> Key:
        """What names the same work at another precision."""
        return self.module, self.op, self.direction


@dataclass(frozen=True)
class StepTimes:
    """The ops of a step, the longest first, and the seconds of the whole step."""

    ops: tuple[OpTime, ...]
    seconds: float

    def by_module(self) -> dict[str, float]:
        """Return seconds of each module's own ops, casts left out."""
        seconds: dict[str, float] = defaultdict(float)
        for op in self.ops:
            if op.op not in (CAST, ACCUMULATE):
                seconds[op.module] += op.seconds
        return dict(seconds)


@contextmanager
def without_remarks() -> Generator[None]:
    """Within, what torch's C++ side writes straight to file descriptor 2 is gone: no setting turns it off."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(sink)


def step_times(step: Callable[[], Any], models: Sequence[nn.Module], steps: int = 4) -> StepTimes:
    """Profile `steps` runs of `step`; each op's least time.

    Paths stand under "0.", "1." where models are many. The profiler costs a few microseconds an op, which
    the ops' own times hardly hold.
    """
    runs: list[tuple[dict[Key, float], float]] = []
    for _ in range(steps):
        # acc_events: torch 2.11 else warns where events are read.
        watched = profile(activities=_activities(models), acc_events=True)
        with _name_forwards(models), without_remarks(), watched as session:
            step()
        runs.append(_sum_events(session.events()))
    keys = {key for run, _ in runs for key in run}
    ops = [OpTime(*key, min(run.get(key, 0.0) for run, _ in runs)) for key in keys]
    ops.sort(key=lambda op: (-op.seconds, op.key))
    return StepTimes(tuple(ops), min(seconds for _, seconds in runs))


def paths_of(models: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The path of every module, without wrappers' names; with the model's number where there are several."""
    paths: dict[nn.Module, str] = {}
    for index, model in enumerate(models):
        named = dict(model.named_modules())
        public = fqns(named)
        for path, module in named.items():
            path = public[path]
            whole = ".".join(p for p in (str(index), path) if p) if len(models) > 1 else path
            paths.setdefault(module, whole)
    return paths


@contextmanager
def hook_forwards(modules: Iterable[nn.Module], before: Any, after: Any) -> Generator[None]:
    """Within, `before` and `after` are called around the forward of each module."""
    with ExitStack() as stack:
        for module in modules:
            first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            stack.callback(first.remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def _name_forwards(models: Sequence[nn.Module]) -> Generator[None]:
    """Within, every module's forward is a range of the profiler's that carries its path."""
    open_ranges: list[record_function] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        span = record_function(_MODULE + paths[module])
        span.__enter__()
        open_ranges.append(span)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    paths = paths_of(models)
    with hook_forwards(paths, enter, leave):
        yield


def _activities(models: Iterable[nn.Module]) -> list[ProfilerActivity]:
    """Return what to watch; where torch was built without the device's it would warn at each op, in 30 ms."""
    kinds = {p.device.type for model in models for p in model.parameters()}
    wanted = {ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if "cuda" in kinds else [])}
    return [*wanted & supported_activities()]


def _sum_events(events: Any) -> tuple[dict[Key, float], float]:
    """Return seconds by key, and the seconds of the step from its first event to its last."""
    seconds: dict[Key, float] = defaultdict(float)
    owners: dict[int, Key] = {}
    later: list[Any] = []
    spans = [e.time_range for e in events if not _on_device(e)]
    for event in events:
        if _on_device(event) or (event.cpu_parent is not None and not _is_span(event.cpu_parent)):
            continue
        if event.name.startswith(_NODE):
            later.append(event)
        elif not _is_span(event):
            _forward(event, seconds, owners)
    for event in later:
        _backward(event, seconds, owners)
    whole = max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0
    return seconds, whole * 1e-6


def _on_device(event: Any) -> bool:
    return event.device_type != torch.autograd.DeviceType.CPU  # pyright: ignore[reportPrivateImportUsage]


def _is_span(event: Any) -> bool:
    """Whether an event is a range set by Python (a module, the optimizer's step), not an op."""
    return event.scope == _USER


def _forward(event: Any, seconds: dict[Key, float], owners: dict[int, Key]) -> None:
    name = event.name.rpartition("::")[2]
    module = _module_of(event)
    if module is None:
        return
    casts = [e for e in _descendants(event) if e.name in _CASTS and e.cpu_parent.name not in _CASTS]
    if event.name in _CASTS:
        name, casts = CAST, []
    key = module, name, "forward"
    cast_key = module, CAST, "forward"
    for part in (event, *_descendants(event)):
        if part.sequence_nr >= 0:
            owners[part.sequence_nr] = cast_key if part.name in _CASTS else key
    spent = sum(map(_seconds, casts))
    seconds[key] += max(0.0, _seconds(event) - spent)
    if casts:
        seconds[cast_key] += spent


def _backward(event: Any, seconds: dict[Key, float], owners: Mapping[int, Key]) -> None:
    module, name, _ = owners.get(event.sequence_nr, ("", "", ""))
    if "AccumulateGrad" in event.name:
        module, name = "", ACCUMULATE
    elif not name:
        name = event.name.removeprefix(_NODE).removesuffix("0").removesuffix("Backward")
    seconds[module, name, "backward"] += _seconds(event)


def _seconds(event: Any) -> float:
    device = getattr(event, "device_time_total", 0.0)
    return (device or event.cpu_time_total) * 1e-6


def _descendants(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _descendants(child)


def _module_of(event: Any) -> str | None:
    """The innermost module around an op, "" outside all; None within what is no part of the forward pass."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(_MODULE):
            return parent.name.removeprefix(_MODULE)
        if parent.name.startswith("Optimizer."):
            return None
        parent = parent.cpu_parent
    return ""
