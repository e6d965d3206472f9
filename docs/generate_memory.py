"""Write docs/memory.md with what `halfstep memory` counts: python docs/generate_memory.py."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from halfstep.cli.memory import footprint_of_parameters, format_bytes, make_optimizer

WAYS: Mapping[str, tuple[str, tuple[str, str | None, str | None]]] = {
    "fp32 or O1, torch's AdamW": ("O1", ("torch.AdamW", None, None)),
    "O2, torch's AdamW": ("O2", ("torch.AdamW", None, None)),
    "O2, `hs.optim.AdamW`, fp32 states": ("O2", ("hs.AdamW", "fp32", None)),
    "O2, `hs.optim.AdamW`, bf16 states": ("O2", ("hs.AdamW", "bf16", None)),
    "O2, `hs.optim.AdamW`, 8-bit states": ("O2", ("hs.AdamW", "8bit", None)),
    'the same, `master="stochastic"`': ("O2", ("hs.AdamW", "8bit", "stochastic")),
}
SIZES = (1, 7, 70)
RANKS = (1, 8)
HEAD = """\
# Memory

`halfstep memory` counts what training holds without holding it: of a script, which runs until it prepares,
with parameters that have no values; or of a number of parameters. This page is written by `python
docs/generate_memory.py` from what the command counts, which tests hold within 5 % of what an allocator
measures.

<!--- skip: next -->
```sh
halfstep memory train.py --level O2 --states 8bit
halfstep memory --parameters 7e9 --level O2 --states 8bit --ranks 8
```

GB are 10^9 bytes on each device. *At rest* is between steps; *prepare* and *step* are peaks; `amp.save` and
`amp.load` take what is there at rest and the largest tensor once more (here a 64th of the model). On eight
devices `fully_shard` shares weights, gradients and states; under DDP each device holds what one does, and
the buckets of the gradients besides. On top come activations, and what `fully_shard` gathers for a while.
"""
TAIL = """\
## Measured

`python benchmarks/large.py --parameters 2e9 --rows "O2 8bit"`, resident memory of a process on a CPU with
24 GiB, of which Python and torch take 0.4 GiB, Numba and the kernels that it compiled 0.13: a model of
7.44 GiB in fp32 takes 11.5 GiB in `prepare`, 11.7 at rest, 15.4 at the peak of a step, 11.7 while
`amp.save` writes its 11.2 GiB and 11.7 while `amp.load` reads them.

## What comes on top

- torch's optimizers are counted as with `fused=True`. Without it they update all tensors at once on a GPU
  (`foreach`), with temporaries: 4 bytes a parameter for AdamW, and for SGD with weight decay. At O2
  `amp.step` hands them 64 MiB of the gradients in fp32 at a time, and there are temporaries of these alone.
  An optimizer that is not torch's own, one with step hooks of yours, and a step of your own loop
  (`optimizer.step()`) get all gradients in fp32 at once: 2 bytes a parameter more.
- Micro-batches of a step are added up in fp32: 2 bytes a parameter until the step where weights have 16
  bits.
- `release_gradients=True` in `hs.optim` takes the gradients away, but for the largest.
- `amp.save(background=True)` copies what it writes to the host first: fp32 weights and the states.
- `amp.revert()`, `hs.Trainer`'s checkpoints, and `state_dict()` and `load_state_dict()` of `hs.optim` take
  what is there and the largest tensor again. torch's optimizers make all states anew in `load_state_dict`
  before they drop the old ones (8 bytes a parameter more for AdamW, 4 for SGD with momentum, with or without
  halfstep), unless those that come have the right dtype and device, which they keep: call
  `optimizer.state.clear()` first. Masters are copied in place. What you hand to it is yours:
  `torch.load(path, mmap=True)` leaves it in the file.
- Hugging Face's Trainer and accelerate write an optimizer's state as it is, and read the whole file before
  they hand it over: resuming took 10.3 and 10.7 bytes a parameter more than is there at rest with
  `hs.optim.AdamW` (8 of states, 2 of lacking bits), and 4.0 with torch's AdamW, which keeps the states that
  were read. MindSpore's `load_checkpoint` returns the values that it read, 4.5 bytes a parameter more; Apex's
  names save and load as torch does.
- `hs.optim.fp32_state_dict` and `MasterWeights.state_dict()` return fp32 copies, 4 bytes a parameter.
  `amp.evaluating()` takes as much for its fp32 weights; with `MasterWeights` these are the masters.

## Models that do not fit in fp32

Read or build the weights in 16 bits, then prepare: the masters begin with the values that are there, and no
fp32 copy of the model is made at any time. `from_pretrained(name, dtype=torch.bfloat16)` of transformers
gives such a model. At O2 an fp32 checkpoint that `load_state_dict` brings afterwards reaches the masters
unrounded.

To go on from a checkpoint of `amp.save` no values are needed before it is loaded. Build the model on the
meta device, give it memory, then build the optimizer and prepare:

```python
import torch
import halfstep as hs

with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
model.bfloat16().to_empty(device="cpu")
optimizer = hs.optim.AdamW(model.parameters(), state_dtype="8bit")
amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
# amp.load("run"), or model.load_state_dict(...)
```

`prepare` refuses parameters on the meta device, since `to_empty` replaces them, and the optimizer would
keep the old ones. Buffers that no checkpoint holds (`persistent=False`) have to be computed again after
`to_empty`.

Under `fully_shard` the order is the same: build on meta, `model.bfloat16()` or not,
`hs.distributed.shard(model, blocks)`, `model.to_empty(device=...)`, optimizer, `prepare`, `amp.load`.
Shards in 16 bits need an optimizer of `hs.optim` at O2: with torch's leave `model.bfloat16()` out, since
its shards are the fp32 masters.
"""


def table(billions: int) -> str:
    """What each way takes of so many billion parameters on one device and on eight."""
    heads = [
        f"{what}, {ranks} device{'s' * (ranks > 1)}"
        for ranks in RANKS
        for what in ("at rest", "prepare", "step")
    ]
    lines = [
        f"## {billions} billion parameters",
        "",
        "| | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for way, (level, asked) in WAYS.items():
        counted = [
            footprint_of_parameters(billions * 10**9, level, partial(make_optimizer, *asked), ranks)
            for ranks in RANKS
        ]
        cells = [format_bytes(size) for one in counted for size in (one.at_rest, one.prepare, one.step)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """Return the text of docs/memory.md."""
    return "\n".join([HEAD, *map(table, SIZES), TAIL])


if __name__ == "__main__":
    (Path(__file__).parent / "memory.md").write_text(page(), encoding="utf-8")
