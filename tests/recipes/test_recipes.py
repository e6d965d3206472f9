"""Recipes: their data, models and measurements, and the phenomena they exist to show."""

import gzip
import math
import struct
import time

import pytest
import torch
from torch import nn

from halfstep.errors import ConfigError, DataError
from halfstep.recipes import RECIPES, data, measure, recipe_of
from halfstep.recipes.runs import (
    SeedRun,
    TimedSetting,
    TrainSetting,
    run_recipe,
    summary,
    train_once,
)

pytestmark = pytest.mark.usefixtures("rounded_kernels")
CPU = torch.device("cpu")
TRAIN, TEST = torch.arange(40), torch.arange(12)


def idx(array, code=0x08):
    header = bytes([0, 0, code, array.dim()]) + struct.pack(f">{array.dim()}I", *array.shape)
    return header + array.to(torch.uint8).numpy().tobytes()


def write_mnist(folder, zipped=False, size=28):
    generator = torch.Generator().manual_seed(1)
    for part, count in (("train", 40), ("t10k", 12)):
        images = torch.randint(0, 256, (count, size, size), generator=generator)
        labels = torch.arange(count) % 10
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            content = idx(array)
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_from_idx_files(tmp_path, zipped):
    found = data.mnist(write_mnist(tmp_path, zipped))
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (40, 28, 28), generator=generator)
    assert torch.equal(found.train_x, images[:, None].float())
    assert torch.equal(found.test_y, TEST % 10)
    task = recipe_of("digits-mlp").data(8, str(tmp_path))
    x, y = next(iter(task.train(0)))
    assert task.name == "mnist"
    assert x.shape == (8, 1, 28, 28)
    assert x.min() >= -0.1307 / 0.3081 - 1e-6
    assert y.dtype == torch.int64


CORRUPT = {
    "cut": (lambda raw: raw[:-7], r"states shape \[40, 28, 28\] = 31360 bytes but holds 31353"),
    "long": (lambda raw: raw + b"x", r"but holds 31361"),
    "empty": (lambda raw: b"", "not an IDX file .* nothing"),
    "html": (lambda raw: b"<html>404</html>", "not an IDX file of unsigned bytes"),
    "header": (lambda raw: raw[:9], "ends inside its header"),
    "floats": (lambda raw: raw[:2] + b"\x0d" + raw[3:], "not an IDX file of unsigned bytes"),
    "gzip cut": (lambda raw: gzip.compress(raw)[:-20], "cannot (read|decompress)"),
    "gzip damaged": (lambda raw: gzip.compress(raw)[:40] + b"\xff" * 40, "cannot (read|decompress)"),
    "dimensions": (lambda raw: idx(torch.zeros(40)), "has 1 dimensions"),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_corrupt_idx_file_is_named(tmp_path, kind):
    change, message = CORRUPT[kind]
    path = write_mnist(tmp_path) / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        data.mnist(tmp_path)
    assert "train-images" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_unsuitable_mnist_is_named(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        data.mnist(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no train-images-idx3-ubyte"):
        data.mnist(tmp_path)
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.arange(12) + 3))
    with pytest.raises(DataError, match="label 14"):
        data.mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.zeros(11)))
    with pytest.raises(DataError, match="12 inputs and 11 targets"):
        data.mnist(tmp_path)
    with pytest.raises(DataError, match="wants 28x28"):
        data.image_data(write_mnist(tmp_path, size=14))


def test_batches_cover_a_pass_and_resume_inside_it():
    loader = data.Batches(TRAIN, TRAIN, 8, seed=4)
    first, second = list(loader), list(loader)
    assert sorted(torch.cat([x for x, _ in first]).tolist()) == list(range(40))
    assert not torch.equal(first[0][0], second[0][0])
    again = data.Batches(TRAIN, TRAIN, 8, seed=0)
    again.load_state_dict({"seed": 4, "epoch": 1, "position": 3})
    rest = list(again)
    assert len(rest) == 2
    assert torch.equal(rest[0][0], second[3][0])
    with pytest.raises(ConfigError, match="batch_size=41"):
        data.Batches(TRAIN, TRAIN, 41)
    with pytest.raises(DataError, match="40 inputs but 12 targets"):
        data.Batches(TRAIN, TEST, 4)


