"""Law 9: resume is bit-identical; stop at any step, even by kill -9 in the middle of a save."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import checkpoint
from halfstep.errors import HalfstepWarning
from halfstep.optim import AdamW
from halfstep.recipes.data import Batches
from halfstep.session import prepare
from halfstep.trainer import Trainer

STEPS = 14

_generator = torch.Generator().manual_seed(7)
X = torch.randn(60, 6, generator=_generator)
Y = (X.sum(1) > 0).long()


def own_loader():
    return Batches(X, Y, 8, seed=3)


def torch_loader():
    return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)


def torch_loader_with_generator():
    generator = torch.Generator().manual_seed(11)
    return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=generator)


LOADERS = [own_loader, torch_loader, torch_loader_with_generator]
SETTINGS = [("O0", None), ("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]


def make(folder, level="O1", dtype="bf16", every=5, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    return Trainer(
        model,
        optimizer,
        nn.functional.cross_entropy,
        level=level,
        dtype=dtype,
        scheduler=scheduler,
        clip_norm=1.0,
        accumulate=2,
        checkpoints=folder,
        checkpoint_every=every,
        progress=False,
    )


def weights(trainer):
    masters = {f"master {n}": p for n, p in enumerate(trainer.optimizer.param_groups[0]["params"])}
    found = {**trainer.model.state_dict(), **masters}
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("level", "dtype"), SETTINGS)
def test_a_resumed_run_ends_with_the_weights_of_the_unstopped_one(tmp_path, level, dtype, loader):
    whole = make(tmp_path / "a", level, dtype, every=0)
    losses = whole.fit(loader(), steps=STEPS).losses

    make(tmp_path / "b", level, dtype).fit(loader(), steps=12)
    random.seed(99)
    resumed = make(tmp_path / "b", level, dtype, seed=5)
    torch.manual_seed(123)
    again = resumed.fit(loader(), steps=STEPS, resume=True)

    assert again.steps[0].step == 11
    assert again.losses == losses[10:]
    assert_same(weights(resumed), weights(whole))
    assert resumed.amp.state_dict() == whole.amp.state_dict()
    assert torch.equal(torch.get_rng_state(), _after(whole, tmp_path, level, dtype, loader))


def _after(whole, tmp_path, level, dtype, loader):
    """The generator's state where the unstopped run ends."""
    again = make(tmp_path / "c", level, dtype, every=0)
    again.fit(loader(), steps=STEPS)
    assert_same(weights(again), weights(whole))
    return torch.get_rng_state()


def test_every_stop_is_as_good_as_another(tmp_path):
    whole = make(tmp_path / "a", "O2", "fp16", every=0)
    whole.fit(own_loader(), steps=9)
    for stop in range(1, 9):
        folder = tmp_path / str(stop)
        make(folder, "O2", "fp16", every=stop).fit(own_loader(), steps=stop)
        resumed = make(folder, "O2", "fp16", every=0, seed=stop)
        resumed.fit(own_loader(), steps=9, resume=True)
        assert_same(weights(resumed), weights(whole))


CHILD = """
import sys, torch
from tests.laws.test_law_09_resume import make, own_loader
torch.set_num_threads(1)
trainer = make(sys.argv[1], "O2", "bf16", every=1)
print("ready", flush=True)
trainer.fit(own_loader(), steps=100000, resume=True)
"""


def test_kill_9_leaves_a_folder_to_resume_from(tmp_path):
    """A child saves at every step; it is killed again and again at no particular moment."""
    folder = tmp_path / "run"
    saved = checkpoint.CheckpointFolder(folder)
    newest = 0
    for turn in range(2):
        child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, str(folder)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        until = time.monotonic() + 60
        while not (saved.paths() and saved.paths()[-1].name > f"step-{newest + 2:08d}"):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.013 * turn)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        step = int(saved.paths()[-1].name[-8:])
        assert step > newest
        newest = step
    whole = make(tmp_path / "whole", "O2", "bf16", every=0)
    whole.fit(own_loader(), steps=newest + 3)
    resumed = make(folder, "O2", "bf16", every=0, seed=9)
    resumed.fit(own_loader(), steps=newest + 3, resume=True)
    assert_same(weights(resumed), weights(whole))


INSIDE = """
import os, signal, sys, torch
from halfstep import checkpoint
written = []
real = getattr(os, sys.argv[2])
def dies(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save(sys.argv[1] + "/a.pt", {"step": 1, "weights": torch.ones(1000)})
setattr(os, sys.argv[2], dies)
checkpoint.save(sys.argv[1] + "/a.pt", {"step": 2, "weights": torch.zeros(1000)})
"""


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_killed_inside_a_save_the_old_checkpoint_stands(tmp_path, moment):
    killed = subprocess.run([sys.executable, "-c", INSIDE, str(tmp_path), moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    state = checkpoint.load(tmp_path / "a.pt")
    assert state["step"] == 1
    assert torch.equal(state["weights"], torch.ones(1000))


@pytest.mark.parametrize("bytes_kept", [0, 1, 100, 1000])
def test_a_save_cut_short_on_the_disk_is_seen(tmp_path, bytes_kept):
    """What a file system without working renames could leave behind is refused, not half read."""
    path = checkpoint.save(tmp_path / "a.pt", {"weights": torch.arange(1000.0)})
    path.write_bytes(path.read_bytes()[:bytes_kept])
    with pytest.raises(checkpoint.CheckpointError, match="corrupt or not a checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_released_gradients_are_clipped_after_a_resume_as_without_one(dtype, tmp_path):
    """The next backward clips by the norm of the step before: a checkpoint has to hold it."""

    def build():
        torch.manual_seed(2)
        model = nn.Linear(6, 2)
        optimizer = AdamW(model.parameters(), lr=0.02, release_gradients=True)
        return model, optimizer, prepare(model, optimizer, level="O2", dtype=dtype, loss_scale="none")

    def train(model, amp, steps):
        for step in steps:
            with amp.autocast():
                loss = nn.functional.cross_entropy(100.0 * model(X[step::STEPS]), Y[step::STEPS])
            amp.backward(loss)
            with nullcontext() if step else pytest.warns(HalfstepWarning, match="was not clipped"):
                amp.step(clip_norm=0.1)

    model, optimizer, amp = build()
    train(model, amp, range(4))
    parts = {"model": model, "optimizer": optimizer, "amp": amp}
    checkpoint.save(tmp_path / "one", {name: part.state_dict() for name, part in parts.items()})
    train(model, amp, range(4, 8))
    again, its_optimizer, resumed = build()
    saved = checkpoint.load(tmp_path / "one")
    for name, part in {"model": again, "optimizer": its_optimizer, "amp": resumed}.items():
        part.load_state_dict(saved[name])
    train(again, resumed, range(4, 8))
    assert torch.equal(model.weight, again.weight)
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(optimizer.master_of(p), its_optimizer.master_of(q))
