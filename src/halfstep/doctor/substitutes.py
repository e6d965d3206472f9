"""Cures put in place in a copy of a run, which ends with the trial: nothing here is undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.numerics.cures import placed
from halfstep.numerics.fault import Spec
from halfstep.numerics.participants import StepParticipants

#: What `torch.float16` is outside of a trial in which scripts get bf16 by that name.
FP16 = torch.float16


def put_in_place(spec: Spec, parts: StepParticipants, stack: ExitStack) -> Callable[[], bool] | None:
    """Apply the dose of a cure from here on; None where it cannot be from outside.

    What is returned says, later, whether the cure has met what it is to change.
    """
    if spec[0] == "masters":
        return (lambda: True) if _masters(parts) else None
    cure = placed(spec, parts)
    if cure is None:
        return None
    if spec[0] == "bf16":
        ask_for_bf16(stack)
    stack.enter_context(cure)
    return lambda: getattr(cure, "met", True)


def _masters(parts: StepParticipants) -> bool:
    """Level O2 around a model that is in 16 bits already: its weights become the 16-bit halves of masters."""
    from halfstep.session.prepare import prepare

    dtype = next((p.dtype for p in parts.parameters() if p.dtype in (torch.float16, torch.bfloat16)), None)
    if dtype is None or parts.session is not None or not parts.models or not parts.optimizers:
        return False
    prepare(parts.models, parts.optimizers, level="O2", dtype=dtype, loss_scale="none")
    return True


def ask_for_bf16(stack: ExitStack) -> None:
    """Until `stack` closes, a script that asks for fp16 gets bf16: by name, method, region or `prepare`."""
    import halfstep

    half, bf16 = FP16, torch.bfloat16

    def put(owner: Any, name: str, value: Any) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def narrowed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.get("dtype")
            if wanted is half or str(wanted) in ("fp16", "float16", "half"):
                kwargs["dtype"] = bf16
            if str(kwargs.get("level", "")).startswith("fp16") or str(kwargs.get("level", "")).startswith(
                "16"
            ):
                kwargs["level"] = "bf16" + str(kwargs["level"])[str(kwargs["level"]).find("-") :]
            return function(*args, **kwargs)

        return call

    for name in ("float16", "half"):
        put(torch, name, bf16)
    put(Tensor, "half", Tensor.bfloat16)
    put(nn.Module, "half", nn.Module.bfloat16)
    set_dtype = torch.set_autocast_dtype

    def autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, bf16 if dtype == half else dtype)

    put(torch, "set_autocast_dtype", autocast_dtype)
    for name in ("prepare", "convert", "to_float"):
        if hasattr(halfstep, name):
            put(halfstep, name, narrowed(getattr(halfstep, name)))
