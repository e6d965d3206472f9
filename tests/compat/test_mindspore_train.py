"""halfstep.compat.mindspore's training networks, Model and callbacks."""

import math
import re

import numpy as np
import pytest
import torch

import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import amp, nn, value_and_grad
from halfstep.compat.mindspore.dataset import NumpySlicesDataset
from halfstep.compat.mindspore.train import (
    Accuracy,
    Callback,
    CallbackParam,
    CheckpointConfig,
    EarlyStopping,
    History,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
    ReduceLROnPlateau,
    RunContext,
    TimeMonitor,
)
from halfstep.errors import HalfstepWarning
from halfstep.scaling import StaticLossScale

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


def network():
    return nn.SequentialCell(nn.Dense(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dense(8, 3))


def train_network(net=None, level="O2", loss_fn=None, optimizer=None, **kwargs):
    net = network() if net is None else net
    optimizer = optimizer or nn.SGD(net.trainable_params(), 0.5)
    return amp.build_train_network(net, optimizer, loss_fn or nn.CrossEntropyLoss(), level, **kwargs)


# --- build_train_network -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "kwargs", "dense", "norm", "scaled"),
    [
        ("O0", {}, torch.float32, torch.float32, False),
        ("O1", {}, torch.float16, torch.float32, False),
        ("O2", {}, torch.float16, torch.float32, True),
        ("O3", {}, torch.float16, torch.float16, False),
        ("auto", {}, torch.float32, torch.float32, False),
        ("O2", {"keep_batchnorm_fp32": False}, torch.float16, torch.float16, True),
        ("O2", {"loss_scale_manager": None}, torch.float16, torch.float32, False),
        ("O2", {"cast_model_type": ms.float32}, torch.float32, torch.float32, True),
        ("O3", {"keep_batchnorm_fp32": True}, torch.float16, torch.float32, False),
        ("O0", {"cast_model_type": ms.float16}, torch.float16, torch.float16, False),
        ("O3", {"loss_scale_manager": amp.FixedLossScaleManager()}, torch.float16, torch.float16, True),
    ],
)
def test_levels_and_keywords(level, kwargs, dense, norm, scaled):
    net = network()
    given = {}
    cell = train_network(net, level, **kwargs)
    for name in ("0", "1"):
        net.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: given.update({name: args[0].dtype})
        )
    output = cell(ms.Tensor(X), ms.Tensor(Y))
    # what the layer computes in; at auto its input is cast by the op inside
    assert (given["0"], given["1"] if level != "auto" else norm) == (dense, norm)
    assert isinstance(output, tuple) == scaled
    loss = output[0] if scaled else output
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert net.training


def test_it_trains_on_the_cpu_and_tells_loss_overflow_and_scale():
    cell = train_network(loss_scale_manager=amp.FixedLossScaleManager())
    results = [cell(ms.Tensor(X), ms.Tensor(Y)) for _ in range(30)]
    assert results[-1][0] < results[0][0] / 2
    assert not any(overflow for _, overflow, _ in results)
    assert {scale.item() for _, _, scale in results} == {128.0}


def test_a_step_that_overflows_is_skipped_and_the_scale_shrinks():
    net = network()
    cell = train_network(net, loss_scale_manager=amp.DynamicLossScaleManager(2**10, 2, 2))
    before = [p.clone() for p in net.parameters()]
    bad = X.clone()
    bad[0] = 1e9
    scales = []
    for x in (bad, bad):
        _, overflow, scale = cell(ms.Tensor(x), ms.Tensor(Y))
        assert overflow
        scales.append(scale.item())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    for _ in range(2):
        net[1].reset_running_stats()
        _, overflow, scale = cell(ms.Tensor(X), ms.Tensor(Y))
        assert not overflow
        scales.append(scale.item())
    assert scales == [512.0, 256.0, 256.0, 512.0]
    assert not torch.equal(before[0], net[0].weight)


