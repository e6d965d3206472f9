"""The faults of docs/reliability.md, each really made; a row tells what happened, in the run's own words.

`alone` makes those of one process, `over_ranks` those of two. A case asserts what must hold and returns the
message that a user reads, without numbers and paths that differ from machine to machine.
"""

import os
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from halfstep import checkpoint
from halfstep.distributed import local_of, watchdog
from halfstep.errors import HalfstepWarning
from tests.ranks import run, start


@dataclass(frozen=True)
class Row:
    """One line of the table: what was done, how often or where, what happened."""

    fault: str
    where: str
    told: str


def net(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))


def build(level="O2", dtype="bf16", optimizer=hs.optim.AdamW, model=None, **options):
    model = net() if model is None else model
    made = optimizer(model.parameters(), lr=0.05)
    return model, made, hs.prepare(model, made, level=level, dtype=dtype, **options)


def batch(number):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def micro(model, amp, number):
    with amp.autocast():
        loss = model(batch(number)).float().square().mean()
    amp.backward(loss)


def weights(model):
    return [local_of(p.detach()).clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other))


def message(work: Callable[[], object], kind: type[Exception], folder: Path) -> str:
    """What `work` raises, without what differs from run to run."""
    try:
        work()
    except kind as error:
        text = str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), "the folder")
        return f"{type(error).__name__}: " + re.sub(r"[\d,]+ (bytes are needed|are free)", r"N \1", text)
    raise AssertionError(f"{kind.__name__} was not raised")


@contextmanager
def small_disk(limit: int = 1000) -> Iterator[None]:
    """Within, no file grows beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- one process ----------------------------------------------------------------------------------------


def inf_alone(folder: Path) -> Row:
    tried = 0
    for level, dtype, kind in (("O1", "fp16", torch.optim.SGD), ("O2", "fp16", hs.optim.AdamW)):
        model, _, amp = build(level, dtype, kind, loss_scale=hs.DynamicLossScale(2.0**10))
        for name, p in model.named_parameters():
            for bad in range(2):
                before = weights(model)
                for number in range(2):
                    micro(model, amp, number)
                    if number == bad:
                        assert p.grad is not None, name
                        p.grad.view(-1)[-1] = float("inf")
                with warnings.catch_warnings():  # one at the fifth skip in a row
                    warnings.filterwarnings("ignore", "5 steps in a row", hs.HalfstepWarning)
                    assert not amp.step().taken
                assert same(before, weights(model))
                tried += 1
    return Row("inf in a gradient", f"{tried} cases: each parameter, each micro-batch", SKIPPED)


SKIPPED = "the step is skipped, no weight changes by a bit, the loss scale backs off"


class Greedy(torch.autograd.Function):
    """Needs more memory than there is, in forward or in backward."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            torch.empty(1 << 60, dtype=torch.uint8)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        if ctx.where == "backward":
            torch.empty(1 << 60, dtype=torch.uint8)
        return grads[0], None


def out_of_memory(folder: Path) -> Row:
    for level, dtype, kind in (("O1", "fp16", torch.optim.SGD), ("O2", "bf16", hs.optim.AdamW)):
        for where in ("forward", "backward"):
            plain, greedy = build(level, dtype, kind), build(level, dtype, kind)
            for number in range(6):
                if number == 3:
                    model, _, amp = greedy
                    with pytest.raises(RuntimeError, match="allocate"):
                        with amp.autocast():
                            loss = Greedy.apply(model(batch(9)), where).float().sum()
                        amp.backward(loss)
                for model, _, amp in (plain, greedy):
                    micro(model, amp, number)
                    assert amp.step().taken
            assert same(weights(plain[0]), weights(greedy[0]))
    told = (
        "torch's error reaches the caller, and no gradients are left; the run goes on, bit-identical to one "
        "without"
    )
    return Row("out of memory in a step", "forward, backward; O1, O2", told)


def flipped_bits(folder: Path) -> Row:
    model, _, amp = build()
    micro(model, amp, 0)
    amp.step()
    amp.save(folder / "flip")
    other, _, again = build(model=net(9))
    before, tried = weights(other), 0
    for file in sorted((folder / "flip").iterdir()):
        data = file.read_bytes()
        for number in range(40):
            changed = bytearray(data)
            changed[(number * 7919) % len(data)] ^= 1 << number % 7
            file.write_bytes(changed)
            message(lambda: again.load(folder / "flip"), hs.CheckpointError, folder)
            tried += 1
        file.write_bytes(data)
    assert same(before, weights(other))
    again.load(folder / "flip")
    assert same(weights(model), weights(other))
    return Row(
        "flipped bits in a checkpoint", f"{tried} bits, every file", "refused by name; nothing is changed"
    )


