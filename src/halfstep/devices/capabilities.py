"""What a device can do with each dtype, how fast, and why not.

Facts come from three places: what a vendor declared for its own device, what the hardware says of itself,
and one short measurement per dtype that is kept for the process and on disk. Nothing here changes how torch
computes, except `keep_freed_memory`, which is asked for by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from halfstep.errors import ConfigError, UnsupportedError
from halfstep.formats import dtype_name, parse_dtype

Status = Literal["native", "slow", "absent"]

# Rounding inputs and outputs around fp32 arithmetic costs well under one more fp32 matmul, so a native
# kernel beyond twice fp32 is not worth running.
SLOW_RATIO = 2.0

_X86_FEATURES: Mapping[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16"),
}
_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Capability:
    """What one device does with one dtype.

    `ratio` is the time of a matrix product in `dtype` over that in fp32, None where it was declared and not
    measured or where there is no kernel. `slow` means that fp32 arithmetic with rounded inputs and output
    is the faster way to the same numbers.
    """

    device: str
    dtype: torch.dtype
    status: Status
    why: str
    ratio: float | None = None


@dataclass(frozen=True)
class Accelerator:
    """What a vendor says of a device of its own, in the words of `register`; `declare` tells dtypes alone."""

    name: str
    dtypes: tuple[torch.dtype, ...] = ()
    slow: tuple[torch.dtype, ...] = ()
    finite_check: Callable[..., None] | None = None
    update_scale: Callable[..., None] | None = None
    collective: str | Callable[..., Any] | None = None
    policy: Any = None


_declared: dict[str, Accelerator] = {}
_NOTHING = Accelerator("")
_known: dict[tuple[str, torch.dtype], Capability] = {}


def declare(
    name: str, dtypes: Sequence[str | torch.dtype], slow: Sequence[str | torch.dtype] = ()
) -> Accelerator:
    """Take a vendor's word for what device type `name` computes in, in place of measuring it.

    Raises:
        ConfigError: a dtype is not floating point, one of `slow` is not in `dtypes`, or there is none.
    """
    row = computes_in(name, dtypes, slow)
    keep(row)
    return row


def computes_in(name: str, dtypes: object, slow: object) -> Accelerator:
    """Return the arguments of `declare` as an Accelerator, once checked."""
    if not isinstance(name, str):
        raise ConfigError(f"{name!r:.60} cannot name a device: expected a word such as 'npu'")
    row = Accelerator(name, _read_dtypes("dtypes", dtypes), _read_dtypes("slow", slow))
    if not row.dtypes:
        raise ConfigError(f"dtypes={dtypes!r:.60}: {name!r} computes in none; list at least one 16-bit dtype")
    if stray := [dtype_name(d) for d in row.slow if d not in row.dtypes]:
        raise ConfigError(f"slow={stray} is not among the dtypes of {name!r}; list every dtype in dtypes=")
    return row


def keep(row: Accelerator) -> None:
    """Put a declaration in the place of what was said of its device before."""
    _declared[row.name] = row
    _known.clear()  # a question without a device may have another answer now


def declared(name: str) -> Accelerator:
    """Return the last declaration of device type `name`, an empty one without any."""
    return _declared.get(name, _NOTHING)


def _read_dtypes(option: str, dtypes: object) -> tuple[torch.dtype, ...]:
    """Return the dtypes of a list of names; a bare name is no list of them."""
    if not isinstance(dtypes, list | tuple | set | frozenset):
        raise ConfigError(f"{option}={dtypes!r:.60}: expected a list of dtypes, such as ('bf16', 'fp16')")
    return tuple(parse_dtype(d) for d in cast("Sequence[str | torch.dtype]", dtypes))


def resolve(device: str | torch.device | None = None) -> torch.device:
    """`device` as a torch device that exists here; None gives the accelerator if there is one, else the CPU.

    Raises:
        ConfigError: no such device type.
        UnsupportedError: the type exists and this machine has none.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"unknown device {device!r}; expected one of {', '.join(available())}") from error
    if torch_device.type not in (*available(), "meta"):
        raise UnsupportedError(
            f"device {str(device)!r} is not usable here (available: {', '.join(available())}); "
            "install a torch build that has it or choose another"
        )
    return torch_device


