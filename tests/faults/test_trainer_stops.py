"""Ways in which a training ends early: SIGTERM, a callback, no improvement, NaN; and whose folder it is."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.checkpoint import CheckpointFolder
from halfstep.errors import CheckpointError, ConfigError, HalfstepWarning, NonFiniteError
from halfstep.recipes.data import Batches
from halfstep.trainer import Callback, EarlyStopping, Trainer

GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(60, 6, generator=GENERATOR)
Y = (X.sum(1) > 0).long()


def loader():
    return Batches(X, Y, 8, seed=3)


def make(loss=nn.functional.cross_entropy, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    options = {"level": "O1", "dtype": "bf16", "progress": False, **options}
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_a_folder_of_another_run_is_refused_before_training(tmp_path):
    make(checkpoints=tmp_path, checkpoint_every=2).fit(loader(), steps=4)
    again = make(checkpoints=tmp_path, checkpoint_every=1)
    before = weights(again).clone()
    with pytest.raises(CheckpointError, match=r"another run .*resume=True"):
        again.fit(loader(), steps=8)
    assert torch.equal(weights(again), before)
    assert len(CheckpointFolder(tmp_path).paths()) == 2
    assert again.fit(loader(), steps=8, resume=True).steps[0].step == 5
    assert again.fit(loader(), steps=9).steps[0].step == 9


def test_a_damaged_newest_checkpoint_is_told_and_the_run_goes_on(tmp_path):
    whole = make()
    whole.fit(loader(), steps=8)
    make(checkpoints=tmp_path, checkpoint_every=2).fit(loader(), steps=6)
    newest = CheckpointFolder(tmp_path).paths()[-1]
    (file,) = newest.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    again = make(checkpoints=tmp_path, checkpoint_every=2)
    with pytest.warns(HalfstepWarning, match=r"step-00000006/.* is corrupt.*going on from step-00000004"):
        assert again.fit(loader(), steps=8, resume=True).steps[0].step == 5
    assert torch.equal(weights(again), weights(whole))
    assert [path.name for path in CheckpointFolder(tmp_path).paths()][-2:] == [
        "step-00000006",
        "step-00000008",
    ]


def test_a_folder_of_damaged_checkpoints_alone_is_refused(tmp_path):
    make(checkpoints=tmp_path, checkpoint_every=2, keep=2).fit(loader(), steps=4)
    for path in CheckpointFolder(tmp_path).paths():
        (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="no earlier checkpoint that can be read: start afresh"):
        make(checkpoints=tmp_path).fit(loader(), steps=8, resume=True)


def test_a_checkpoint_of_a_later_version_is_refused_and_stays(tmp_path):
    make(checkpoints=tmp_path, checkpoint_every=2).fit(loader(), steps=4)
    manifest = tmp_path / "step-00000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 99'))
    with pytest.raises(CheckpointError, match="layout 99"):
        make(checkpoints=tmp_path).fit(loader(), steps=8, resume=True)
    assert manifest.exists()


def test_saves_in_the_background_are_of_their_step_and_resume_bit_for_bit(tmp_path):
    whole = make()
    whole.fit(loader(), steps=9)
    options = {"checkpoints": tmp_path, "checkpoint_every": 2, "keep": 2, "background_saves": True}
    first = make(**options)
    first.fit(loader(), steps=7)
    assert [p.name for p in CheckpointFolder(tmp_path).paths()] == ["step-00000004", "step-00000006"]
    assert first.save() == tmp_path / "step-00000007"
    first.amp.wait_until_saved()
    again = make(**options)
    assert again.fit(loader(), steps=9, resume=True).steps[0].step == 8
    assert torch.equal(weights(again), weights(whole))


@pytest.mark.parametrize("steps", [2, 5])
def test_what_fails_in_the_background_ends_the_training_by_name(tmp_path, steps):
    trainer = make(checkpoints=tmp_path, checkpoint_every=2, background_saves=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002: no room"):
            trainer.fit(loader(), steps=steps)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not CheckpointFolder(tmp_path).paths()


CHILD = """
import sys, time, torch
from tests.faults.test_trainer_stops import Callback, make, loader
torch.set_num_threads(1)
class Slow(Callback):
    def on_step_end(self, trainer):
        time.sleep(0.01)
        print(trainer.step, flush=True)
