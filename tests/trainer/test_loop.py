"""The Trainer: fit, evaluate, callbacks, loggers, what it refuses."""

import io

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import CheckpointError, ConfigError, DataError, HalfstepWarning, LossScaleCollapsed
from halfstep.recipes.data import Batches
from halfstep.trainer import Callback, ProgressBar, Trainer, accuracy

_generator = torch.Generator().manual_seed(3)
X = torch.randn(64, 5, generator=_generator)
Y = (X[:, 0] > 0).long()


def make(level="O0", loss=nn.functional.cross_entropy, lr=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    options.setdefault("dtype", None if level == "O0" else "bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Trainer(model, optimizer, loss, level=level, progress=False, **options)


def batches(size=16):
    return Batches(X, Y, size)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_it_learns_at_every_level(level):
    trainer = make(level, lr=0.5, metrics={"accuracy": accuracy})
    history = trainer.fit(batches(), epochs=30)
    assert len(history.steps) == 30 * 4
    assert history.steps[-1].step == trainer.step == 120
    assert history.losses[-1] < 0.5 * history.losses[0]
    assert trainer.evaluate([(X, Y)])["accuracy"] > 0.9


def test_o0_is_bit_for_bit_the_plain_loop():
    trainer = make()
    trainer.fit(batches(), steps=10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, done = batches(), 0
    while done < 10:
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == 10:
                break
    for one, other in zip(trainer.model.parameters(), model.parameters()):
        assert torch.equal(one, other)


def test_accumulated_batches_make_one_step():
    small, big = make(accumulate=2), make()
    small.fit(list(zip(X.split(16), Y.split(16))), steps=2)
    big.fit(list(zip(X.split(32), Y.split(32))), steps=2)
    for one, other in zip(small.model.parameters(), big.model.parameters()):
        torch.testing.assert_close(one, other)
    assert small.history.losses == pytest.approx(big.history.losses, rel=1e-6)


def test_evaluation_is_a_weighted_mean_and_leaves_the_mode():
    trainer = make(metrics={"accuracy": accuracy})
    parts = trainer.evaluate([(X[:40], Y[:40]), (X[40:], Y[40:])])
    whole = trainer.evaluate([(X, Y)])
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert parts["accuracy"] == pytest.approx(whole["accuracy"], rel=1e-6)
    assert trainer.model.training
    with pytest.raises(DataError, match="no batches"):
        trainer.evaluate([])


def test_a_metric_may_be_a_python_number_and_what_is_left_of_a_pass_goes_on():
    trainer = make(metrics={"hits": lambda output, y: int((output.argmax(1) == y).sum())}, accumulate=2)
    history = trainer.fit([(X, Y)] * 3, epochs=3)  # 9 batches
    assert len(history.steps) == 4
    assert 0 <= trainer.evaluate([(X, Y)])["hits"] <= len(X)
    assert trainer.fit([(X, Y)] * 3, epochs=3).steps == []  # in all, not once more


def test_a_metric_of_each_sample_is_refused_by_name():
    trainer = make(metrics={"hits": lambda output, y: (output.argmax(1) == y).float()})
    with pytest.raises(ConfigError, match=r"hits has shape \(\d+,\), expected one number"):
        trainer.evaluate([(X, Y)])


class Recorder(Callback):
    def __init__(self):
        self.events = []

    def on_fit_start(self, trainer, steps):
        self.events.append(("start", steps))

    def on_read(self, trainer, logs):
        self.events.append(("read", [log.step for log in logs]))

    def on_epoch_end(self, trainer):
        self.events.append(("epoch", trainer.epoch))

    def on_fit_end(self, trainer):
        self.events.append(("end", trainer.step))


class Log:
    def __init__(self):
        self.lines = []

    def log(self, step, values):
        self.lines.append((step, sorted(values)))


def test_callbacks_and_loggers_hear_in_order():
    heard, log = Recorder(), Log()
    trainer = make(callbacks=[heard], loggers=[log], read_every=3)
    trainer.fit(batches(), steps=7)
    trainer.evaluate([(X, Y)])
    assert heard.events == [
        ("start", 7), ("read", [1, 2, 3]), ("epoch", 1), ("read", [4, 5, 6]), ("read", [7]), ("end", 7),
    ]  # fmt: skip
    assert log.lines == [(s, ["loss", "scale", "skipped"]) for s in (3, 6, 7)] + [(7, ["test loss"])]


class NoLength:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


@pytest.mark.parametrize(("count", "accumulate", "steps"), [(4, 1, 8), (5, 2, 5), (3, 2, 3), (1, 2, 1)])
def test_every_pass_of_epochs_is_told_the_last_too(count, accumulate, steps):
    heard = Recorder()
    trainer = make(callbacks=[heard], accumulate=accumulate)
    trainer.fit([(X, Y)] * count, epochs=2)
    assert [value for event, value in heard.events if event == "epoch"] == [1, 2]
    assert heard.events[-1] == ("end", steps)


def test_batches_too_few_for_a_step_end_the_last_pass():
    heard = Recorder()
    make(callbacks=[heard], accumulate=2).fit([(X, Y)] * 3, epochs=1)
    assert [event for event in heard.events if event[0] != "read"] == [("start", 1), ("epoch", 1), ("end", 1)]


class StopAtPass(Callback):
    def on_epoch_end(self, trainer):
        trainer.stop("one pass")


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("trace", [True, False])
def test_a_stop_at_the_end_of_a_pass_trains_no_step_more_where_its_end_is_known(sized, trace):
    loader = [(X, Y)] * 3
    trainer = make(callbacks=[StopAtPass()], trace=trace)
    history = trainer.fit(loader if sized else NoLength(loader), steps=10)
    assert (len(history.steps), history.stopped, trainer.epoch) == (3 if sized else 4, "one pass", 1)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("saved_at", [3, 4, 5])
def test_a_resumed_run_tells_each_end_once(tmp_path, own, saved_at):
    def loader():
        return batches() if own else [(X, Y)] * 4

    whole, first, second = Recorder(), Recorder(), Recorder()
    make(callbacks=[whole]).fit(loader(), steps=9)
    make(callbacks=[first], checkpoints=tmp_path, checkpoint_every=saved_at).fit(loader(), steps=saved_at)
    make(callbacks=[second], checkpoints=tmp_path).fit(loader(), steps=9, resume=True)
    epochs = [[e for e in heard.events if e[0] == "epoch"] for heard in (whole, first, second)]
    assert epochs[0] == epochs[1] + epochs[2] == [("epoch", 1), ("epoch", 2)]


def test_on_fit_end_is_told_of_an_error_too():
    heard = Recorder()
    trainer = make(callbacks=[heard])
    with pytest.raises(DataError):
        trainer.fit([(X, Y, 1)], steps=2)
    assert heard.events[-1] == ("end", 0)


@pytest.mark.parametrize(
    ("value", "kind"), [(float("nan"), "NaN or inf"), (float("inf"), "inf"), (-float("inf"), "inf")]
)
@pytest.mark.parametrize("part", ["input", "target"])
def test_bad_values_in_the_data_are_named_before_they_spoil_a_weight(part, value, kind):
    trainer = make(loss=lambda out, y: ((out - y) ** 2).mean())
    x, y = X.clone(), torch.randn(64, 2)
    before = [p.clone() for p in trainer.model.parameters()]
    (x if part == "input" else y)[7, 1] = value
    with pytest.raises(DataError, match=f"the {part} of the batch for step 1 holds 1 values of {kind}"):
        trainer.fit([(x, y)], steps=1)
    for one, other in zip(trainer.model.parameters(), before):
        assert torch.equal(one, other)


def test_huge_but_finite_data_is_no_error():
    trainer = make(loss=lambda out, y: (out * 0.0).mean())
    trainer.fit([(torch.full((4, 5), 3e38), Y[:4])], steps=1)
    assert trainer.step == 1


def test_a_diverging_run_warns_once_and_says_where():
    calls = []

    def loss(out, y):
        calls.append(1)
        return out.mean() * (float("inf") if len(calls) == 3 else 1.0)

    trainer = make(loss=loss, read_every=1)
    with pytest.warns(HalfstepWarning) as caught:
        history = trainer.fit(batches(), steps=6)
    (told,) = [str(w.message) for w in caught]
    assert "step 3: gradients of 4 of 4 parameters (first: 0.weight) hold inf or NaN" in told
    assert history.diverged_at == 3


def test_skipped_steps_are_in_the_history():
    calls = []

    def loss(out, y):
        calls.append(1)
        return out.float().mean() * (float("inf") if len(calls) == 3 else 1.0)

    history = make("O1", loss, dtype="fp16").fit(batches(), steps=5)
    assert history.skipped == [3]
    scales = [log.scale for log in history.steps]
    assert scales == [65536.0] * 3 + [32768.0] * 2
    assert history.diverged_at is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give exactly one"),
        ({"steps": 3, "epochs": 1}, "give exactly one"),
        ({"steps": 0}, "at least 1"),
        ({"epochs": 0}, "at least 1"),
        ({"steps": "a"}, "steps='a'.*whole number"),
        ({"steps": 1.5}, "steps=1.5.*whole number"),
    ],
)
def test_how_long_must_be_said_once(options, message):
    with pytest.raises(ConfigError, match=message):
        make().fit(batches(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"read_every": 0}, "read_every=0"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1"),
        ({"checkpoint_every": 5}, "without a folder"),
        ({"checkpoint_every": "a"}, "checkpoint_every='a'"),
        ({"checkpoints": 3}, "checkpoints=3.*path"),
        ({"callbacks": 3}, "callbacks=3.*list"),
        ({"metrics": [1]}, "metrics=.*functions"),
        ({"level": "O9"}, "O9"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**{"level": "O1", **options})


def test_wrong_models_optimizers_and_loaders_are_refused():
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="not the model's"):
        Trainer(nn.Linear(2, 2), stranger, nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="without parameters"):
        Trainer(nn.ReLU(), stranger, nn.functional.mse_loss)
    with pytest.raises(DataError, match="no batches"):
        make().fit([], steps=3)
    with pytest.raises(ConfigError, match="has no length"):
        make().fit(iter([(X, Y)]), epochs=1)
    with pytest.raises(ConfigError, match="NoneType as a loader"):
        make().fit(None, steps=1)
    with pytest.raises(ConfigError, match="loss_fn=None"):
        Trainer(nn.Linear(2, 2), stranger, None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="expected a pair"):
        make().fit([X], steps=1)


def test_resume_needs_a_folder_of_this_model(tmp_path):
    with pytest.raises(ConfigError, match="without a checkpoint folder"):
        make().fit(batches(), steps=1, resume=True)
    with pytest.raises(ConfigError, match="no checkpoint folder"):
        make().save()
    make(checkpoints=tmp_path, checkpoint_every=2).fit(batches(), steps=2)
    torch.manual_seed(0)
    other = nn.Linear(5, 2)
    trainer = Trainer(
        other, torch.optim.SGD(other.parameters(), lr=0.1), nn.functional.cross_entropy, level="O0",
        checkpoints=tmp_path, progress=False,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="of another model"):
        trainer.fit(batches(), steps=4, resume=True)
    with pytest.raises(CheckpointError, match="another kind of loader"):
        make(checkpoints=tmp_path).fit([(X, Y)], steps=4, resume=True)
    (tmp_path / "step-00000002" / "manifest.json").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="damaged"):
        make(checkpoints=tmp_path).fit(batches(), steps=4, resume=True)


