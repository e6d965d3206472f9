"""Train through infs, saves, kills, resumes and changes of the number of ranks: python -m tests.faults.soak.

The disturbed run changes its number of ranks between 1, 2 and 4 at drawn steps, is killed at random moments
(a good part of them inside a save), and resumes from the newest checkpoint. The undisturbed run has the
same number of ranks at each step, since sums of gradients depend on it, and is never killed; it saves only
where the number changes. At the end every tensor of both checkpoints (masters, optimizer states, random
generators) and all that the session remembers must be equal to the bit; kernels are those of the tests,
since two runs on one machine may measure and so choose others. A last leg on two ranks trains, saves and
loads in living processes, whose memory must end within 1 % of its start.
"""

import argparse
import gc
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("HALFSTEP_KERNELS", str(Path(__file__).parents[1] / "kernels.toml"))

import torch
from torch import nn

import halfstep as hs
from halfstep import shardfiles
from halfstep.distributed import local_of, world_size
from tests.ranks import run, start


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 33), nn.LayerNorm(33), nn.GELU(), nn.Dropout(0.1), nn.Linear(33, 3))
    if world_size() > 1:
        hs.distributed.shard(model)
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.01)
    scale = hs.DynamicLossScale(2.0**8, interval=9)
    return model, hs.prepare(model, optimizer, level="O2", dtype="fp16", loss_scale=scale)


def step_number(path):
    return int(path.name[len("step-") :])


def newest(folder):
    return max((p for p in folder.iterdir() if p.name.startswith("step-")), key=step_number, default=None)


def train(model, amp, rank, step):
    """One step; every so often one rank's gradient holds an inf."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(8 * step + rank))
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)
    if step * 2654435761 % 13 == 0 and rank == step % world_size():
        for p in model.parameters():
            if p.grad is not None and local_of(p.grad).numel():
                local_of(p.grad).view(-1)[0] = float("inf")
    return amp.step(clip_norm=1.0)


def leg(rank, folder, until, saving):
    """From the newest checkpoint to step `until`, which is saved; `saving`: and others on the way."""
    folder, skipped = Path(folder), 0
    model, amp = build()
    begin, latest = 0, newest(folder)
    if latest is not None:
        loaded = amp.load(latest)
        begin = step_number(latest)
        if loaded.position is None:  # another number of ranks: generators begin anew
            torch.manual_seed(1000 * begin + rank)
    else:
        torch.manual_seed(rank)
    for step in range(begin, until):
        skipped += not train(model, amp, rank, step).taken
        chosen = random.Random(step)
        if step + 1 == until or (saving and chosen.random() < 0.4):
            background = saving and chosen.random() < 0.5
            path = folder / f"step-{step + 1}"
            amp.save(path, position={"next": step + 1}, keep_last=2, background=background)
    amp.wait_until_saved()
    return skipped


#: Steps after which a living process has trained, skipped, saved and loaded several times, and allocators
#: have most of what they take (0.6 % of a process between steps 110 and 500, 0.1 in the next 2,000).
WARM = 500


def resident(amp):
    """Bytes that this process has for itself, less the history of outcomes, which ends at 10,000 steps.

    Pages of libraries' files are left out: they are counted once they are touched, and belong to all.
    """
    amp.history.clear()
    gc.collect()
    told = Path("/proc/self/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+) kB", told, re.MULTILINE)[1]) * 1024


def steady(rank, folder, seconds):
    """Train, save and load in one process for a time: its memory after all was done once, and at the end."""
    folder = Path(folder)
    model, amp = build()
    begun, step, early = time.monotonic(), 0, 0
    while True:
        spent = torch.tensor(time.monotonic() - begun)
        if world_size() > 1:
            torch.distributed.broadcast(spent, 0)
        if step == WARM:
            early = resident(amp)
        if spent > seconds and step >= 3 * WARM:
            break
        train(model, amp, rank, step)
        step += 1
        if step % 10 == 0:
            amp.save(folder / f"step-{step}", keep_last=2, background=bool(step % 20))
        if step % 50 == 0:
            amp.load(folder / f"step-{step}")
    amp.wait_until_saved()
    return step, early, resident(amp)


def disturbed(folder, chosen, seconds):
    """The segments (ranks, last step) that were trained, the kills, and how many fell inside a save.

    However slow the machine, each number of ranks has its turn.
    """
    segments, kills, inside, done = [], 0, 0, 0
    begun = time.monotonic()
    while time.monotonic() - begun < seconds or len({ranks for ranks, _ in segments}) < 3:
        ranks = chosen.choice([w for w in (1, 2, 4) if not segments or w != segments[-1][0]])
        until = done + chosen.randrange(10, 40)
        for attempt in range(4):
            if newest(folder) is not None and step_number(newest(folder)) >= until:
                break
            killed, within = attempt_leg(folder, ranks, until, chosen, attempt < 3)
            kills, inside = kills + killed, inside + within
        assert step_number(newest(folder)) == until
        segments.append((ranks, until))
        done = until
        print(f"{ranks} ranks to step {until}: {kills} kills, {inside} inside a save", flush=True)
    return segments, kills, inside


PATIENCE = 30  # seconds that ranks have to end in after one of them was killed


def attempt_leg(folder, ranks, until, chosen, kill):
    """Train to `until`, killed on the way where `kill` and luck say so: whether it was, and inside a save."""
    with tempfile.TemporaryDirectory() as meet:
        processes = start(leg, ranks, (str(folder), until, True), Path(meet))
        wanted = chosen.random()
        first = newest(folder)
        begin = step_number(first) if first is not None else 0
        goal = begin + 1 + int(wanted * (until - begin)) if kill and chosen.random() < 0.8 else None
        inside, struck, within = chosen.random() < 0.6, math.inf, False
        while any(p.exitcode is None for p in processes):
            now = newest(folder)
            due = goal is not None and struck == math.inf and now is not None and step_number(now) >= goal - 4
            if due and (not inside or list(folder.glob(".step-*.tmp"))):
                os.kill(processes[chosen.randrange(ranks)].pid, signal.SIGKILL)
                struck, within = time.monotonic(), bool(list(folder.glob(".step-*.tmp")))
            if (
                time.monotonic() > struck + PATIENCE
            ):  # as torchrun does; one that still meets the others waits
                for process in processes:
                    process.kill()
            time.sleep(0.001)
        codes = [p.exitcode for p in processes]
        assert struck < math.inf or not any(codes), (
            codes,
            [p.read_text() for p in Path(meet).glob("trace*")],
        )
        return struck < math.inf, within


def contents(path):
    """Every tensor of a checkpoint as bytes, and what its manifest says of optimizers and session."""
    manifest = json.loads((path / "manifest.json").read_text())
    found = shardfiles.Index(path, manifest["files"], manifest["index"])
    tensors = {name: found.read(name) for name in found.wholes if found.wholes[name]}
    for number in range(len(manifest["files"])):  # and what each rank has of its own, its generators say
        own = shardfiles.unpack(found.about(number)["own"], partial(found.private, number))
        shardfiles.pack(own, f"{number}", tensors.__setitem__)
    tensors = {name: value.contiguous().view(torch.uint8) for name, value in tensors.items()}
    return tensors, manifest["optimizers"], manifest["rest"]


def differences(one, other, at=""):
    """Where two trees of JSON are not the same, with both values."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{at}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [found for n, two in enumerate(zip(one, other)) for found in differences(*two, f"{at}/{n}")]
    return [] if one == other else [(at, one, other)]