make(checkpoints=sys.argv[1], callbacks=[Slow()]).fit(loader(), steps=100000)
"""


def test_sigterm_saves_and_exits_0_and_the_run_goes_on_as_if_nothing_had_been(tmp_path):
    command = [sys.executable, "-W", "error", "-c", CHILD, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    child = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    while child.stdout.readline() != "3\n":
        pass
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=120)
    assert child.returncode == 0
    (path,) = CheckpointFolder(tmp_path).paths()
    step = int(path.name[-8:])
    resumed, whole = make(checkpoints=tmp_path), make()
    resumed.fit(loader(), steps=step + 5, resume=True)
    whole.fit(loader(), steps=step + 5)
    assert torch.equal(weights(resumed), weights(whole))


def test_without_a_folder_sigterm_is_left_alone():
    seen = []

    class Look(Callback):
        def on_step_end(self, trainer):
            seen.append(signal.getsignal(signal.SIGTERM))

    make(callbacks=[Look()]).fit(loader(), steps=1)
    assert seen == [signal.SIG_DFL]


class StopAt(Callback):
    def __init__(self, step):
        self.at = step

    def on_step_end(self, trainer):
        if trainer.step == self.at:
            trainer.stop("enough")


def test_a_callback_stops_the_training():
    history = make(callbacks=[StopAt(3)]).fit(loader(), steps=10)
    assert (len(history.steps), history.stopped) == (3, "enough")


def test_early_stopping_ends_a_run_that_no_longer_improves():
    stopping = EarlyStopping([(X, Y)], patience=2, every=5, least=10.0)
    trainer = make(callbacks=[stopping])
    history = trainer.fit(loader(), steps=100)
    assert len(history.steps) == 15
    assert history.stopped.startswith("loss has not improved on ")
    assert (
        make(callbacks=[EarlyStopping([(X, Y)], patience=2, every=5)]).fit(loader(), steps=20).stopped == ""
    )
    with pytest.raises(ConfigError, match=r"metric='f1'.*measures \['loss'\]"):
        make(callbacks=[EarlyStopping([(X, Y)], "f1", every=1)]).fit(loader(), steps=2)
    with pytest.raises(ConfigError, match="patience=0"):
        EarlyStopping([(X, Y)], patience=0)


def nan_loss(output, target):
    return output.sum() * float("nan")


def test_a_nan_is_told_once_by_step_and_parameter():
    trainer = make(nan_loss)
    with pytest.warns(HalfstepWarning) as caught:
        trainer.fit(loader(), steps=5)
    first = [str(w.message) for w in caught if "gradients" in str(w.message)]
    assert len(first) == 1
    assert "step 1: gradients of 4 of 4 parameters (first: 0.weight) hold inf or NaN" in first[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_raise_stops_with_the_weights_of_before(dtype):
    trainer = make(nan_loss, dtype=dtype, on_nonfinite="raise")
    before = weights(trainer).clone()
    with pytest.raises(NonFiniteError, match=r"step 1: (the loss is nan|gradients of 4 of 4)"):
        trainer.fit(loader(), steps=5)
    assert torch.equal(weights(trainer), before)


def test_raise_lets_a_dynamic_scale_find_its_value():
    model = nn.Linear(2, 1)
    amp = hs.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="fp16", loss_scale="dynamic",
        on_nonfinite="raise",
    )  # fmt: skip
    with amp.autocast():
        loss = model(torch.full((1, 2), 100.0)).sum()
    amp.backward(loss)
    model.weight.grad[0, 0] = float("inf")
    assert not amp.step().taken


def test_skip_and_continue():
    skipping = make(nan_loss, on_nonfinite="skip")
    before = weights(skipping).clone()
    assert skipping.fit(loader(), steps=3).skipped == [1, 2, 3]
    assert torch.equal(weights(skipping), before)
    model = nn.Linear(2, 1)
    amp = hs.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16", on_nonfinite="continue"
    )
    with amp.autocast():
        loss = model(torch.ones(1, 2)).sum() * float("nan")
    amp.backward(loss)
    assert amp.step().taken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "stop"}, "on_nonfinite='stop': expected 'raise'"),
        ({"on_nonfinite": "skip", "skip_nonfinite": False}, "drop one"),
        ({"on_nonfinite": "continue", "loss_scale": 8.0}, "with a loss scale"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(options, message):
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=message):
        hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16", **options)
    assert model.weight.dtype == torch.float32