def test_1001_overflows_in_a_row_raise():
    net = nn.Dense(1, 1)
    cell = amp.build_train_network(
        net,
        nn.SGD(net.trainable_params()),
        nn.MSELoss(),
        "O0",
        loss_scale_manager=amp.FixedLossScaleManager(),
    )
    x = ms.Tensor([[float("inf")]])
    for _ in range(1000):
        cell(x, x)
    with pytest.raises(RuntimeError, match="1001 steps in a row"):
        cell(x, x)


def test_without_drop_the_optimizer_unscales():
    weights = []
    for manager, scale in ((None, 1.0), (amp.FixedLossScaleManager(64.0, False), 64.0)):
        torch.manual_seed(1)
        net = nn.Dense(6, 3)
        optimizer = nn.SGD(net.trainable_params(), 0.1, loss_scale=scale)
        cell = train_network(net, "O0", optimizer=optimizer, loss_scale_manager=manager)
        assert cell(ms.Tensor(X), ms.Tensor(Y)).shape == ()
        weights.append(net.weight.detach())
    torch.testing.assert_close(*weights)


def test_labels_and_logits_reach_the_loss_in_fp32():
    class Spy(nn.Cell):
        def construct(self, logits, labels):
            self.seen = logits.dtype, labels.dtype
            return ((logits - labels) ** 2).mean()

    spy = Spy()
    train_network(level="O3", loss_fn=spy)(ms.Tensor(X), ms.Tensor(torch.randn(12, 3).half()))
    assert spy.seen == (torch.float32, torch.float32)


def test_a_network_may_hold_its_loss():
    class WithLoss(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(6, 3)

        def construct(self, x, y):
            return nn.CrossEntropyLoss()(self.dense(x), y)

    net = WithLoss()
    cell = amp.build_train_network(net, nn.SGD(net.trainable_params(), 0.1), level="O2")
    loss, overflow, _ = cell(ms.Tensor(X), ms.Tensor(Y))
    assert loss.dtype == torch.float32
    assert overflow  # the preset scale of 2^24 is more than fp16 gradients hold


def test_strangers_among_the_optimizers_parameters_are_told():
    other = nn.SGD(nn.Dense(6, 3).trainable_params(), 0.1)
    net = nn.Dense(6, 3)
    with pytest.warns(HalfstepWarning, match="2 of the optimizer's 2 parameters are not in this network"):
        cell = train_network(net, "O2", optimizer=other, loss_scale_manager=amp.FixedLossScaleManager())
    before = net.weight.clone()
    assert not cell(ms.Tensor(X), ms.Tensor(Y))[1]
    assert torch.equal(before, net.weight)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"level": "O7"}, ValueError, "amp level O7 is not supported"),
        ({"level": 3}, TypeError, "'level' must be str"),
        ({"boost_level": "O9"}, ValueError, "boost_level"),
        ({"foo": 1}, ValueError, "Unsupported arg 'foo'"),
        ({"cast_model_type": ms.bfloat16}, TypeError, "cast_model_type"),
        ({"keep_batchnorm_fp32": 4}, TypeError, "'keep_batchnorm_fp32' must be bool, but got 'int'"),
        ({"loss_scale_manager": 4}, TypeError, "loss_scale_manager"),
        ({"optimizer": 3}, TypeError, "'optimizer' must be Optimizer"),
        ({"loss_fn": lambda a, b: a}, TypeError, "'loss_fn' must be Module or NoneType, but got 'function'"),
    ],
)
def test_wrong_use_gets_mindspores_errors(kwargs, error, message):
    with pytest.raises(error, match=message):
        train_network(**{"level": "O0", **kwargs})


def test_boost_is_told_to_do_nothing():
    with pytest.warns(HalfstepWarning, match="no effect"):
        train_network(level="O0", boost_level="O1")


@pytest.mark.parametrize(
    ("sense", "error"),
    [(torch.ones(3), ValueError), ("128", TypeError), (torch.tensor(0.0), ValueError)],
)
def test_scale_sense_is_checked(sense, error):
    net = nn.Dense(6, 3)
    with pytest.raises(error):
        nn.TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params()), sense)


