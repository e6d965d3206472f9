"""MindSpore's mixed-precision tutorial in its three forms; only the imports and the data path have changed.

Bundled handwritten digits stand in for MNIST: scaled up to 28x28 and written as MNIST's own IDX files.

    python examples/mindspore_tutorial.py [--batches 200] [--data FOLDER]

With `--batches 938` an epoch is as long as MNIST's; `--data` reads real MNIST instead. `--as-published` runs
the first form alone, with the initialisation that MindSpore had when the tutorial was printed.
"""

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

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
from halfstep.compat.mindspore.train import LossMonitor, Model


def write_digits(folder, samples):
    """The bundled digits, drawn with replacement, as train-images and train-labels of MNIST's format."""
    bundled = load_digits()
    small = torch.tensor(bundled.images, dtype=torch.float32)[:, None] * (255 / 16)
    images = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear")[:, 0]
    taken = np.random.default_rng(0).integers(0, len(images), samples)
    images = images.round().byte().numpy()[taken]
    labels = bundled.target[taken].astype(np.uint8)
    for name, kind, values in (("images-idx3", 0x803, images), ("labels-idx1", 0x801, labels)):
        header = np.array([kind, *values.shape], ">u4").tobytes()
        (folder / f"train-{name}-ubyte").write_bytes(header + values.tobytes())


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
    return dataset.batch(batch_size)


class Network(nn.Cell):
    def __init__(self, **init):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.SequentialCell(
            nn.Dense(28 * 28, 512, **init),
            nn.ReLU(),
            nn.Dense(512, 512, **init),
            nn.ReLU(),
            nn.Dense(512, 10, **init),
        )

    def construct(self, x):
        x = self.flatten(x)
        return self.dense_relu_sequential(x)


def functional(train_dataset, has_aux=True, **init):
    model = auto_mixed_precision(Network(**init), "O2")
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    loss_scaler = DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=50)

    def forward_fn(data, label):
        logits = model(data)
        loss = loss_fn(logits, label)
        # scale up the loss value
        loss = loss_scaler.scale(loss)
        return loss, logits

    # without has_aux=True the sum of the logits is differentiated too, here as in MindSpore
    grad_fn = value_and_grad(forward_fn, None, model.trainable_params(), has_aux=has_aux)

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

        if batch % 100 == 0 or batch == size - 1:
            loss, current = loss.asnumpy(), batch
            print(f"loss: {loss:>7f}  [{current:>3d}/{size:>3d}]")


def by_cell(train_dataset):
    model = Network()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.SGD(model.trainable_params(), 1e-2)
    loss_scale_manager = FixedLossScaleManager()
    model = build_train_network(model, optimizer, loss_fn, level="O2", loss_scale_manager=loss_scale_manager)

    size = train_dataset.get_dataset_size()
    for batch, (data, label) in enumerate(train_dataset.create_tuple_iterator()):
        loss, overflow, scale = model(data, label)
        if batch % 100 == 0 or batch == size - 1:
            print(f"loss: {loss.asnumpy():>7f}, overflow: {bool(overflow)}, scale: {scale.asnumpy():g}")


def by_model(train_dataset, epochs):
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
    print("accuracy on the training data:", round(trainer.eval(train_dataset)["accuracy"], 4))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--batches", type=int, default=200, help="batches of 64 in an epoch of bundled digits"
    )
    parser.add_argument("--epochs", type=int, default=2, help="epochs of Model.train")
    parser.add_argument("--as-published", action="store_true", help="as printed: the weights of its time")
    parser.add_argument("--data", help="a folder with MNIST's IDX files, instead of the bundled digits")
    args = parser.parse_args()
    if min(args.batches, args.epochs) < 1:
        parser.error("--batches and --epochs: expected 1 or more")
    if args.data and not Path(args.data).joinpath("train-images-idx3-ubyte").is_file():
        parser.error(f"--data {args.data}: no train-images-idx3-ubyte there")

    torch.set_num_threads(1)
    ms.set_seed(0)
    with contextlib.ExitStack() as stack:
        path = args.data
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_digits(path, args.batches * 64)
        train_dataset = datapipe(path, 64)
        if args.as_published:
            functional(train_dataset, has_aux=False, weight_init="normal", bias_init="zeros")
            return
        for name, run in (
            ("functional, DynamicLossScaler", functional),
            ("build_train_network, FixedLossScaleManager", by_cell),
            ("Model.train, LossMonitor", lambda data: by_model(data, args.epochs)),
        ):
            print(f"--- {name}")
            began = time.perf_counter()
            run(train_dataset)
            print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
