"""halfstep.compat.mindspore's metrics and data sets."""

import numpy as np
import pytest
import torch

import halfstep as hs
import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import nn
from halfstep.compat.mindspore.dataset import (
    GeneratorDataset,
    MnistDataset,
    NumpySlicesDataset,
    transforms,
    vision,
)
from halfstep.compat.mindspore.train import get_metric_fn, names

# --- metrics, against values recorded from MindSpore 2.10 --------------------------------------------------

P = ms.Tensor(np.array([[0.2, 0.5, 0.3], [0.3, 0.1, 0.6], [0.9, 0.05, 0.05], [0.1, 0.2, 0.7]], np.float32))
LABELS = [ms.Tensor(np.array(y, np.int32)) for y in ([1, 0, 0, 2], [1, 2, 0, 0])]
PAIRS = [([[0.1, 0.2], [0.6, 0.9]], [[0.1, 0.25], [0.5, 0.9]]), ([[1.0, 2.0]], [[0.0, 0.0]])]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 0.75),
        ("acc", 0.75),
        ("precision", [1.0, 1.0, 0.5]),
        ("recall", [0.5, 1.0, 1.0]),
        ("F1", [2 / 3, 1.0, 2 / 3]),
        ("top_1_accuracy", 0.75),
        ("top_5_accuracy", 1.0),
        ("perplexity", 2.1093592602348172),
        ("confusion_matrix", [[2, 0, 2], [0, 2, 0], [0, 0, 2]]),
    ],
)
def test_metrics_of_classes(name, value):
    metric = get_metric_fn(name)
    one_hot = torch.nn.functional.one_hot(LABELS[1].long(), 3)
    for labels in ([*LABELS], [LABELS[0], one_hot if name not in ("perplexity",) else LABELS[1]]):
        metric.clear()
        for label in labels:
            metric.update(P, label)
        np.testing.assert_allclose(metric.eval(), value, rtol=1e-6)


@pytest.mark.parametrize(("name", "value"), [("mae", 1.0500000069538753), ("mse", 1.6708333346371849)])
def test_metrics_of_numbers(name, value):
    metric = get_metric_fn(name)
    for output, label in PAIRS:
        metric.update(ms.Tensor(output), ms.Tensor(label))
    assert metric.eval() == pytest.approx(value, rel=1e-7)


def test_loss_metric_averages_and_averages_are_offered():
    metric = get_metric_fn("loss")
    for loss in (1.5, 0.5):
        metric.update(ms.Tensor(loss))
    assert metric.eval() == 1.0
    precision = get_metric_fn("precision")
    precision.update(P, LABELS[0])
    assert precision.eval(average=True) == pytest.approx(precision.eval().mean())
    assert {"accuracy", "mae", "loss"} <= set(names())


# --- data sets ---------------------------------------------------------------------------------------------


@pytest.fixture
def mnist(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 10), ("t10k", 4)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        header = np.array([0x803, n, 28, 28], ">u4").tobytes()
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = (np.arange(n) % 10).astype(np.uint8)
        header = np.array([0x801, n], ">u4").tobytes()
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return tmp_path


def test_mnist_is_read_mapped_and_batched(mnist):
    dataset = MnistDataset(mnist, usage="train", shuffle=False)
    image, label = next(iter(dataset))
    assert (image.shape, image.dtype, label.item()) == ((28, 28, 1), torch.uint8, 0)
    operations = [vision.Rescale(1.0 / 255.0, 0), vision.Normalize((0.1307,), (0.3081,)), vision.HWC2CHW()]
    mapped = dataset.map(operations, "image").map(transforms.TypeCast(ms.int32), "label").batch(4)
    batches = list(mapped.create_tuple_iterator())
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert (mapped.get_dataset_size(), mapped.batch_size) == (3, 4)
    assert batches[0][0].shape == (4, 1, 28, 28)
    assert batches[0][1].dtype == torch.int32
    wanted = (image.asnumpy().astype(np.float32).transpose(2, 0, 1) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(batches[0][0][0].asnumpy(), wanted, rtol=1e-5)


def test_mnist_reads_what_is_there_and_shuffles(mnist):
    assert MnistDataset(mnist).get_dataset_size() == 14
    assert MnistDataset(mnist, "test").get_dataset_size() == 4
    dataset = MnistDataset(mnist, "train", num_samples=8)
    orders = [[label.item() for _, label in dataset] for _ in range(3)]
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(8))}
    assert len({tuple(order) for order in orders}) == 3
    ms.set_seed(1)
    again = [label.item() for _, label in dataset]
    ms.set_seed(1)
    assert again == [label.item() for _, label in dataset]


def test_functions_of_ones_own_see_a_sample_before_batch_and_a_batch_after():
    seen = []

    def note(x):
        seen.append(x.shape)
        return x + 1

    dataset = NumpySlicesDataset({"x": np.zeros((4, 2), np.float32)}, shuffle=False)
    [(out, *_), _] = dataset.map(note).batch(2).map(note, ["x"]).create_tuple_iterator()
    assert out.asnumpy().tolist() == [[2, 2], [2, 2]]
    assert seen == [(2,), (2,), (2, 2), (2,), (2,), (2, 2)]