def test_text_is_encoded_and_windowed():
    assert data.encode("a\n\tZ\x07é€").tolist() == [66, 0, 1, 59, 32, 32, 32]
    train, test = data.stdlib_text()
    assert len(train) + len(test) == 1_000_000
    assert int(train.max()) < data.VOCABULARY
    x, y = next(iter(data.TextBatches(train, 4, 16)))
    assert x.shape == y.shape == (4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    with pytest.raises(DataError, match="too short"):
        data.TextBatches(train[:10], 4, 16)


def test_digits_are_real_and_split_once():
    found = data.digits()
    assert found.train_x.shape == (1297, 1, 28, 28)
    assert found.test_x.shape == (500, 1, 28, 28)
    assert set(found.test_y.tolist()) == set(range(10))
    assert found.train_x.max().item() == pytest.approx(255.0)


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown recipe 'digit-mlp'.*did you mean digits-mlp\?"):
        recipe_of("digit-mlp")
    with pytest.raises(ConfigError, match="text-gpt reads the standard library"):
        recipe_of("text-gpt").task("/some/folder")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_builds_the_same_twice_and_learns(name):
    recipe = recipe_of(name)
    state = torch.get_rng_state()
    one, _ = recipe.build(3)
    other, _ = recipe.build(3)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.equal(a, b)
    steps = 6 if name == "text-gpt" else 30
    run = train_once(recipe, recipe.task(), TrainSetting("O1", "bf16"), 0, steps, CPU)
    assert run.failed is None
    assert len(run.losses) == steps
    assert run.losses[-1] < 0.98 * run.losses[0]
    assert recipe.metric in run.test


@pytest.mark.parametrize(("level", "bound"), [("O1", 0.6), ("O2", 0.6)])
def test_text_gpt_saves_at_most_0_6_of_the_bytes(level, bound):
    recipe = recipe_of("text-gpt")
    task = recipe.task()
    saved = {}
    for setting in (TrainSetting("O0", None), TrainSetting(level, "bf16")):
        bench = TimedSetting(recipe, task, setting, CPU)
        saved[setting.level] = measure.bytes_saved_by(bench.forward, bench.model.parameters())
    assert saved["O0"] > 50e6
    assert saved[level] <= bound * saved["O0"]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn"])
def test_mixed_precision_keeps_the_accuracy(name, level, dtype):
    """A light twin of benchmarks/accuracy.py, which takes five seeds and whole trainings."""
    recipe = recipe_of(name)
    task = recipe.task()
    steps = 120 if name == "digits-mlp" else 60
    full = _base_accuracy(name, steps)
    run = train_once(recipe, task, TrainSetting(level, dtype), 0, steps, CPU)
    assert full > 0.9
    assert abs(run.test["accuracy"] - full) <= 0.015


_bases: dict[str, float] = {}


def _base_accuracy(name, steps):
    if name not in _bases:
        recipe = recipe_of(name)
        run = train_once(recipe, recipe.task(), TrainSetting("O0", None), 0, steps, CPU)
        _bases[name] = run.test["accuracy"]
    return _bases[name]


def test_digits_faint_needs_a_scale_and_masters_in_fp16():
    """A third of the whole training already shows it; the scale cures O2, the masters cure O3."""
    recipe = recipe_of("digits-faint")
    task = recipe.task()

    def loss(level, dtype, scale=None):
        setting = TrainSetting(level, dtype, scale)
        return train_once(recipe, task, setting, 0, 170, CPU).test["loss"]

    full = loss("O0", None)
    assert loss("O1", "fp16", "dynamic") == pytest.approx(full, rel=0.002)
    assert loss("O2", "fp16", "dynamic") == pytest.approx(full, rel=0.002)
    assert loss("O1", "fp16", "none") > 1.025 * full
    assert loss("O2", "fp16", "none") > 1.025 * full
    assert loss("O3", "fp16", "dynamic") > 1.05 * full


def test_a_setting_says_its_scale_only_where_it_is_not_the_levels_own():
    labels = [
        TrainSetting("O0", None).label,
        TrainSetting("O1", "fp16", "dynamic").label,
        TrainSetting("O2", "fp16", "none").label,
        TrainSetting("O3", "fp16", "none").label,
        TrainSetting("O1", "bf16", "1024").label,
    ]
    assert labels == ["O0", "O1 fp16", "O2 fp16 no scale", "O3 fp16", "O1 bf16 scale 1024"]


def test_saved_bytes_counts_each_storage_once_and_no_parameter():
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8)

    def forward():
        h = x @ weight
        return (h.sigmoid() * h.view(8, 4).t().reshape(4, 8).sigmoid()).sum()

    # matmul keeps x (128 bytes); each sigmoid its output, which the product keeps again (128 bytes each).
    assert measure.bytes_saved_by(forward, [weight]) == 3 * 128


def test_peak_bytes_sees_what_lives_at_the_same_time():
    x = torch.zeros(1000)

    def step():
        a = torch.ones(2000)
        b = a + 1.0
        del a
        c = torch.ones(3000)
        return b, c

    with measure.memory_peak([x, x.view(10, 100)], CPU) as peak:
        step()
    assert 4000 + 20000 <= peak[0] < 4000 + 20000 + 200


def test_work_counts_flops_bytes_and_ops():
    a, b = torch.randn(16, 32), torch.randn(32, 8)
    work = measure.work_of(lambda: (a @ b).t() + 1.0)
    assert work.flops == {"float32": 2 * 16 * 32 * 8}
    assert work.ops == 2
    assert work.bytes == 4 * (16 * 32 + 32 * 8 + 16 * 8) + 4 * 2 * 16 * 8