def soak(minutes, seed, folder):
    """Run all of it; AssertionError where a bit or 1 % of memory differs."""
    chosen = random.Random(seed)
    one, other, last = (folder / name for name in ("disturbed", "undisturbed", "steady"))
    for path in (one, other, last):
        path.mkdir()
    segments, kills, inside = disturbed(one, chosen, 60 * minutes * 0.55)
    skipped = 0
    for ranks, until in segments:
        skipped += run(leg, ranks, str(other), until, False, seconds=3600)[0]
    path = newest(one).name
    mine, theirs = contents(one / path), contents(other / path)
    assert mine[0].keys() == theirs[0].keys()
    unequal = [name for name in mine[0] if not torch.equal(mine[0][name], theirs[0][name])]
    assert not unequal, unequal
    for one_part, other_part in zip(mine[1:], theirs[1:]):
        assert not (apart := differences(one_part, other_part)), apart
    ranks = [number for number, _ in segments]
    print(
        f"{segments[-1][1]} steps, {skipped} skipped, on {ranks} ranks; {kills} kills, {inside} inside a save"
    )
    print(f"{len(mine[0])} tensors and the session bit-identical to the undisturbed run", flush=True)
    for rank, (steps, early, late) in enumerate(run(steady, 2, str(last), 60 * minutes * 0.2, seconds=3600)):
        print(f"rank {rank}: {steps} steps, memory {early:,} bytes, then {late:,}: {late / early - 1:+.2%}")
        assert late <= 1.01 * early


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        soak(given.minutes, given.seed, Path(name))
    return 0


if __name__ == "__main__":
    # What is sent to other processes must have the module's own name, not that of a script.
    from tests.faults.soak import main as by_name

    sys.exit(by_name())
