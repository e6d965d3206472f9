"""Write docs/ops.md from the op tables: python docs/generate_ops.py."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from halfstep.policy import ops
from halfstep.policy.ops import TABLES, OpRow, Rule

_MEANINGS: Mapping[Rule, str] = MappingProxyType(
    {
        Rule.LOW: "inputs are cast to the compute dtype (fp16 or bf16)",
        Rule.FP32_OUT: "inputs are cast to the compute dtype, sums and result fp32 (by an edit or a plan)",
        Rule.FULL: "runs in fp32 and gives fp32",
        Rule.KEEP: "runs in the dtype of its first floating input; fp32 weights beside it are welcome",
        Rule.WIDEST: "mixed inputs go to the widest floating dtype among them",
        Rule.BANNED: "refused, with the remedy",
    }
)


def _cell(row: OpRow | None) -> str:
    if row is None:
        return "-"
    word = row.rule.value + (" (fp16)" if row.only_in == torch.float16 else "")
    return word + ("*" if row.via_dtype and row.rule is Rule.FULL else "")


def page() -> str:
    """Return the text of docs/ops.md: every op, its rule in each table, and the reason for the default."""
    tables = {**TABLES, "torch cpu": ops._TORCH_BY_DEVICE["cpu"]}
    order = ("halfstep", "torch", "torch cpu", "apex", "mindspore", "mlu", "paper")
    names = sorted(set[str]().union(*tables.values()), key=lambda name: (name.lstrip("_"), name))
    lines = [
        "# What each op runs in",
        "",
        "Generated from the op tables by `python docs/generate_ops.py`; do not edit.",
        "",
        *(f"- **{rule.value}**: {_MEANINGS[rule]}" for rule in Rule),
        "",
        "`-` means no rule: the op runs in what it is given. `*` marks an op that takes fp32 through its own",
        "`dtype=` argument. `banned (fp16)` is refused in fp16 and runs in fp32 otherwise. The column torch",
        "is torch's CUDA list, torch cpu its CPU list; every other table holds on every device.",
        "Measurements are from `benchmarks/op_rules.py`: of each op in bf16, the worst over every input and",
        "parameter, values of one sign and of both, and sums of 32, 4,096 and 65,536 terms. x0.00 is exact.",
        "",
        f"| op | {' | '.join(order)} | reason in halfstep |",
        f"|{'---|' * (len(order) + 2)}",
    ]
    for name in names:
        cells = [_cell(tables[table].get(name)) for table in order]
        reason = TABLES["halfstep"][name].reason if name in TABLES["halfstep"] else ""
        lines.append(f"| `{name}` | {' | '.join(cells)} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("ops.md").write_text(page(), encoding="utf-8")