def test_another_thread_count_is_told(tmp_path, monkeypatch):
    make(checkpoints=tmp_path, checkpoint_every=2).fit(batches(), steps=2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.warns(HalfstepWarning, match="and resumes with 77"):
        make(checkpoints=tmp_path).fit(batches(), steps=3, resume=True)


def test_the_progress_bar_draws_to_standard_error(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    make(callbacks=[ProgressBar()], read_every=2).fit(batches(), steps=5)
    assert "training" in screen.getvalue()
    assert "loss" in screen.getvalue()


def test_no_bar_without_a_terminal(capsys):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    Trainer(model, torch.optim.SGD(model.parameters(), 0.1), nn.functional.cross_entropy, level="O0").fit(
        batches(), steps=2
    )
    assert capsys.readouterr() == ("", "")


def test_a_run_that_collapses_still_tells_its_steps():
    trainer = make("O1", lambda out, y: out.float().mean() * float("inf"), dtype="fp16", read_every=1000)
    with (
        pytest.warns(HalfstepWarning, match="5 steps in a row were skipped"),
        pytest.raises(LossScaleCollapsed),
    ):
        trainer.fit(batches(), steps=100)
    assert len(trainer.history.skipped) >= 48


def test_evaluation_leaves_frozen_parts_in_their_mode():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy)
    model[1].eval()
    trainer.evaluate([(torch.ones(2, 6), torch.tensor([0, 1]))])
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    with pytest.raises(DataError):
        trainer.evaluate([(torch.full((2, 6), float("nan")), torch.tensor([0, 1]))])
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def scheduled(**options) -> Trainer:
    trainer = make(**options)
    trainer.schedulers = [torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)]
    return trainer


