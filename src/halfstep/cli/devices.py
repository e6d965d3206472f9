"""`halfstep devices`: what this machine's devices do with each dtype, and with each op under a policy."""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.text import Text

from halfstep import devices
from halfstep.casting.context import autocast
from halfstep.casting.kernel_choice import VARIABLE, table_of
from halfstep.casting.kernel_facts import SHOWN, KernelFact, does_not_pay, kernel_facts
from halfstep.casting.kernel_probes import measurements
from halfstep.cli._options import Flag, with_metavar
from halfstep.cli._output import console, print_json, table
from halfstep.conformance.battery import GROUPS, Check, run_battery
from halfstep.conformance.probe import Observed, groups, probe_casting
from halfstep.errors import ConfigError
from halfstep.formats import dtype_name, parse_dtype
from halfstep.policy.ops import TABLES, Rule
from halfstep.policy.policy import Policy
from halfstep.ratios import number
from halfstep.tuning.op_times import without_remarks

_DTYPES = ("fp64", "fp32", "fp16", "bf16", "e4m3fn", "e5m2")
_CHECKS = {"passes": "green", "falls back": "yellow", "absent": "dim", "fails": "bold red"}
_COUNTED = {"passes": "pass", "falls back": "fall back", "absent": "absent", "fails": "fail"}
_VERDICTS = {"agrees": "", "differs": "bold red", "absent": "dim", "unsampled": "dim"}
_STYLES = {"native": "green", "slow": "yellow", "absent": "red"}


def run(
    device: tyro.conf.Positional[Annotated[str, with_metavar("[DEVICE]")]] = "",
    named: Annotated[str, with_metavar("DEVICE", name="device")] = "",
    policy: Annotated[str, with_metavar("POLICY")] = "halfstep",
    dtype: Annotated[str, with_metavar("DTYPES")] = "",
    check: Annotated[str, with_metavar("DEVICE")] = "",
    module: Annotated[str, with_metavar("MODULE")] = "",
    level: Annotated[str, with_metavar("LEVELS")] = "O1,O2",
    only: Annotated[str, with_metavar("GROUPS")] = "",
    kernels: Flag = False,
    ops: Flag = False,
    json: Flag = False,
) -> int:
    """Show how fast each device computes each dtype, and which to use. Lists are separated by commas.

    Args:
        device: Device to show, such as cpu or cuda:0. Default: all of them.
        named: The same, as other commands take it.
        policy: Op table to probe (halfstep, torch, apex, mindspore, mlu, paper) or a policy string.
        dtype: 16-bit dtype, several for --check. Default: what the device prefers; all it has for --check.
        check: Device to put through the conformance battery instead; exit code 1 if anything fails.
        module: Python module or file that brings the device up, imported first.
        level: Levels for --check.
        only: Groups of checks for --check: casting, numbers, models, scaling, masters, state. Default: all.
        kernels: Show by which kernels a CPU runs each kind of op, and why.
        ops: Show what a region does with each op; --policy and --dtype show it too.
        json: Print JSON instead of tables: all of it.
    """
    if named not in ("", device) and device:
        raise ConfigError(f"two devices were given, {device} and --device {named}: give one, or none for all")
    device = device or named
    if module:
        _bring_up(module)
    if check:
        return _check(check, level, dtype, policy, only, json)
    probed = json or ops or bool(dtype) or policy != "halfstep"
    chosen = [devices.resolve(device)] if device else [torch.device(name) for name in devices.available()]
    documents = []
    for each in chosen:
        facts = _facts(each)
        observations = _probe(each, policy, dtype) if probed else []
        ways = _kernels(each, dtype) if json or kernels else []
        if json:
            lists = {"ops": [asdict(op) for op in observations], "kernels": [asdict(way) for way in ways]}
            documents.append(facts | lists)
            continue
        _print_device(each, facts)
        if kernels:
            _print_kernels(each, ways)
        if probed:
            _print_ops(each, observations)
    if not (probed or kernels):
        console().print("more: --kernels (by which a CPU runs each op), --ops (what a region does with each)")
    if json:
        print_json(documents)
    return 0


def _bring_up(module: str) -> None:
    """Import a vendor's module by its dotted name (from the present folder too) or by its path."""
    path = Path(module)
    in_file = path.suffix == ".py"
    if in_file and not path.exists():
        raise ConfigError(f"--module {module!r}: no such file")
    folder = str(path.resolve().parent if in_file else Path.cwd())
    sys.path.insert(0, folder)
    try:
        importlib.import_module(path.stem if in_file else module)
    except Exception as error:
        message = (str(error).splitlines() or ["no message"])[0]
        raise ConfigError(
            f"--module {module!r} cannot be imported: {type(error).__name__}: {message}; "
            "give a dotted name or a file that python can import"
        ) from error
    finally:  # what lies beside it is found first while it is imported, and after all others from then on
        sys.path.remove(folder)
        sys.path.append(folder)


def _check(device: str, levels: str, dtypes: str, policy: str, only: str, json: bool) -> int:
    """Run the conformance battery; return 0 where nothing fails, 1 otherwise."""
    with without_remarks():
        dtype_names = dtypes.split(",") if dtypes else None
        checks = list(
            run_battery(device, levels.split(","), dtype_names, policy, only.split(",") if only else GROUPS)
        )
    if json:
        print_json([asdict(c) for c in checks])
    else:
        _print_checks(device, checks)
    return int(any(c.status == "fails" for c in checks))