@pytest.mark.parametrize("name", ["digits-mlp", "text-gpt"])
def test_the_same_step_counts_the_same_flops_in_every_dtype(name):
    recipe = recipe_of(name)
    task = recipe.task()
    flops = []
    for setting in (TrainSetting("O0", None), TrainSetting("O1", "bf16"), TrainSetting("O1", "fp16")):
        flops.append(sum(measure.work_of(TimedSetting(recipe, task, setting, CPU).step).flops.values()))
    assert flops[0] > 1e8
    assert flops == pytest.approx([flops[0]] * 3, rel=0.01)


def test_the_bound_is_the_slowest_of_three_roofs(monkeypatch):
    monkeypatch.setattr(measure, "matmul_rate", lambda device, dtype: 1e9)
    monkeypatch.setattr(measure, "copy_rate", lambda device, elements: 1e9)
    monkeypatch.setattr(measure, "op_latency", lambda device: 1e-6)
    assert measure.find_bound(measure.Work({"float32": 10**9}, 10**6, 10), CPU).what == "arithmetic"
    assert measure.find_bound(measure.Work({}, 10**9, 10), CPU).what == "memory"
    assert measure.find_bound(measure.Work({"float32": 10}, 10, 1000), CPU).what == "latency"


def test_the_machines_speeds_are_plausible():
    assert measure.matmul_rate(CPU, "float32", 256) > 1e8
    assert measure.copy_rate(CPU, 1 << 16) > 1e8
    assert 1e-8 < measure.op_latency(CPU, 50) < 1e-3


#: Milliseconds of one step in 24 rounds: single rounds disturbed (made up), and measured beside other work.
ALONE = [
    3.02, 2.99, 3.05, 3.36, 7.15, 3.01, 3.06, 3.02, 3.1, 3.03, 3.37, 3.36,
    3.12, 5.22, 3.15, 3.07, 3.02, 3.05, 3.16, 3.0, 3.08, 7.2, 3.02, 3.14,
]  # fmt: skip
BESIDE_OTHERS = [
    15.43, 7.44, 7.25, 7.31, 7.11, 3.33, 3.05, 8.55, 4.66, 7.19, 3.1, 7.23,
    6.99, 3.01, 7.06, 8.93, 3.36, 3.37, 7.12, 5.22, 7.15, 7.07, 3.12, 4.05,
]  # fmt: skip


def test_single_slow_rounds_are_no_noise_and_slow_parts_are():
    assert measure.noise(ALONE) < 0.15
    assert measure.noise(BESIDE_OTHERS) > 0.5
    assert measure.noise([3.0] * 12 + [4.5] * 12) == pytest.approx(0.4)
    assert measure.noise([3.0, 9.0, 3.0]) == 0.0


def test_times_are_taken_in_turns():
    order = []
    steps = [lambda: order.append(0), lambda: (order.append(1), time.sleep(0.01))]
    seconds, processor = measure.rounds_in_turn(steps, CPU, 3, warm_up=1)
    assert order == [0, 1] * 4
    assert [len(taken) for taken in (*seconds, *processor)] == [3] * 4
    assert min(seconds[1]) >= 0.01 > max(processor[1])  # who sleeps takes no processor


def test_a_run_of_ours_that_fails_is_a_row_not_a_crash():
    recipe = recipe_of("digits-mlp")
    task = recipe.task()
    seen = []
    settings = [TrainSetting("O0", None), TrainSetting("O1", "fp16", "1e38")]
    options = {"seeds": 1, "steps": 60, "device": CPU, "folder": None, "rounds": 1}
    options["on_step"] = lambda name, share: seen.append(name)
    report = run_recipe(recipe, settings, **options)
    good, bad = report.rows
    assert good.failed is None
    assert good.mean > 0.5
    assert task.name == report.data
    assert bad.diverged or bad.failed or bad.skipped
    assert seen.count("digits-mlp O0") == 60


def test_summaries_of_rows_without_results():
    recipe = recipe_of("digits-mlp")
    trained = [(TrainSetting("O0", None), [SeedRun(0, failed="boom")])]
    made = summary(recipe, "digits", 1, 1, trained, {}).rows[0]
    assert made.mean is None
    assert made.difference is None
    assert made.failed == "boom"


def test_a_diverged_seed_spoils_the_mean_and_the_summary_says_so():
    runs = [SeedRun(0, test={"loss": 1.0}), SeedRun(1, test={"loss": float("nan")}, diverged_at=3)]
    trained = [
        (TrainSetting("O0", None), [SeedRun(0, test={"loss": 2.0})]),
        (TrainSetting("O3", "fp16"), runs),
    ]
    made = summary(recipe_of("text-gpt"), "text", 5, 2, trained, {}).rows[1]
    assert made.diverged == 1
    assert all(map(math.isnan, (made.mean, made.spread, made.difference)))
