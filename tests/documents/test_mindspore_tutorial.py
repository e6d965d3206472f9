"""MindSpore's mixed-precision tutorial as its readers write it; only the imports and the data path differ."""

# ruff: noqa: RET504  (the document's own lines)
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import nn, value_and_grad
from halfstep.compat.mindspore.amp import (
    DynamicLossScaler,
    FixedLossScaleManager,
    all_finite,
    auto_mixed_precision,
    build_train_network,
)
from halfstep.compat.mindspore.dataset import MnistDataset, transforms, vision
from halfstep.compat.mindspore.train import LossMonitor, Model, RunContext
from halfstep.errors import HalfstepWarning
from halfstep.recipes.data import digits

EXAMPLES = Path(__file__).parents[2] / "examples"


def datapipe(path, batch_size):
    image_transforms = [
        vision.Rescale(1.0 / 255.0, 0),
        vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        vision.HWC2CHW(),
    ]
    label_transform = transforms.TypeCast(ms.int32)

    dataset = MnistDataset(path)
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(label_transform, "label")
    dataset = dataset.batch(batch_size)
    return dataset


class Network(nn.Cell):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(
            nn.Dense(28 * 28, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10)
        )

    def construct(self, x):
        x = self.flatten(x)
        logits = self.dense_relu_sequential(x)
        return logits


class NetworkFP16(nn.Cell):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(
            nn.Dense(28 * 28, 512).to_float(ms.float16),
            nn.ReLU(),
            nn.Dense(512, 512).to_float(ms.float16),
            nn.ReLU(),
            nn.Dense(512, 10).to_float(ms.float16),
        )

    def construct(self, x):
        x = self.flatten(x)
        logits = self.dense_relu_sequential(x)
        return logits


class NetworkFP16Manual(Network):
    def construct(self, x):
        x = self.flatten(x)
        x = x.astype(ms.float16)
        logits = self.dense_relu_sequential(x)
        logits = logits.astype(ms.float32)
        return logits


def functional_form(model, train_dataset, every):
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)

    loss_scaler = DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=50)

    def forward_fn(data, label):
        logits = model(data)
        loss = loss_fn(logits, label)
        # scale up the loss value
        loss = loss_scaler.scale(loss)
        return loss, logits

    grad_fn = value_and_grad(forward_fn, None, model.trainable_params(), has_aux=True)

    @ms.jit
    def train_step(data, label):
        (loss, _), grads = grad_fn(data, label)
        loss = loss_scaler.unscale(loss)

        is_finite = all_finite(grads)
        if is_finite:
            grads = loss_scaler.unscale(grads)
            optimizer(grads)
        loss_scaler.adjust(is_finite)

        return loss

    size = train_dataset.get_dataset_size()
    model.set_train()
    for batch, (data, label) in enumerate(train_dataset.create_tuple_iterator()):
        loss = train_step(data, label)

        if batch % every == 0:
            loss, current = loss.asnumpy(), batch
            print(f"loss: {loss:>7f}  [{current:>3d}/{size:>3d}]")


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """A folder of bundled digits, drawn with replacement to a length, in MNIST's own files."""

    def write(samples):
        folder = tmp_path_factory.mktemp("MNIST_Data")
        data = digits()
        taken = torch.randint(0, len(data.train_x), (samples,), generator=torch.Generator().manual_seed(0))
        images = data.train_x[taken, 0].round().byte().numpy()
        for name, kind, values in (
            ("train-images-idx3-ubyte", 0x803, images),
            ("train-labels-idx1-ubyte", 0x801, data.train_y[taken].byte().numpy()),
        ):
            header = np.array([kind, *values.shape], ">u4").tobytes()
            (folder / name).write_bytes(header + values.tobytes())
        return folder

    return write


def printed_losses(capsys):
    return [float(x) for x in re.findall(r"loss: +([\d.]+|nan) ", capsys.readouterr().out)]


def test_the_functional_form_at_o2(mnist, capsys):
    train_dataset = datapipe(mnist(200 * 64), 64)
    model = auto_mixed_precision(Network(), "O2")
    functional_form(model, train_dataset, 40)
    losses = printed_losses(capsys)
    assert len(losses) == 5
    assert losses[0] == pytest.approx(2.3, abs=0.1)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6


@pytest.mark.parametrize("network", [NetworkFP16, NetworkFP16Manual])
def test_the_functional_form_cast_by_hand(mnist, capsys, network):
    functional_form(network(), datapipe(mnist(60 * 64), 64), 20)
    losses = printed_losses(capsys)
    assert losses[0] == pytest.approx(2.3, abs=0.1)
    assert losses[-1] < losses[1] < losses[0] - 0.1


def test_build_train_network(mnist):
    optimizer = nn.SGD(Network().trainable_params(), 1e-2)  # the tutorial keeps the earlier model's
    loss_fn = nn.CrossEntropyLoss()

    model = Network()
    loss_scale_manager = FixedLossScaleManager()
    with pytest.warns(HalfstepWarning, match="they will not be trained"):
        build_train_network(model, optimizer, loss_fn, level="O2", loss_scale_manager=loss_scale_manager)

    model = Network()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    model = build_train_network(model, optimizer, loss_fn, level="O2", loss_scale_manager=loss_scale_manager)
    losses = []
    for data, label in datapipe(mnist(80 * 64), 64).create_tuple_iterator():
        loss, overflow, scale = model(data, label)
        assert (bool(overflow), scale.asnumpy()) == (False, 128.0)
        losses.append(loss.asnumpy().item())
    assert losses[0] == pytest.approx(2.3, abs=0.1)
    assert losses[-1] < 1.6


