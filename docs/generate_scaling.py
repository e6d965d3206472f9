"""A small model of memory and messages over ranks; `python docs/generate_scaling.py` writes docs/scaling.md.

`collectives` says what one step hands to each collective; a test counts the same at 2 and 4 gloo ranks.
`sent` is what a rank then sends, where a collective goes round a ring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

MB = 1 << 20
#: What DDP puts into its first bucket, and into each further one.
FIRST_BUCKET, BUCKET = 1 * MB, 25 * MB
#: The finite flag and the norm of a step: two float64 from each rank, and one int32.
NORM_BYTES, FLAG_BYTES = 16, 4


@dataclass(frozen=True)
class Group:
    """Parameters that `fully_shard` gathers together; `regathered`: once more in backward."""

    elements: int
    weight_bytes: int = 2
    gradient_bytes: int = 2
    regathered: bool = True


@dataclass(frozen=True)
class Layout:
    """`ranks` in all; a parameter is split over `shards` of them, and there are ranks / shards replicas."""

    ranks: int
    shards: int

    @property
    def replicas(self) -> int:
        """How many hold the same shard."""
        return self.ranks // self.shards


Traffic = Mapping[str, tuple[int, int]]
"""By collective: how many of them, and the bytes of the whole tensors that they gather or reduce."""


def collectives(groups: Sequence[Group], layout: Layout) -> Traffic:
    """What one step on shards hands to the collectives, without the norm and the flag."""
    found = {"all_gather": [0, 0], "reduce_scatter": [0, 0], "all_reduce": [0, 0]}

    def add(kind: str, number: int, size: int) -> None:
        found[kind][0] += number
        found[kind][1] += number * size

    for group in groups:
        if layout.shards > 1:
            add("all_gather", 1 + group.regathered, group.elements * group.weight_bytes)
            add("reduce_scatter", 1, group.elements * group.gradient_bytes)
        if layout.replicas > 1:
            add("all_reduce", 1, ceil(group.elements / layout.shards) * group.gradient_bytes)
    return {kind: (number, size) for kind, (number, size) in found.items()}


def ddp(gradient_bytes: int) -> Traffic:
    """What one step under DistributedDataParallel hands to the all-reduce, in buckets."""
    buckets = 1 + ceil(max(0, gradient_bytes - FIRST_BUCKET) / BUCKET)
    return {"all_reduce": (buckets, gradient_bytes)}


def sent(traffic: Traffic, layout: Layout) -> float:
    """Bytes that one rank sends: (n - 1) / n of the whole round a ring of n, twice for an all-reduce."""
    total = 0.0
    for kind, (_, size) in traffic.items():
        around = layout.replicas if kind == "all_reduce" else layout.shards
        total += (2 if kind == "all_reduce" else 1) * size * (around - 1) / around
    return total


def held(parameters: int, bytes_each: float, shards: int) -> float:
    """Bytes of weights, gradients, lacking bits and AdamW's states on one rank."""
    return parameters * bytes_each / shards


# ---- the page -------------------------------------------------------------------------------------------

RANKS = (1, 2, 4, 8, 64, 512, 4096)
MODELS = {"1B": (1_000_000_000, 24), "70B": (70_000_000_000, 80)}
KINDS = {"fp32 states": 14, "bf16 states": 10, "8-bit states": 8, "torch, fp32": 16}
MACHINE = 8


def groups_of(parameters: int, blocks: int) -> list[Group]:
    """Blocks of equal size; what is not in a block is counted with the last, which stays gathered."""
    each = parameters // blocks
    return [
        *(Group(each) for _ in range(blocks - 1)),
        Group(parameters - each * (blocks - 1), regathered=False),
    ]


def _size(value: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return (
                f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:,.0f} {unit}"
            )
    return f"{value:.0f} B"


def _rows(parameters: int, blocks: int, way: str) -> list[str]:
    lines: list[str] = []
    for ranks in RANKS:
        shards = {"DDP": 1, "FSDP2": ranks, "HSDP": min(ranks, MACHINE)}[way]
        layout = Layout(ranks, shards)
        memory = [_size(held(parameters, each, shards)) for each in KINDS.values()]
        if way == "DDP":
            ours, torchs = ddp(2 * parameters), ddp(4 * parameters)
        else:
            ours = torchs = collectives(groups_of(parameters, blocks), layout)
        own = [_size(sent(one, layout)) if ranks > 1 else "0" for one in (ours, torchs)]
        messages = sum(number for number, _ in ours.values()) if ranks > 1 else 0
        lines.append(f"| {ranks:,} | {' | '.join(memory)} | {own[0]} | {own[1]} | {messages:,} |")
    return lines


HEAD = """# Predicted scaling

From a model of the collectives in `docs/generate_scaling.py`, which a test compares with what is really
handed to them on 2 and 4 gloo ranks; beyond 4 ranks nothing here was measured. Bytes a rank are weights,
gradients, lacking bits and AdamW's states (14, 10 or 8 bytes a parameter, torch's fp32 training 16),
divided by the number of shards; activations come on top. Bytes sent are those of one rank and step, each
collective round a ring. At O2 the gradients of DDP are 16-bit, torch's fp32; gathered weights and reduced
gradients of shards are 16-bit in both (torch with `MixedPrecisionPolicy(param_dtype=bf16)`). HSDP shards
over 8 ranks and replicates over the rest. Over shards a step adds one message of 16 bytes a rank for each
group of shards (the norm, and whether all is finite), whether it clips or not; at fp16 one of 4 bytes more,
under DDP too. `benchmarks/step_many_ranks.py` measures what they cost on the host of one rank of up to 4,096,
with torch's fake process group.
"""


def page() -> str:
    """Return the text of docs/scaling.md."""
    lines = [HEAD]
    columns = ("ranks", *(f"{kind}, a rank" for kind in KINDS), "sent", "torch sends", "messages")
    for name, (parameters, blocks) in MODELS.items():
        for way in ("DDP", "FSDP2", "HSDP"):
            lines += [f"## {name} parameters, {blocks} blocks, {way}", ""]
            lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
            lines += [*_rows(parameters, blocks, way), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    Path(__file__).with_name("scaling.md").write_text(page(), encoding="utf-8")
