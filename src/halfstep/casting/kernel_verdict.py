"""Whether a 16-bit dtype pays on this machine: its ops by their fastest kernels against fp32's, as measured.

Only what was measured before is read; nothing is run. On a machine of which nothing is known there is no
verdict.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from halfstep.casting.kernel_choice import Times

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
        found = [t for t in times.values() if t is not None]
        if base and found:
            low[parts[0]] += min(found)
            full[parts[0]] += base
    return {op: low[op] / full[op] for op in low}


def does_not_pay(rows: Mapping[str, Times], dtype: str, threads: int) -> str | None:
    """Say that `dtype` does not pay here, with the measured shares; None where it does, or none is known."""
    found = shares(rows, dtype, threads)
    if not found:
        return None
    mean = math.exp(sum(map(math.log, found.values())) / len(found))
    if mean <= PAYS:
        return None
    told = ", ".join(f"{op} {share:.2f}" for op, share in sorted(found.items()))
    return (
        f"{dtype} does not pay on this machine: by its fastest kernels its ops take {mean:.2f} of fp32's "
        f"time ({told}); level O0 is as fast, and `halfstep tune` or level='auto' measures a model itself"
    )
