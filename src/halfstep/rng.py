"""The random generators of a process: read, set again, wound back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch


def rewinder() -> Callable[[], None]:
    """Notes the state of Python's, numpy's and torch's generators; the result puts it back."""
    python, torch_cpu = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module: Any = torch.get_device_module(device) if device is not None else None
    states = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(torch_cpu)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        if module is not None and states is not None:
            module.set_rng_state_all(states)

    return restore


def random_state() -> dict[str, Any]:
    """Python's, torch's, numpy's (if imported) and CUDA's (if in use) generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        state["numpy"] = [
            kind,
            torch.from_numpy(cast("Any", keys).astype("int64")),
            position,
            has_gauss,
            gauss,
        ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def load_random_state(state: Mapping[str, Any]) -> None:
    """Put every generator of a `random_state` back."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.cpu().numpy().astype("uint32"), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