def test_scale_sense_may_be_a_tensor_and_be_set():
    net = nn.Dense(6, 3)
    with_loss = nn.WithLossCell(net, nn.CrossEntropyLoss())
    cell = nn.TrainOneStepWithLossScaleCell(with_loss, nn.SGD(net.trainable_params()), torch.tensor(64.0))
    assert cell.scale_sense.item() == 64.0
    cell.set_sense_scale(torch.tensor(8.0))
    assert cell(ms.Tensor(X), ms.Tensor(Y))[2].item() == 8.0


class Grouped(nn.Cell):
    def __init__(self, manager):
        super().__init__()
        self.manager, self.a, self.b = manager, nn.Dense(6, 6), nn.Dense(6, 3)
        self.seen = []

    def construct(self, x):
        x = self.a(self.manager(x, 0, 1))
        x.register_hook(lambda g: self.seen.append(("a", g)))
        x = self.b(self.manager(x, 1, 2))
        x.register_hook(lambda g: self.seen.append(("b", g)))
        return self.manager(x, 2, 3)


def grouped(scales, **kwargs):
    torch.manual_seed(3)
    manager = amp.GroupLossScaleManager(scales, [])
    net = Grouped(manager)
    manager.loss_scale_groups = [list(net.a.parameters()), list(net.b.parameters())]
    cell = train_network(net, "O0", loss_scale_manager=manager, **kwargs)
    return net, manager, cell


def test_groups_of_layers_carry_their_own_scales():
    net, manager, cell = grouped(1024.0)
    manager.scales = (StaticLossScale(4.0), StaticLossScale(64.0))
    _, overflow, scale = cell(ms.Tensor(X), ms.Tensor(Y))
    torch.manual_seed(3)
    plain = Grouped(amp.GroupLossScaleManager(1.0, []))
    train_network(plain, "O0")(ms.Tensor(X), ms.Tensor(Y))
    for name, factor in (("b", 64.0), ("a", 4.0)):
        ours, theirs = dict(net.seen)[name], dict(plain.seen)[name]
        torch.testing.assert_close(ours, theirs * factor)
    torch.testing.assert_close(net.a.weight, plain.a.weight)
    torch.testing.assert_close(net.b.weight, plain.b.weight)
    assert (bool(overflow), scale.item()) == (False, 4.0)


def test_groups_grow_and_shrink_apart_and_skip_together():
    net, manager, cell = grouped(1024.0)
    before = net.a.weight.clone()
    net.b.weight.register_hook(lambda g: g * float("inf"))
    _, overflow, _ = cell(ms.Tensor(X), ms.Tensor(Y))
    assert overflow
    assert torch.equal(before, net.a.weight)
    assert [s.read() for s in manager.scales] == pytest.approx([1024 * 2 ** (1 / 1000), 1024 / 2**0.5])


# --- Model -------------------------------------------------------------------------------------------------


def data(n=12, batch=4):
    return NumpySlicesDataset({"x": X[:n].numpy(), "y": Y[:n].numpy()}, shuffle=False).batch(batch)


def model(level="O2", **kwargs):
    torch.manual_seed(0)
    net = network()
    if level == "O2":
        kwargs.setdefault("loss_scale_manager", amp.FixedLossScaleManager())
    metrics = kwargs.pop("metrics", {"accuracy", "loss"})
    optimizer = nn.SGD(net.trainable_params(), 0.5)
    return Model(net, nn.CrossEntropyLoss(), optimizer, metrics, amp_level=level, **kwargs)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_model_trains_evaluates_and_predicts_at_every_level(level):
    trainer = model(level)
    before = trainer.eval(data())
    trainer.train(20, data())
    after = trainer.eval(data())
    assert set(after) == {"accuracy", "loss"}
    assert after["loss"] < before["loss"] * 0.6
    assert after["accuracy"] > 0.9
    output = trainer.predict(ms.Tensor(X))
    low = torch.float16 if level in ("O2", "O3") else torch.float32
    assert (output.dtype, output.requires_grad) == (low, False)
    assert (output.argmax(1) == Y).float().mean() == pytest.approx(after["accuracy"])