def available() -> tuple[str, ...]:
    """Device types that this process can compute on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    accelerator_types = () if accelerator is None else (accelerator.type,)
    return tuple(dict.fromkeys(("cpu", *accelerator_types, *_declared)))


def capability(device: str | torch.device | None, dtype: str | torch.dtype) -> Capability:
    """Return how `device` handles `dtype`: measured at the first call, cached afterwards.

    Raises:
        ConfigError: unknown dtype or device type.
        UnsupportedError: there is no such device here.
    """
    torch_dtype = parse_dtype(dtype)
    key = (str(device), torch_dtype)
    support = _known.get(key)
    if support is None:
        support = _known[key] = _find_out(resolve(device), torch_dtype)
    return support


def is_slow(device: str | torch.device | None, dtype: str | torch.dtype) -> bool:
    """Whether LOW ops in `dtype` should compute in fp32 and round, because the native kernel is slower."""
    return capability(device, dtype).status == "slow"


def check_dtype(device: str | torch.device | None, dtype: str | torch.dtype) -> torch.dtype:
    """`dtype` as a torch dtype, known to work on `device`.

    Raises:
        UnsupportedError: the device has no kernels for it; the message names those it has.
    """
    support = capability(device, dtype)
    if support.status == "absent":
        usable = [n for n in ("bf16", "fp16", "fp32") if capability(device, n).status != "absent"]
        raise UnsupportedError(
            f"{dtype_name(support.dtype)} does not work on {support.device}: {support.why}; "
            f"use {' or '.join(usable)}, as dtype= or as the compute_dtype of a Policy (bf16 unless given)"
        )
    return support.dtype


def default_dtype(device: str | torch.device | None = None) -> torch.dtype:
    """Return the 16-bit dtype to train in on `device`: bf16 where it is native, else fp16 where that is.

    A CPU always gets bf16, slow or not: it needs no loss scale. `is_slow` tells which case it is.

    Raises:
        UnsupportedError: the device has neither.
    """
    at = resolve(device)
    if at.type == "cpu":
        return torch.bfloat16
    order = (torch.bfloat16, torch.float16)
    for status in ("native", "slow"):
        for dtype in order:
            if capability(at, dtype).status == status:
                return dtype
    raise UnsupportedError(f"{at} has neither bf16 nor fp16; train in fp32 (level O0) there")


def _find_out(device: torch.device, dtype: torch.dtype) -> Capability:
    name, short = str(device), dtype_name(dtype)
    if device.type in _declared:
        row = _declared[device.type]
        if dtype not in (*row.dtypes, *_WIDE):
            return Capability(name, dtype, "absent", f"its vendor declares no {short}")
        status: Status = "slow" if dtype in row.slow else "native"
        return Capability(name, dtype, status, "declared by its vendor")
    if device.type == "meta":
        return Capability(name, dtype, "native", "meta tensors compute nothing")
    ratio, problem = _measure_cached(device, dtype)
    if ratio is None:
        return Capability(name, dtype, "absent", problem)
    status = "native" if ratio <= SLOW_RATIO or dtype in _WIDE else "slow"
    return Capability(name, dtype, status, _reason(device, dtype, ratio, status), ratio)


def _reason(device: torch.device, dtype: torch.dtype, ratio: float, status: Status) -> str:
    if dtype in _WIDE:
        return "ordinary arithmetic"
    if dtype.itemsize == 1:
        return f"matrix products only (torch's scaled_mm), {'faster' if ratio < 1 else 'no faster'} than fp32"
    if status == "native" and (device.type != "cpu" or ratio > 1):
        return "faster than fp32" if ratio < 1 else "has its own kernels, no faster than fp32"
    if device.type != "cpu":
        return "no fast kernels in this hardware"
    features = _X86_FEATURES[dtype] if platform.machine() in ("x86_64", "AMD64") else ()
    have = ", ".join(feature for feature in features if _cpu_facts().get(feature) is True)
    limits = ", ".join(f"{v}={os.environ[v]}" for v in _ISA_LIMITS if os.environ.get(v))
    if status == "native":
        return f"this CPU has {have}" if have else "faster than fp32"
    if features and not have:
        return f"this CPU has none of {', '.join(features)}"
    if limits:
        return f"{limits} hides this CPU's {have}"
    return "torch has no fast kernel for it on this CPU"


# --- measuring ---------------------------------------------------------------------------------------------


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """One matrix product in `dtype`: constant data, so that no random generator is advanced."""
    size = 256 if device.type == "cpu" else 2048
    a = torch.full((size, size), 0.5, device=device).to(dtype)
    if dtype.itemsize > 1:
        return lambda: torch.mm(a, a)
    one = torch.ones((), device=device)
    column = a.t()
    return lambda: torch.ops.aten._scaled_mm(a, column, one, one, out_dtype=torch.bfloat16)


def _best_time(product: Callable[[], object], device: torch.device, runs: int) -> float:
    """Shortest of several runs in seconds: what disturbs a run only makes it longer."""
    # A thread's own CPU time does not count the time that other processes held the core.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    best = float("inf")
    for _ in range(runs):
        start = clock()
        product()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, clock() - start)
    return best


def _compare(device: torch.device, dtype: torch.dtype) -> float:
    """Time of a product in `dtype` over that in fp32; the two are interleaved, one thread on a CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            wide, narrow = _product(device, torch.float32), _product(device, dtype)
            warm = _best_time(narrow, device, 1), _best_time(wide, device, 2)
            rounds = 1 if warm[0] > 20 * warm[1] else 5
            pairs = [(_best_time(narrow, device, 1), _best_time(wide, device, 3)) for _ in range(rounds)]
    finally:
        torch.set_num_threads(threads)
    return min(n for n, _ in pairs) / min(w for _, w in pairs)


