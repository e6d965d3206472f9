"""The random generators of a process: read, set again, wound back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch


def rewinder() -> Callable[[], None]:
    """Notes the state of every generator; the result puts it back."""
    return partial(load_random_state, random_state())


def _accelerator() -> tuple[str, Any]:
    """The accelerator's name and the module that has its generators; "" and None where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    module: Any = None if device is None else torch.get_device_module(device)
    return (device.type, module) if device and hasattr(module, "get_rng_state_all") else ("", None)


def random_state() -> dict[str, Any]:
    """Python's, torch's, numpy's (if imported) and the accelerator's (if in use) generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
        bits = torch.from_numpy(cast("Any", keys).astype("int64"))
        state["numpy"] = [kind, bits, position, has_gauss, gauss]
    name, module = _accelerator()
    if module is not None and module.is_initialized():
        state[name] = module.get_rng_state_all()
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
    name, module = _accelerator()
    if name in state:
        module.set_rng_state_all([s.cpu() for s in state[name]])