def test_loss_monitor_counts_steps_across_epochs(capsys):
    trainer = model()
    trainer.train(3, data(), callbacks=[LossMonitor(2)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == [
        "epoch: 1 step: 2",
        "epoch: 2 step: 1",
        "epoch: 2 step: 3",
        "epoch: 3 step: 2",
    ]
    assert all(re.fullmatch(r"epoch: \d step: \d, loss is \d\.\d{1,9}", line) for line in lines)


def test_loss_monitor_raises_on_a_loss_that_is_none():
    trainer = model("O0")
    bad = NumpySlicesDataset({"x": X.numpy() * np.nan, "y": Y.numpy()}).batch(4)
    with pytest.raises(ValueError, match="In epoch: 1 step: 1, loss is NAN or INF"):
        trainer.train(1, bad, callbacks=LossMonitor(0))


def test_fit_evaluates_and_tells(capsys):
    trainer, history = model(), History()
    trainer.fit(4, data(), data(8), valid_frequency=2, callbacks=[history, LossMonitor(100)])
    out = capsys.readouterr().out
    assert re.findall(r"Eval result: epoch (\d), metrics: \{'accuracy': ", out) == ["2", "4"]
    assert history.epoch == {"epoch": [1, 2, 3, 4]}
    assert (len(history.history["net_output"]), len(history.history["accuracy"])) == (4, 2)


def test_time_monitor_prints(capsys):
    model().train(2, data(), callbacks=TimeMonitor())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"Train epoch time: .* ms, per step time: .* ms", line) for line in lines)


def test_model_checkpoint_names_keeps_and_numbers(tmp_path):
    config = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=3)
    trainer = model()
    trainer.train(3, data(), callbacks=ModelCheckpoint("net", tmp_path, config))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "net-2_1.ckpt",
        "net-2_3.ckpt",
        "net-3_2.ckpt",
    ] or sorted(p.name for p in tmp_path.iterdir()) == ["net-2_3.ckpt", "net-3_2.ckpt", "net-3_3.ckpt"]
    fresh = network()
    ms.load_checkpoint(tmp_path / "net-3_3.ckpt", fresh)
    assert torch.equal(fresh[0].weight, trainer.predict_network[0].weight)
    trainer.train(1, data(), callbacks=ModelCheckpoint("net", tmp_path, CheckpointConfig(10)))
    assert (tmp_path / "net_1-1_3.ckpt").is_file()


def test_early_stopping_stops_and_restores(capsys):
    class Value(Callback):
        def __init__(self):
            self.values, self.weights = iter([1.0, 0.5, 0.6, 0.7, 0.4]), []

        def on_train_step_end(self, run_context):
            now = run_context.original_args()
            if now.cur_step_num % now.batch_num == 0:
                now.net_outputs = torch.tensor(next(self.values))
                self.weights.append(now.network[0].weight.clone())

    trainer, value = model("O0"), Value()
    stopping = EarlyStopping("loss", patience=2, verbose=True, restore_best_weights=True)
    trainer.train(9, data(), callbacks=[value, stopping])
    assert (stopping.stopped_epoch, stopping.best) == (4, 0.5)
    assert torch.equal(trainer.predict_network[0].weight, value.weights[1])
    assert "Epoch 00004: early stopping" in capsys.readouterr().out
    with pytest.warns(HalfstepWarning, match="conditioned on eval_loss, which is not available"):
        model("O0").train(1, data(), callbacks=EarlyStopping())
    by_metric = EarlyStopping("eval_loss", min_delta=100.0, patience=1)
    model("O0").fit(5, data(), data(), callbacks=by_metric)
    assert by_metric.stopped_epoch == 2