def with_fewer_parameters(**options) -> Trainer:
    trainer = make(**options)
    trainer.optimizer.param_groups[0]["params"] = trainer.optimizer.param_groups[0]["params"][::2]
    return trainer


@pytest.mark.parametrize(
    ("resumed", "message"),
    [
        (scheduled, "the checkpoint holds 0 schedulers, 1 were given"),
        (lambda **options: make("O1", **options), "saved with level O0"),
        (with_fewer_parameters, "of another optimizer|holds other parameters"),
    ],
)
def test_a_checkpoint_of_another_setup_changes_nothing(tmp_path, resumed, message):
    one = make(checkpoints=tmp_path)
    one.fit([(X, Y)], steps=2)
    one.save()
    other = resumed(checkpoints=tmp_path)
    before = other.model[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=message):
        other.fit([(X, Y)], steps=3, resume=True)
    assert torch.equal(before, other.model[0].weight)


def test_a_generator_that_ran_out_is_told():
    with pytest.raises(DataError, match=r"gave no batches.*a generator can be read once"):
        make().fit(((X, Y) for _ in range(3)), steps=5)


def test_level_auto_is_refused_with_the_way_to_do_it():
    model = nn.Linear(4, 2)
    with pytest.raises(ConfigError, match=r"hs\.tune\(model, optimizer, step, x, y\)"):
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), level="auto")


class Stream(torch.utils.data.IterableDataset):
    """Ten pairs; nobody knows their number."""

    def __iter__(self):
        return iter(zip(X[:10], Y[:10]))


def test_a_loader_of_a_data_set_without_a_length_is_trained_on():
    loader = torch.utils.data.DataLoader(Stream(), batch_size=4)
    trainer = make()
    trainer.fit(loader, steps=5)
    assert (trainer.step, trainer.epoch) == (5, 1)
    with pytest.raises(ConfigError, match=r"a DataLoader has no length; give steps="):
        make().fit(loader, epochs=1)


def test_released_gradients_wait_for_the_last_batch_of_a_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = hs.optim.SGD(model.parameters(), lr=0.1, release_gradients=True)
    loss = nn.functional.cross_entropy
    trainer = Trainer(model, optimizer, loss, level="O2", dtype="bf16", accumulate=2, progress=False)
    history = trainer.fit(batches(), steps=8)
    assert history.losses[-1] < history.losses[0]
