"""What a step's time goes into, as a sentence: the ops that cost most, in fp32 and here, and what helps."""

from __future__ import annotations

from halfstep.policy.ops import TABLES, Rule
from halfstep.report.comparison import OpCost, SettingRow


def costs(row: SettingRow) -> str:
    """The row's costliest ops with their times and what would shorten them; "" where none were measured."""
    ops, whole = row.ops, row.profiled
    if not ops or not whole:
        return ""
    share = 100 * sum(op.seconds for op in ops) / whole
    told = "; ".join(_op(op, row.dtype) for op in ops)
    count = "op that costs most is" if len(ops) == 1 else f"{len(ops)} ops that cost most are"
    return f"The {count} {share:.0f} % of a step: {told}."


def _op(op: OpCost, dtype: str) -> str:
    where = f" in {op.module}" if op.module else ""
    against = ""
    if dtype != "fp32" and op.fp32 is not None:
        against = f" (fp32 {_time(op.fp32)})"
    return f"{op.op} {op.direction}{where} {_time(op.seconds)}{against}: {remedy(op, dtype)}"


def remedy(op: OpCost, dtype: str) -> str:
    """What would shorten one op, given its times in the dtype and in fp32."""
    if op.op == "cast":
        return "casts; O2 or neighbours in one dtype need fewer"
    if op.op == "accumulate gradients":
        return "larger batches and fewer backward passes a step"
    low = _is_low(op.op)
    if dtype == "fp32":
        return f"16 bits may shorten it ({'O1 or O2' if low else 'O2'})"
    if op.fp32 is not None and op.seconds > 1.05 * op.fp32:
        return f"slower than in fp32; a plan rule full for {op.module or 'it'}, or level auto"
    if low:
        return "faster matrix arithmetic"
    return "bound by memory; fewer or smaller tensors, or torch.compile"


def _is_low(op: str) -> bool:
    row = TABLES["halfstep"].get(op)
    return row is not None and row.rule is Rule.LOW


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.3g} µs"