def rates_of(callback, values, optimizer):
    """The learning rate after each epoch whose loss is one of these."""
    now = CallbackParam(optimizer=optimizer, cur_epoch_num=0)
    callback.on_train_begin(RunContext(now))
    for now.cur_epoch_num, value in enumerate(values, 1):
        now.net_outputs = ms.Tensor(value)
        callback.on_train_epoch_end(RunContext(now))
        yield round(optimizer.learning_rate.item(), 6)


def test_a_plateau_lowers_the_rate_as_in_mindspore(capsys):
    def rates(values, **options):
        optimizer = nn.SGD(network().trainable_params(), 1.0)
        return list(rates_of(ReduceLROnPlateau("loss", 0.5, **options), values, optimizer))

    flat = [3.0] * 6
    assert rates(flat, patience=2) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert rates([3.0, 2.0, 1.0, 0.99, 0.98], patience=1, min_delta=0.1) == [1.0, 1.0, 1.0, 0.5, 0.25]
    assert rates(flat, patience=1, cooldown=2) == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert rates(flat, patience=1, min_lr=0.3, verbose=True) == [1.0, 0.5, 0.3, 0.3, 0.3, 0.3]
    assert "Epoch 00003: ReduceLROnPlateau reducing learning rate to 0.3." in capsys.readouterr().out
    assert rates([1.0, 2.0, 3.0], patience=1, mode="max") == [1.0, 1.0, 1.0]


def test_a_rate_is_set_after_each_step():
    net = network()
    optimizer = nn.SGD(net.trainable_params(), 0.4)
    trained = Model(net, nn.CrossEntropyLoss(), optimizer)
    seen = []

    def halve(rate, step):
        seen.append((rate, step))
        return rate / 2 if step % 2 == 0 else rate

    trained.train_network = lambda *batch: optimizer([torch.ones_like(p) for p in optimizer.parameters])
    trained.train_network.set_train = lambda: None
    trained.train(2, data(), callbacks=LearningRateScheduler(halve))
    assert seen == [(0.4, 1), (0.4, 2), (0.2, 3), (0.2, 4), (0.1, 5), (0.1, 6)]
    assert optimizer.get_lr() == 0.05


@pytest.mark.parametrize("rate", [[0.1, 0.2], nn.WarmUpLR(0.1, 2), None])
def test_a_rate_that_is_not_one_number_is_not_changed(rate):
    parameters = network().trainable_params()
    parameters = parameters if rate else [{"params": parameters[:1], "lr": 0.3}, {"params": parameters[1:]}]
    optimizer = nn.SGD(parameters, rate or 0.1)
    now = RunContext(CallbackParam(optimizer=optimizer, net_outputs=ms.Tensor(1.0)))
    plateau, scheduler = ReduceLROnPlateau("loss"), LearningRateScheduler(lambda rate, step: rate)
    for event in (plateau.on_train_epoch_end, scheduler.on_train_step_end):
        with pytest.raises(ValueError, match="needs an optimizer with one number as its learning rate"):
            event(now)


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_a_factor_lowers(factor):
    with pytest.raises(ValueError, match="'factor' must be in range"):
        ReduceLROnPlateau(factor=factor)


