"""What people are shown of kernel choice: times over fp32's, the way taken and why; whether a dtype pays.

The verdict reads only what was measured before. On a machine of which nothing is known there is none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from halfstep.casting.kernel_choice import DIRECTIONS, KernelTable, Times
from halfstep.casting.kinds import KINDS
from halfstep.casting.kinds.kind import OpClass
from halfstep.formats import dtype_name

#: The size that people are shown, and those measured on the way to it.
SHOWN = "medium"
MEASURED = ("tiny", "small", "medium")
_KINDS = ("convolution", "linear", "bmm", "attention", "lstm", "gru")


@dataclass(frozen=True)
class KernelFact:
    """One direction of one class of op: the implementation taken, and times as shares of fp32's own.

    `native` and `taken` are None where nothing was measured, or where native was too slow to be tried.
    """

    op: str
    geometry: str
    size: str
    dtype: str
    direction: str
    implementation: str
    native: float | None
    taken: float | None
    why: str


def _typical_geometries(op: str) -> tuple[str, ...]:
    """Those that stand for the others: images rather than series and volumes, torch's own layout."""
    geometries = [g for g in KINDS[op].geometries if not g.endswith("channels_last")]
    return tuple(g for g in geometries if g[:2] not in ("1d", "3d") or g.endswith("dense"))


def kernel_facts(
    table: KernelTable, dtype: torch.dtype, times: Callable[[OpClass, str], Times]
) -> Iterator[KernelFact]:
    """All kinds of op in `dtype`, by what `table` says; `times` is asked only where the table measures."""
    threads, name = torch.get_num_threads(), dtype_name(dtype)
    for op in _KINDS:
        for geometry in _typical_geometries(op):
            for size in MEASURED if table.measures else (SHOWN,):
                yield from _of_class(table, OpClass(op, name, geometry, size, threads), times)


def _of_class(
    table: KernelTable, cls: OpClass, times: Callable[[OpClass, str], Times]
) -> Iterator[KernelFact]:
    row = table.row(cls, "i" if cls.op == "attention" else "iw*" if KINDS[cls.op].one_backward else "iw")
    for direction in DIRECTIONS[:2] if KINDS[cls.op].one_backward else DIRECTIONS:
        implementation, native, ratio = str(getattr(row.choice, direction)), None, None
        if table.measures:
            fp32 = times(replace(cls, dtype="fp32"), direction)["native"] or float("nan")
            seconds = times(cls, direction)
            slow, fast = seconds.get("native"), seconds.get(implementation)
            native = None if slow is None else slow / fp32
            ratio = None if fast is None else fast / fp32
        yield KernelFact(
            cls.op, cls.geometry, cls.size, cls.dtype, direction, implementation, native, ratio, row.why
        )


#: A dtype whose ops take more than this share of fp32's time does not pay.
PAYS = 0.98


def shares(rows: Mapping[str, Times], dtype: str, threads: int) -> dict[str, float]:
    """By kind of op: time by the fastest kernels in `dtype` over fp32's, all measured directions together.

    rows: seconds by implementation, under "op|dtype|geometry|size|threads|direction". Where fp32 itself was
    not measured, the way that rounds around fp32 arithmetic stands for it.
    """
    low: dict[str, float] = defaultdict(float)
    full: dict[str, float] = defaultdict(float)
    for key, times in rows.items():
        parts = key.split("|")
        if len(parts) != 6 or parts[1] != dtype or parts[4] != str(threads):
            continue
        full_times = rows.get("|".join((parts[0], "fp32", *parts[2:])), {})
        base = full_times.get("native") or times.get("rounded")
        seconds = [t for t in times.values() if t is not None]
        if base and seconds:
            low[parts[0]] += min(seconds)
            full[parts[0]] += base
    return {op: low[op] / full[op] for op in low}


def does_not_pay(rows: Mapping[str, Times], dtype: str, threads: int) -> str | None:
    """Say that `dtype` does not pay here, with the measured shares; None where it does, or none is known."""
    op_shares = shares(rows, dtype, threads)
    if not op_shares:
        return None
    mean = math.exp(sum(map(math.log, op_shares.values())) / len(op_shares))
    if mean <= PAYS:
        return None
    summary = ", ".join(f"{op} {share:.2f}" for op, share in sorted(op_shares.items()))
    return (
        f"{dtype} does not pay on this machine: by its fastest kernels its ops take {mean:.2f} of fp32's "
        f"time ({summary}); level O0 is as fast, and `halfstep tune` or level='auto' measures a model itself"
    )