def damaged_newest(folder: Path) -> Row:
    def trainer():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"checkpoints": folder / "run", "checkpoint_every": 1, "dtype": "bf16", "progress": False}
        return hs.Trainer(model, optimizer, nn.functional.mse_loss, **options)

    data = [(batch(n), torch.zeros(4, 2)) for n in range(6)]
    trainer().fit(data, steps=4)
    newest = checkpoint.CheckpointFolder(folder / "run").paths()[-1]
    (file,) = newest.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])
    again = trainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HalfstepWarning)
        history = again.fit(data, steps=6, resume=True)
    assert [log.step for log in history.steps] == [4, 5, 6]
    (told,) = (str(w.message) for w in caught if "going on from" in str(w.message))
    whole = "HalfstepWarning: ... " + told[told.index("it is now") :]
    return Row("the newest checkpoint is cut short", "a Trainer's folder, `resume=True`", whole)


def code_in_a_file(folder: Path) -> Row:
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {folder / 'ran'}",)

    torch.save({"model": Evil()}, folder / "evil.pt")
    told = message(lambda: checkpoint.load(folder / "evil.pt"), hs.CheckpointError, folder)
    assert not (folder / "ran").exists()
    return Row("a checkpoint that holds code", "a pickle that runs a command", told)


def full_disk(folder: Path) -> Row:
    _, _, amp = build()
    amp.save(folder / "disk-1", extra=1)
    with small_disk():
        told = message(lambda: amp.save(folder / "disk-2"), hs.CheckpointError, folder)
        amp.save(folder / "disk-2", background=True)
        later = message(amp.wait_until_saved, hs.CheckpointError, folder)
    assert told == later
    assert sorted(p.name for p in folder.glob("*disk*")) == ["disk-1"]
    assert amp.load(folder / "disk-1").extra == 1
    return Row("a full disk", "`save`, and in the background (reported at the next call)", told)


PLANS = {
    "no TOML": "[[rule]",
    "nested 5,000 deep": "a = " + "[" * 5000,
    "unknown keys": "speed = 1",
    "a rule without a pattern": "[[rule]]\ndtype = 'fp32'",
    "a pattern that matches nothing": "[[rule]]\npattern = 'no.such'\ndtype = 'fp32'",
    "forty wildcards": "[[rule]]\npattern = '" + ".".join(["**", "a"] * 40) + "'\ndtype = 'fp32'",
    "control characters": "[[rule]]\npattern = '\x1b[2J'\ndtype = 'fp32'",
}


def hostile_plans(folder: Path) -> Row:
    deep = nn.Linear(2, 2)
    for _ in range(30):
        deep = nn.ModuleDict({"a": deep})
    for text in PLANS.values():
        told = message(lambda text=text: hs.convert(deep, hs.Plan.from_toml(text)), hs.PlanError, folder)
        assert "\x1b" not in told
    return Row(
        "hostile plans", ", ".join(PLANS), "PlanError in one line that names the rule; no model is changed"
    )


def hostile_names(folder: Path) -> Row:
    names = ["optimizer", "rank", "rest", "a/b", "/etc", "\n", "\x00", "名", "'; drop", "%s"]

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Sequential()
        for name in names:
            model.add_module(name, nn.Linear(4, 4))
        return build(model=model)

    (model, _, amp), (other, _, again) = made(1), made(2)
    micro(model, amp, 0)
    amp.step()
    amp.save(folder / "names")
    again.load(folder / "names")
    assert same(weights(model), weights(other))
    assert len(list((folder / "names").iterdir())) == 2
    model = nn.Linear(4, 2)
    model.register_parameter("__metadata__", nn.Parameter(torch.zeros(2)))
    _, _, amp = build(model=model)
    message(lambda: amp.save(folder / "hidden"), hs.CheckpointError, folder)
    assert not (folder / "hidden").exists()
    told = "saved and loaded bit for bit; no name reaches the file system; `__metadata__` alone is refused"
    return Row(
        "hostile names of modules", f"{len(names)} names: of our own files' parts, paths, control bytes", told
    )


ALONE = (
    *(inf_alone, out_of_memory, flipped_bits, damaged_newest, code_in_a_file, full_disk),
    *(hostile_plans, hostile_names),
)


def alone(folder: Path) -> list[Row]:
    """The rows of one process."""
    return [case(folder) for case in ALONE]