def _print_checks(device: str, checks: list[Check]) -> None:
    out = console()
    casting = [c for c in checks if c.group == "casting"]
    shown = [c for c in checks if c.group != "casting" or c.status == "fails"]
    rows = [(c.group, c.name, Text(c.status, _CHECKS[c.status]), c.detail) for c in shown]
    out.print(table(f"Conformance of {device}", ("group", "check", "result", "detail"), rows, keys=2))
    for status in ("falls back", "absent"):
        if names := ", ".join(dict.fromkeys(c.name for c in casting if c.status == status)):
            out.print(f"casting {status}: {names}")
    counts = Counter(c.status for c in checks)
    out.print(", ".join(f"{counts[status]} {_COUNTED[status]}" for status in _CHECKS if counts[status]))
    if failed := [c.name for c in checks if c.status == "fails"]:
        out.print(f"[bold red]{device} does not conform:[/] {', '.join(failed)}")
    else:
        out.print(f"[green]{device} conforms[/]")


def _probe(device: torch.device, text: str, dtype: str) -> list[Observed]:
    """Return what a region of ours does on `device` with every op of the table."""
    named = Policy.parse(text)
    low = parse_dtype(dtype) if dtype else devices.default_dtype(device)
    policy = named.with_dtype(low) if dtype or text in TABLES else named
    rows = policy.rows(device.type)
    compute = policy.compute_dtype
    devices.check_dtype(device, compute)
    with without_remarks():
        return list(
            probe_casting(device, compute, rows, lambda: autocast(device.type, policy=policy)).values()
        )


def _facts(device: torch.device) -> dict[str, Any]:
    """Return all that is known of a device, as JSON."""
    capabilities = {name: devices.capability(device, name) for name in _DTYPES}
    return {
        "device": str(device),
        "machine": dict(devices.machine(device)),
        "default_dtype": dtype_name(devices.default_dtype(device)),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cache": str(devices.cache_file(device)),
        "dtypes": {
            n: {"status": c.status, "time_over_fp32": c.ratio, "why": c.why} for n, c in capabilities.items()
        },
    }


def _print_device(device: torch.device, facts: dict[str, Any]) -> None:
    machine, dtype, out = facts["machine"], facts["default_dtype"], console()
    name = machine.get("cpu") or machine.get("gpu") or device.type
    out.print(f"[bold]{device}[/]: {name}, torch {machine['torch']}")
    rows = [
        (
            name,
            Text(entry["status"], _STYLES[entry["status"]]),
            number(entry["time_over_fp32"], "{:.2f}"),
            entry["why"],
        )
        for name, entry in facts["dtypes"].items()
    ]
    out.print(table("", ("dtype", "status", "time / fp32", "why"), rows, "time / fp32"))
    slow = devices.is_slow(device, dtype)
    gain = "memory alone: it is slow here, fp32 arithmetic with rounding" if slow else "speed and memory"
    out.print(f"use {dtype}, for {gain}; `halfstep tune` and level='auto' measure a model")
    for low in ("bf16", "fp16") if device.type == "cpu" else ():
        if warning := does_not_pay(measurements.lookup(), low, torch.get_num_threads()):
            out.print(warning, markup=False, highlight=False)
    precision = facts["float32_matmul_precision"]
    out.print(f"fp32 matmul precision {precision} (halfstep never changes it); measured in {facts['cache']}")


def _kernels(device: torch.device, dtype: str) -> list[KernelFact]:
    """Return how each kind of LOW op runs on this machine; only CPUs have a choice."""
    if device.type != "cpu":
        return []
    dtypes = [parse_dtype(dtype)] if dtype else [torch.bfloat16, torch.float16]
    return [f for d in dtypes if d.itemsize == 2 for f in kernel_facts(table_of(), d, measurements.times)]


def _print_kernels(device: torch.device, ways: list[KernelFact]) -> None:
    if not ways:
        return
    rows: dict[tuple[str, str, str], list[KernelFact]] = {}
    for way in ways:
        if way.size == SHOWN:
            rows.setdefault((way.op, way.geometry, way.dtype), []).append(way)
    cells = [
        [*key, *(_way(f) for f in facts), *[""] * (3 - len(facts)), facts[0].why]
        for key, facts in rows.items()
    ]
    columns = ("op", "kind", "dtype", "forward", "to input", "to weight", "why")
    out = console()
    out.print(table(f"By which kernels {device} runs each op (time / fp32)", columns, cells, keys=3))
    source = "measured on this machine" if table_of().measures else f"by {os.environ.get(VARIABLE)}"
    out.print(f"kernels: {source}; {VARIABLE} or kernels= name others (measured, native, rounded, a file)")


def _way(f: KernelFact) -> str:
    """Return what native takes, and where another way is taken, what that takes."""
    if f.taken is None:
        return f.implementation
    if f.implementation == "native":
        return f"{f.taken:.2f} native"
    before = "far more" if f.native is None else f"{f.native:.2f}"
    return f"{before} → {f.taken:.2f} {f.implementation.replace('_', ' ')}"


def _print_ops(device: torch.device, observations: list[Observed]) -> None:
    out = console()
    rows = [
        [o.rule.value, _names(o.given), _names(o.compute), _names((o.output,)), _verdict(o), ", ".join(names)]
        for o, names in groups(observations)
    ]
    columns = ("rule", "given", "computes in", "gives", "observed", "ops")
    out.print(table(f"What a region does with each op on {device}", columns, rows))
    counts = Counter(o.verdict for o in observations)
    out.print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))


def _names(dtypes: tuple[torch.dtype | None, ...]) -> str:
    return "+".join(dtype_name(d) for d in dtypes if d is not None) or "-"


def _verdict(o: Observed) -> Text:
    note = f": {o.note}" if o.note and o.rule is not Rule.BANNED else ""
    return Text(o.verdict + note, _VERDICTS[o.verdict])
