"""What people are shown of kernel choice: each kind of op with its time over fp32, the way taken, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from halfstep.casting.kernel_choice import DIRECTIONS, KernelTable, OpClass, Times
from halfstep.casting.kernel_names import geometries
from halfstep.casting.kernel_probes import ONE_BACKWARD
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


def _shown_geometries(op: str) -> tuple[str, ...]:
    """Those that stand for the others: images rather than series and volumes, torch's own layout."""
    found = [g for g in geometries(op) if not g.endswith("channels_last")]
    return tuple(g for g in found if g[:2] not in ("1d", "3d") or g.endswith("dense"))


def kernel_facts(
    table: KernelTable, dtype: torch.dtype, times: Callable[[OpClass, str], Times]
) -> Iterator[KernelFact]:
    """All kinds of op in `dtype`, by what `table` says; `times` is asked only where the table measures."""
    threads, name = torch.get_num_threads(), dtype_name(dtype)
    for op in _KINDS:
        for geometry in _shown_geometries(op):
            for size in MEASURED if table.measures else (SHOWN,):
                yield from _of_class(table, OpClass(op, name, geometry, size, threads), times)


def _of_class(
    table: KernelTable, cls: OpClass, times: Callable[[OpClass, str], Times]
) -> Iterator[KernelFact]:
    row = table.row(cls, "i" if cls.op == "attention" else "iw*" if cls.op in ONE_BACKWARD else "iw")
    for direction in DIRECTIONS[:2] if cls.op in ONE_BACKWARD else DIRECTIONS:
        taken, native, ratio = str(getattr(row.choice, direction)), None, None
        if table.measures:
            fp32 = times(replace(cls, dtype="fp32"), direction)["native"] or float("nan")
            found = times(cls, direction)
            slow, fast = found.get("native"), found.get(taken)
            native = None if slow is None else slow / fp32
            ratio = None if fast is None else fast / fp32
        yield KernelFact(cls.op, cls.geometry, cls.size, cls.dtype, direction, taken, native, ratio, row.why)