# ---- two ranks ------------------------------------------------------------------------------------------


def inf_over_ranks(rank: int, way: str) -> int:
    """One value of one gradient of one rank in one micro-batch; both ranks must skip."""
    model = net()
    if way == "shards":
        hs.distributed.shard(model)
    model, _, amp = build("O1", "fp16", model=model, loss_scale=hs.DynamicLossScale(2.0**10))
    wrapped = DDP(model) if way == "ddp" else model
    tried = 0
    for p in model.parameters():
        for where in range(2):
            for bad in range(2):
                before = weights(model)
                for number in range(2):
                    micro(wrapped, amp, 10 * number + rank)
                    if number == bad and rank == where and p.grad is not None and local_of(p.grad).numel():
                        local_of(p.grad).view(-1)[-1] = float("inf")
                held = torch.tensor(
                    int(not all(bool(local_of(q.grad).isfinite().all()) for q in model.parameters()))
                )
                torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
                assert bool(held) != amp.step().taken
                tried += int(held)
                assert not held or same(before, weights(model))
    return tried


def disk_over_ranks(rank: int, folder: Path) -> str:
    """Rank 1's disk alone is full."""
    _, _, amp = build()
    amp.save(folder / "ranks-1", extra=1)
    with small_disk(1000 if rank else 1 << 30):
        told = message(lambda: amp.save(folder / "ranks-2"), hs.CheckpointError, folder)
    assert amp.load(folder / "ranks-1").extra == 1
    return told


def sigterm_over_ranks(rank: int, folder: Path) -> int:
    """Rank 1 gets SIGTERM in a step that is saved anyway."""

    class Terminate(hs.trainer.Callback):
        def on_step_end(self, trainer):
            if trainer.step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    model = net()
    trainer = hs.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, dtype="bf16", wrap=DDP,
        checkpoints=folder / "term", checkpoint_every=1, callbacks=[Terminate()], progress=False,
        background_saves=True,
    )  # fmt: skip
    with pytest.raises(SystemExit) as end:
        trainer.fit([(batch(n), torch.zeros(4, 2)) for n in range(9)], steps=9)
    assert end.value.code == 0
    return trainer.step


def together(rank: int, folder: str):
    """All that leaves both ranks alive."""
    at = Path(folder)
    return (
        [inf_over_ranks(rank, way) for way in ("ddp", "shards")],
        disk_over_ranks(rank, at),
        sigterm_over_ranks(rank, at),
    )


def lost(rank: int, folder: str, how: str) -> None:
    """Rank 1 is lost at step 3; rank 0 writes down what it is told."""
    model, _, amp = build()
    wrapped = DDP(model)

    def train():
        with watchdog(lambda: amp.steps + 1, seconds=8 if how == "hang" else None):
            for step in range(5):
                if rank == 1 and step == 2:
                    if how == "raise":
                        raise OSError("the data's disk is gone")
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(600)
                micro(wrapped, amp, step)
                amp.step()

    if rank == 1:
        train()
    told = message(train, hs.RankError, Path(folder))
    (Path(folder) / "part").write_text(told)
    (Path(folder) / "part").rename(Path(folder) / "told")


def lose(folder: Path, how: str) -> str:
    """What rank 0 says when rank 1 is lost in a way."""
    meet = folder / how
    meet.mkdir()
    processes = start(lost, 2, (str(meet), how), meet)
    processes[0].join(timeout=120)
    processes[1].kill()
    processes[1].join()
    assert processes[0].exitcode == 0, (meet / "trace0").read_text()
    return (meet / "told").read_text()


def over_ranks(folder: Path) -> list[Row]:
    """The rows of two ranks."""
    (counts, full, step), (others, also, step_too) = run(together, 2, str(folder))
    assert (counts, full, step) == (others, also, step_too)
    assert step == 2
    infs = f"{sum(counts)} cases: each parameter, rank, micro-batch; DDP, `fully_shard`"
    return [
        Row("inf in a gradient of one rank", infs, "all ranks skip: " + SKIPPED),
        Row("a loader that raises on one rank", "rank 1 of 2, step 3", lose(folder, "raise")),
        Row("a rank that is killed", "rank 1 of 2, step 3", lose(folder, "kill")),
        Row("a rank that hangs", "rank 1 of 2, step 3, `watchdog(seconds=8)`", lose(folder, "hang")),
        Row("a full disk of one rank", "rank 1 of 2; reported on both", full),
        Row(
            "SIGTERM on one rank",
            "in a step that is saved anyway",
            "all ranks end after that step with status 0",
        ),
    ]
