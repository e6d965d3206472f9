"""`halfstep devices`: what this machine's devices do with each dtype, and with each op under a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
import tyro

from halfstep import devices
from halfstep.cli._output import console, print_json, table
from halfstep.devices import Capability
from halfstep.formats import dtype_name

if TYPE_CHECKING:
    from rich.text import Text

_DTYPES = ("fp64", "fp32", "fp16", "bf16", "e4m3fn", "e5m2")
_STYLES = {"native": "green", "slow": "yellow", "absent": "red"}


def run(
    device: tyro.conf.Positional[str] = "",
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Show what each device here does with each dtype, how fast, and why not.

    Args:
        device: Device to show, such as cpu or cuda:0. None gives all of them.
        json: Print JSON instead of tables.
    """
    chosen = [devices.resolve(device)] if device else [torch.device(name) for name in devices.available()]
    facts = [_facts(each) for each in chosen]
    if json:
        return print_json(facts)
    for each in chosen:
        _print_device(each)
    return None


def _capabilities(device: torch.device) -> list[Capability]:
    return [devices.capability(device, name) for name in _DTYPES]


def _facts(device: torch.device) -> dict[str, object]:
    """All that is known of a device, as JSON."""
    rows = {
        dtype_name(c.dtype): {"status": c.status, "time_over_fp32": c.ratio, "why": c.why}
        for c in _capabilities(device)
    }
    return {
        "device": str(device),
        "machine": dict(devices.machine(device)),
        "default_dtype": dtype_name(devices.default_dtype(device)),
        "float32_matmul_precision": devices.float32_matmul_precision(),
        "cache": str(devices.cache_file(device)),
        "dtypes": rows,
    }


def _print_device(device: torch.device) -> None:
    facts = devices.machine(device)
    out = console()
    out.print(
        f"[bold]{device}[/]: {facts.get('cpu') or facts.get('gpu') or device.type}, torch {facts['torch']}"
    )
    rows = [_cells(c) for c in _capabilities(device)]
    out.print(table("", ("dtype", "status", "time / fp32", "why"), rows, "time / fp32"))
    dtype = devices.default_dtype(device)
    slow = " (slow here: fp32 arithmetic with rounding)" if devices.is_slow(device, dtype) else ""
    out.print(f"default dtype: {dtype_name(dtype)}{slow}")
    out.print(f"float32 matmul precision: {devices.float32_matmul_precision()} (never changed by halfstep)")
    out.print(f"measurements kept in {devices.cache_file(device)}")


def _cells(c: Capability) -> list[str | Text]:
    from rich.text import Text

    ratio = "" if c.ratio is None else f"{c.ratio:.2f}"
    return [dtype_name(c.dtype), Text(c.status, _STYLES[c.status]), ratio, c.why]
