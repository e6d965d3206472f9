"""Ops and arguments for autocast tests: the lists PyTorch tests its own CPU and CUDA autocast with."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists


@dataclass(frozen=True)
class Sample:
    name: str
    call: Callable[[], Any]
    args: tuple[Any, ...]

    @property
    def op(self) -> str:
        return {"__matmul__": "matmul", "__pow__": "pow"}.get(self.name, self.name)


def _function(name: str, group: str) -> Callable[..., Any] | None:
    homes = (torch._C._nn, torch) if group.startswith("nn_") else (torch, torch._C._nn, torch._C._linalg)
    if group.startswith("methods"):
        homes = (torch.Tensor,)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


def _quietly(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using torch.cross without specifying")
        return fn(*args, **kwargs)


def _samples(lists: object) -> list[Sample]:
    found: list[Sample] = []
    for group, rows in vars(lists).items():
        for name, *rest in rows if isinstance(rows, list) else ():
            fn = _function(name, group)
            if fn is None or name.startswith(("cudnn_", "einsum", "chain_matmul")):
                continue
            # A second argument may be keywords.
            args = rest[0] if isinstance(rest[0], tuple) else tuple(rest)
            kwargs = rest[1] if len(rest) > 1 and isinstance(rest[1], dict) else {}
            found.append(Sample(name, partial(_quietly, fn, args, kwargs), args))
    return found


def cpu_samples() -> list[Sample]:
    torch.manual_seed(0)
    return _samples(AutocastCPUTestLists(torch.device("cpu")))


def cuda_samples(device: str = "cpu") -> list[Sample]:
    torch.manual_seed(0)
    return _samples(AutocastTestLists(device))


def tensors(result: Any) -> list[torch.Tensor]:
    return [
        t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)
    ]


def outcome(call: Callable[[], Any]) -> list[torch.Tensor] | type[Exception]:
    """The tensors an op returns, or the type of what it raises."""
    try:
        return tensors(call())
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return type(error)