def _measure(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return the ratio, or None and torch's message.

    In a fresh thread: autocast regions, dispatch modes and fake tensors of the caller do not reach it.
    """
    with ThreadPoolExecutor(1) as fresh:
        try:
            return fresh.submit(_compare, device, dtype).result(), ""
        except (RuntimeError, TypeError) as error:
            return None, str(error).strip().splitlines()[0]


def _measure_cached(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    if dtype == torch.float32:
        return 1.0, ""
    name = dtype_name(dtype)
    file = cache_file(device)
    row = read_rows(file, _sound).get(name)
    if row is None:
        ratio, problem = _measure(device, dtype)
        row = {"ratio": ratio, "problem": problem}
        write_rows(file, {**read_rows(file, _sound), name: row})
    return cast("float | None", row["ratio"]), cast("str", row["problem"])


# --- remembering -------------------------------------------------------------------------------------------


def _cpu_facts() -> Mapping[str, Any]:
    ask = getattr(torch.cpu, "get_capabilities", None)
    return ask() if ask is not None else {}


def machine(device: str | torch.device | None) -> Mapping[str, str]:
    """Return what the speed of a dtype depends on: part of the cache key, and shown to people."""
    device = resolve(device)
    facts = {"torch": torch.__version__, "device": device.type, "system": platform.machine()}
    if device.type == "cpu":
        facts["cpu"] = str(_cpu_facts().get("cpu_name", platform.processor()))
        features = sorted(k for k, v in _cpu_facts().items() if v is True)
        facts["features"] = " ".join(features)
        facts["isa"] = torch.backends.cpu.get_cpu_capability()
        facts["mkldnn"] = str(torch.backends.mkldnn.is_available())
        facts |= {limit: os.environ.get(limit, "") for limit in _ISA_LIMITS}
    elif device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def cache_file(device: str | torch.device | None) -> Path:
    """Return where measurements of this machine and torch are kept (`$XDG_CACHE_HOME/halfstep`)."""
    facts = machine(device)
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return Path(root) / "halfstep" / f"devices-{facts['device']}-{digest}.json"


def _sound(row: Mapping[str, Any]) -> bool:
    ratio = row.get("ratio")
    ratio_is_valid = ratio is None or (isinstance(ratio, float) and 0 < ratio < 1e6)
    return set(row) == {"ratio", "problem"} and ratio_is_valid


def read_rows(file: Path, sound: Callable[[dict[str, Any]], bool]) -> dict[str, dict[str, Any]]:
    """Return the rows of a file that are `sound`; none where it is missing or not ours."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    rows = cast("dict[str, Any]", data).items()
    return {name: row for name, row in rows if isinstance(row, dict) and sound(cast("dict[str, Any]", row))}


def write_rows(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the file in one move; where the folder cannot be written, the next process measures again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem)
        try:
            with os.fdopen(handle, "w") as stream:
                json.dump(rows, stream)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