def test_callbacks_hear_everything_in_order():
    class Ear(Callback):
        def __init__(self):
            self.heard = []

        def on_train_begin(self, run_context):
            self.heard.append("begin")

        def on_eval_step_end(self, run_context):
            self.heard.append("eval step")

        def step_end(self, run_context):
            self.heard.append(run_context.original_args().cur_step_num)

        def epoch_end(self, run_context):
            self.heard.append(run_context.original_args().mode)
            run_context.request_stop()

    ear = Ear()
    model().fit(3, data(), data(), callbacks=ear)
    assert ear.heard == ["begin", 1, 2, 3, *["eval step"] * 3, "eval", "train"]
    model().eval(data(4), callbacks=ear)
    assert ear.heard[9:] == ["eval step", "eval"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: model(metrics=["accuracy"]), TypeError, "must be dict or set"),
        (lambda: model(metrics={"nope"}), KeyError, "unsupported metric nope"),
        (lambda: model(metrics={"a": 3}), TypeError, "'metric a' must be Metric"),
        (lambda: model(metrics=None).eval(data()), ValueError, "'metrics' can not be None"),
        (lambda: Model(network()).train(1, data()), ValueError, "no optimizer"),
        (lambda: Model(network(), metrics={"loss"}), ValueError, "need a 'loss_fn'"),
        (lambda: model("O8"), ValueError, "amp level O8 is not supported"),
        (lambda: model(foo=3), ValueError, "'kwargs' should be"),
        (lambda: model().train(2, data(), initial_epoch=2), ValueError, "above 'initial_epoch'"),
        (lambda: model().train(1, data(3, 4), callbacks=[3]), TypeError, "must be Callback"),
        (lambda: LossMonitor(-1), ValueError, "per_print_times"),
        (lambda: EarlyStopping(mode="up"), ValueError, "mode should be"),
        (lambda: ModelCheckpoint("a/b"), ValueError, "prefix"),
        (lambda: CheckpointConfig(0), ValueError, "save_checkpoint_steps"),
        (lambda: Accuracy().eval(), RuntimeError, "number of samples is 0"),
    ],
)
def test_model_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_overflow_on_another_rank_skips_here_too(monkeypatch):
    place = "halfstep.compat.mindspore.nn._training.all_ranks"
    monkeypatch.setattr(place, lambda flag: torch.ones_like(flag))
    net = network()
    cell = train_network(net, loss_scale_manager=amp.FixedLossScaleManager())
    before = net[0].weight.clone()
    _, overflow, _ = cell(ms.Tensor(X), ms.Tensor(Y))
    assert overflow
    assert torch.equal(before, net[0].weight)


# --- training, against losses recorded from MindSpore 2.10 ------------------------------------------------


def pattern(*shape):
    """Weights and data that need no random numbers."""
    return np.sin(np.arange(math.prod(shape)) * 1.7).reshape(shape).astype(np.float32) / 2


@pytest.mark.filterwarnings("ignore:.* beside it")
@pytest.mark.parametrize(
    ("level", "has_aux", "losses", "scale"),
    [
        ("O0", True, [1.83196, 1.6617, 1.56857, 1.51126, 1.47307, 1.44663], 2**21),
        ("O2", True, [1.92035, 1.70666, 1.59431, 1.52752, 1.48429, 1.45448], 2**20),
        ("O2", False, [1.92035, 1.70666, 1.59437, 1.52761, 1.48418, 1.45445], 2**20),
        ("O3", True, [1.92035, 1.70666, 1.59431, 1.52752, 1.48429, 1.45448], 2**20),
    ],
)
def test_training_follows_mindspores_losses(level, has_aux, losses, scale):
    network = nn.SequentialCell(nn.Dense(16, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Dense(8, 4))
    for name in ("0.weight", "0.bias", "3.weight", "3.bias"):
        parameter = network.parameters_dict()[name]
        parameter.set_data(pattern(*parameter.shape))
    x, y = ms.Tensor(pattern(12, 16)), ms.Tensor(np.arange(12, dtype=np.int32) % 4)
    model = amp.auto_mixed_precision(network, level).set_train()
    loss_fn, optimizer = nn.CrossEntropyLoss(), nn.SGD(network.trainable_params(), 0.1)
    scaler = amp.DynamicLossScaler(2**18, 2, 5)

    def forward(data, label):
        logits = model(data)
        return scaler.scale(loss_fn(logits, label)), logits

    step = value_and_grad(forward, None, network.trainable_params(), has_aux=has_aux)
    seen = []
    for number in range(16):
        _, grads = step(x, y)
        is_finite = amp.all_finite(grads)
        if is_finite:
            optimizer(scaler.unscale(grads))
        scaler.adjust(is_finite)
        if number % 3 == 0:
            seen.append(loss_fn(model(x), y).item())
    assert seen == pytest.approx(losses, abs=2e-3)
    assert scaler.scale_value.asnumpy() == scale