def model_form(train_dataset, epochs):
    model = Network()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)

    loss_scale_manager = FixedLossScaleManager()
    trainer = Model(
        model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        metrics={"accuracy"},
        amp_level="O2",
        loss_scale_manager=loss_scale_manager,
    )

    loss_callback = LossMonitor(100)
    trainer.train(epochs, train_dataset, callbacks=[loss_callback])
    return trainer


def monitored(capsys):
    found = re.findall(r"epoch: (\d+) step: (\d+), loss is ([\d.]+)", capsys.readouterr().out)
    return [(int(epoch), int(step), float(loss)) for epoch, step, loss in found]


def test_model_train(mnist, capsys):
    train_dataset = datapipe(mnist(130 * 64), 64)
    trainer = model_form(train_dataset, 2)
    (first, second) = monitored(capsys)
    assert (first[:2], second[:2]) == ((1, 100), (2, 70))
    assert second[2] < 0.6 < first[2] < 1.5
    assert trainer.eval(train_dataset)["accuracy"] > 0.9


def test_loss_monitor_counts_across_ten_epochs(capsys):
    monitor = LossMonitor(100)
    context = RunContext(ms.train.CallbackParam(batch_num=938, net_outputs=torch.tensor(0.25)))
    now = context.original_args()
    for now.cur_step_num in range(1, 9381):
        now.cur_epoch_num = (now.cur_step_num - 1) // 938 + 1
        monitor.on_train_step_end(context)
    lines = monitored(capsys)
    assert len(lines) == 93
    assert lines[:2] == [(1, 100, 0.25), (1, 200, 0.25)]
    assert [step for epoch, step, _ in lines if epoch == 10] == list(range(58, 859, 100))


@pytest.fixture
def run(capsys, monkeypatch):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_example_runs_all_three_forms(run):
    printed = run("mindspore_tutorial.py", "--batches", "40", "--epochs", "3")
    assert printed.count("---") == 3
    losses = [float(x) for x in re.findall(r"loss: +([\d.]+)", printed)]
    assert len(losses) == 4
    assert losses[1] < losses[0] - 0.2
    assert losses[3] < losses[2] - 0.2
    assert "epoch: 3 step: 20, loss is " in printed


@pytest.mark.filterwarnings("ignore:.* beside it")
def test_the_example_as_published_starts_like_the_printed_curve(run):
    printed = run("mindspore_tutorial.py", "--as-published", "--batches", "201")
    losses = [float(x) for x in re.findall(r"loss: +([\d.]+)", printed)]
    assert losses[:3] == pytest.approx(
        [2.305, 2.289, 2.259], abs=0.25
    )  # MNIST's are printed, these are digits
    assert losses[0] == pytest.approx(2.305, abs=0.01)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.filterwarnings("ignore:.* beside it")
def test_the_tutorial_as_printed_ends_in_nan_with_todays_initialisation(mnist):
    model = auto_mixed_precision(Network(), "O2")
    loss_fn, optimizer = nn.CrossEntropyLoss(), nn.SGD(model.trainable_params(), 1e-2)

    def forward_fn(data, label):
        logits = model(data)
        return loss_fn(logits, label), logits

    grad_fn = value_and_grad(forward_fn, None, model.trainable_params())  # the logits count too
    for data, label in datapipe(mnist(200 * 64), 64).create_tuple_iterator():
        (loss, _), grads = grad_fn(data, label)
        if not bool(torch.isfinite(loss)):
            return
        optimizer(grads)
    raise AssertionError(f"200 steps and still {loss.item()}")


def test_the_example_of_manual_casting(run):
    lines = run("manual_casting.py").splitlines()
    assert len(lines) == 5
    for line, hidden in zip(lines, ["float32", *["float16"] * 4], strict=True):
        assert float(re.search(r"accuracy ([\d.]+)", line)[1]) > 0.97
        assert line.endswith(f"weights float32, hidden layer {hidden}")


@pytest.mark.exhaustive
def test_the_functional_form_at_full_length(mnist, capsys):
    train_dataset = datapipe(mnist(60_000), 64)
    functional_form(auto_mixed_precision(Network(), "O2"), train_dataset, 100)
    losses = printed_losses(capsys)
    assert len(losses) == 10
    assert losses[0] == pytest.approx(2.3, abs=0.1)
    assert losses[-1] < 0.6


@pytest.mark.exhaustive
def test_model_train_for_ten_epochs(mnist, capsys):
    model_form(datapipe(mnist(60_000), 64), 10)
    lines = monitored(capsys)
    last = [(step, loss) for epoch, step, loss in lines if epoch == 10]
    assert [step for step, _ in last] == list(range(58, 859, 100))
    assert max(loss for _, loss in last) < 0.25