def test_data_sets_repeat_drop_and_name():
    dataset = NumpySlicesDataset((np.arange(5), np.arange(5)), ["a", "b"], shuffle=False)
    batched = dataset.batch(2, drop_remainder=True).repeat(2)
    assert batched.get_dataset_size() == 4
    rows = list(batched.create_dict_iterator(output_numpy=True))
    assert [row["b"].tolist() for row in rows] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert [t.item() for (t,) in dataset.create_tuple_iterator(columns=["b"])] == list(range(5))
    assert sorted(t.item() for t, _ in dataset.shuffle(5)) == list(range(5))
    assert dataset.get_col_names() == ["a", "b"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tmp: MnistDataset(tmp), "no train-images-idx3-ubyte"),
        (lambda tmp: MnistDataset(tmp, usage="half"), "usage must be one of"),
        (lambda tmp: NumpySlicesDataset({"x": [1]}).batch(2).batch(2), "in batches already"),
        (lambda tmp: NumpySlicesDataset({"x": [1]}).map(abs, "z"), "no column 'z'"),
        (lambda tmp: NumpySlicesDataset({"a": [1], "b": [1, 2]}), "must have one length"),
        (lambda tmp: NumpySlicesDataset({"a": [1]}).batch(0), "'batch_size' must be int and must be >= 1"),
        (lambda tmp: vision.Normalize((0.1,), (0.0,)), "positive stds"),
        (lambda tmp: nn.Conv2d(1, 1, 3, pad_mode="full"), "'pad_mode' must be one of"),
        (lambda tmp: nn.Dense(1, 1, weight_init="magic"), "unknown initializer 'magic'"),
        (lambda tmp: nn.Dense(1, 1, activation="magic"), "unknown activation 'magic'"),
        (lambda tmp: nn.MSELoss("all"), "'reduction' must be in"),
    ],
)
def test_data_sets_and_layers_refuse(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_a_damaged_file_is_told(mnist):
    path = mnist / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(hs.DataError, match="holds"):
        MnistDataset(mnist)


# --- sources of one's own ----------------------------------------------------------------------------------


class Images:
    """Images of different sizes, with a count of those that were read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 5

    def __getitem__(self, index):
        self.read += 1
        return np.full((index + 2, 3, 1), index, np.uint8), index


def test_a_source_is_read_anew_transformed_by_sample_and_then_batched():
    source = Images()
    dataset = GeneratorDataset(source, ["image", "label"], shuffle=False, num_parallel_workers=1)
    cut = dataset.map([lambda image: image[:2], vision.HWC2CHW()], "image", num_parallel_workers=1).batch(2)
    assert (cut.get_dataset_size(), cut.get_col_names(), source.read) == (3, ["image", "label"], 0)
    batches = list(cut.create_dict_iterator())
    assert [tuple(b["image"].shape) for b in batches] == [(2, 1, 2, 3), (2, 1, 2, 3), (1, 1, 2, 3)]
    assert [b["label"].tolist() for b in batches] == [[0, 1], [2, 3], [4]]
    assert batches[0]["image"].dtype == torch.uint8
    next(iter(cut.repeat(2)))
    assert source.read == 7  # an epoch, and one batch of another
    assert len(list(cut.batch_maps)) == 0
    doubled = cut.map(lambda label: label * 2, "label")
    assert [b[1].tolist() for b in doubled] == [[0, 2], [4, 6], [8]]
    dropped = GeneratorDataset(source, ["image", "label"]).map(lambda i: i[:2], "image").batch(2, True)
    assert sum(len(label) for _, label in dropped) == dropped.get_dataset_size() * 2 == 4


def test_indices_are_shuffled_and_streams_within_a_buffer():
    ms.set_seed(0)
    orders = [[int(x) for (x,) in GeneratorDataset(list(range(20)), "x")] for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    first = GeneratorDataset(list(range(20)), "x", num_samples=4, shuffle=False)
    assert [int(x) for (x,) in first] == [0, 1, 2, 3]

    def stream():
        yield from range(20)

    dataset = GeneratorDataset(stream, "x", num_samples=12)
    assert dataset.get_dataset_size() == 12
    assert [int(x) for (x,) in dataset] == list(range(12))
    near = [int(x) for (x,) in dataset.shuffle(3)]
    assert sorted(near) == list(range(12)) != near
    assert all(value <= place + 2 for place, value in enumerate(near))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GeneratorDataset([1, 2]), "needs 'column_names'"),
        (lambda: GeneratorDataset((i for i in range(3)), "x"), "run through once: give the function"),
        (lambda: GeneratorDataset(lambda: iter([1]), "x", shuffle=True), r"use \.shuffle\(buffer_size\)"),
        (lambda: GeneratorDataset([1], "x", num_shards=2, shard_id=0), "takes no 'num_shards' here"),
        (lambda: list(GeneratorDataset([(1, 2)], "x")), "gave 2 values for the columns x"),
        (lambda: GeneratorDataset([1], "x").map(abs, "y"), "no column 'y', but x"),
        (lambda: GeneratorDataset([1], "x").shuffle(1), "buffer_size"),
    ],
)
def test_wrong_sources_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_a_data_set_has_not_is_refused_by_name():
    with pytest.raises(AttributeError, match="no 'take' here, but map, batch, shuffle and repeat"):
        NumpySlicesDataset({"x": np.arange(3)}).take(1)
