"""Lightning's loops train a small CNN on digits bit for bit as the same loop written for halfstep."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("lightning", reason="lightning is in the environment of `make hosts`")
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits

import halfstep as hs
from halfstep.integrations.fabric import Fabric
from halfstep.integrations.lightning import Precision

pytestmark = pytest.mark.filterwarnings("ignore")
RATE, BATCH = 3e-3, 16
OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=RATE),
    "ours": lambda p: hs.optim.AdamW(p, lr=RATE),
}
LEVELS = [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")]


def digits(n):
    found = load_digits()
    x = torch.tensor(found.images[: n * BATCH], dtype=torch.float32)[:, None] / 16
    return torch.utils.data.TensorDataset(x, torch.tensor(found.target[: n * BATCH]))


def batches(n):
    return torch.utils.data.DataLoader(digits(n), batch_size=BATCH)


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


class Digits(lightning.LightningModule):
    def __init__(self, kind="ours", spoiled=None):
        super().__init__()
        self.net, self.kind, self.spoiled = cnn(), kind, spoiled
        self.norms, self.losses = [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x).float(), y)
        self.losses.append(float(loss.detach()))
        return loss * float("inf") if len(self.losses) == self.spoiled else loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad.float() for p in self.parameters()])))

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.kind](self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(module, n=8, folder=None, resume=None, plugin=None, epochs=1, **options):
    saver = [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)] if folder else []
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=bool(folder), callbacks=saver,
        plugins=plugin, **options,
    )  # fmt: skip
    trainer.fit(module, batches(n), ckpt_path=resume)
    return trainer


def by_hand(kind, n, level, dtype, clip=None, accumulate=1):
    model = cnn()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scale = hs.DynamicLossScale(init=1024.0) if dtype == "fp16" else None
    amp = hs.prepare(model, optimizer, level=level, dtype=dtype, loss_scale=scale)
    norms = []
    for i, (x, y) in enumerate(batches(n)):
        with amp.autocast():
            loss = F.cross_entropy(model(x).float(), y) / accumulate
        amp.backward(loss)
        if (i + 1) % accumulate == 0:
            amp.unscale()
            updated = optimizer.param_groups[0]["params"]
            norms.append(torch.nn.utils.get_total_norm([p.grad.float() for p in updated]).item())
            if clip:
                torch.nn.utils.clip_grads_with_norm_(updated, clip, torch.tensor(norms[-1]))
            amp.step(scheduler=schedule)
    return model, norms


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_trainer_s_loop_is_the_loop_written_by_hand(kind, level, dtype):
    module = Digits(kind)
    fit(module, plugin=Precision(level=level, dtype=dtype), gradient_clip_val=0.5, accumulate_grad_batches=2)
    model, norms = by_hand(kind, 8, level, dtype, 0.5, 2)
    assert same(module.net, model)
    assert module.norms == pytest.approx(norms, rel=1e-3)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_goes_on_from_the_trainer_s_checkpoint_bit_for_bit(level, kind, tmp_path):
    whole = Digits(kind, spoiled=2)
    fit(whole, 4, tmp_path, plugin=Precision(level=level, dtype="fp16"), epochs=2)
    again, plugin = Digits(kind), Precision(level=level, dtype="fp16")
    trainer = fit(again, 4, resume=tmp_path / "epoch=0-step=4.ckpt", plugin=plugin, epochs=2)
    assert trainer.global_step == 8
    assert same(whole.net, again.net)
    assert whole.losses[4:] == again.losses
    assert (plugin.session.steps, plugin.session.skips.total, plugin.outcome.scale) == (8, 1, 512.0)


def test_a_skipped_step_leaves_the_weights():
    module, plugin = Digits(spoiled=4), Precision(level="O2", dtype="bf16", on_nonfinite="skip")
    fit(module, 4, plugin=plugin)
    assert not plugin.outcome.taken
    assert same(module.net, by_hand("ours", 3, "O2", "bf16")[0])


def test_fitting_again_and_testing_prepare_anew():
    module, plugin = Digits(), Precision(level="O2", dtype="bf16")
    fit(module, 2, plugin=plugin)
    fit(module, 2, plugin=plugin)
    assert module.net[0].weight.dtype == torch.bfloat16
    assert plugin.session.steps == 2


def test_what_the_plugin_cannot_do_is_refused():
    class Own(Digits):
        def backward(self, loss):
            loss.backward()

    with pytest.raises(hs.UnsupportedError, match="has a backward"):
        fit(Own(), 2, plugin=Precision(dtype="bf16"))


def test_an_option_that_no_host_can_give_is_refused_at_once():
    with pytest.raises(TypeError, match="levl"):
        Precision(levl="O2")
    with pytest.raises(TypeError, match="levl"):
        Fabric(accelerator="cpu", levl="O2")
    for cls in (Precision, Fabric):
        with pytest.raises(hs.ConfigError, match="unknown level 'O9'"):
            cls(level="O9")
        with pytest.raises(hs.ConfigError, match=r"level='auto' .* choose O0 to O3"):
            cls(level="auto")


def test_ddp_of_the_trainer_s_own_is_refused_with_the_strategy_to_write():
    with pytest.raises(hs.UnsupportedError, match=r"strategy=DDPStrategy\(\)"):
        Precision(dtype="bf16").connect(cnn(), [], [])


def fabricated(kind, n, clip=None, accumulate=1, start=0, load=None, save=None, **how):
    fabric = Fabric(accelerator="cpu", devices=1, **how)
    model = cnn()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "session": fabric.session, "schedule": schedule}
    if load:
        fabric.load(load, state)
    norms = []
    for i, (x, y) in enumerate(fabric.setup_dataloaders(batches(n))):
        if i < start:
            continue
        ends = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(F.cross_entropy(model(x), y) / accumulate)
        if ends:
            if clip:
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=clip)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if save and i == 3:
            fabric.save(save, state)
    return model, fabric, norms


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fabric_s_loop_is_the_loop_written_by_hand(kind, level, dtype):
    model, _, norms = fabricated(kind, 8, 0.5, 2, level=level, dtype=dtype)
    expected, expected_norms = by_hand(kind, 8, level, dtype, 0.5, 2)
    assert same(model, expected)
    assert norms == pytest.approx(expected_norms, rel=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fabric_goes_on_from_its_checkpoint_bit_for_bit(level, tmp_path):
    path = tmp_path / "saved.ckpt"
    whole, _, _ = fabricated("ours", 8, save=path, level=level, dtype="fp16")
    again, fabric, _ = fabricated("ours", 8, start=4, load=path, level=level, dtype="fp16")
    assert same(whole, again)
    assert fabric.session.steps == 8


def test_fabric_skips_a_step_on_inf_where_asked():
    fabric = Fabric(accelerator="cpu", devices=1, level="O2", dtype="bf16", skip_nonfinite=True)
    model = cnn()
    module, optimizer = fabric.setup(model, OPTIMIZERS["ours"](model.parameters()))
    before = [p.clone() for p in model.parameters()]
    fabric.backward(module(torch.ones(2, 1, 8, 8)).sum() * float("inf"))
    assert optimizer.step().skipped
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_fabric_says_where_a_model_and_its_optimizer_belong():
    fabric, model = Fabric(accelerator="cpu", devices=1, dtype="bf16"), cnn()
    optimizer = OPTIMIZERS["ours"](model.parameters())
    one_call = r"one fabric\.setup\(model, optimizer\)"
    for clip in ({"max_norm": 1.0}, {"clip_val": 1.0}):
        with pytest.raises(hs.ConfigError, match=one_call):
            fabric.clip_gradients(model, optimizer, **clip)
    module = fabric.setup(model)
    with pytest.raises(hs.ConfigError, match=one_call):
        fabric.backward(module(torch.ones(2, 1, 8, 8)).sum())
    with pytest.raises(hs.ConfigError, match=one_call):
        fabric.setup_optimizers(optimizer)


def test_fabric_prepares_one_module():
    fabric = Fabric(accelerator="cpu", devices=1, dtype="bf16")
    model = cnn()
    fabric.setup(model, OPTIMIZERS["ours"](model.parameters()))
    with pytest.raises(hs.ConfigError, match="already"):
        fabric.setup(model, OPTIMIZERS["ours"](model.parameters()))


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"level": "O1", "dtype": "bf16"}, "bf16-mixed"),
        ({"level": "O2", "dtype": "fp16"}, "16-true"),
        ({"level": "O0"}, "32-true"),
    ],
)
def test_the_trainer_s_precision_says_what_is_trained(how, word):
    plugin = Precision(**how)
    assert plugin.precision == word
    assert fit(Digits(), 2, plugin=plugin).precision == word
    assert Fabric(accelerator="cpu", **how)._precision.precision == word


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_trainer_trains_the_same_module(level):
    module = Digits()
    fit(module, 4, plugin=Precision(level=level, dtype="bf16"))
    second = Precision(level=level, dtype="fp16")
    fit(module, 4, plugin=second)
    assert second.session.steps == 4
    assert len(module.losses) == 8


def test_what_is_saved_within_evaluating_are_the_fp32_masters(tmp_path):
    module, plugin = Digits(), Precision(level="O2", dtype="bf16")
    trainer = fit(module, 4, plugin=plugin)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    with plugin.session.evaluating():
        trainer.save_checkpoint(tmp_path / "exact.ckpt")
    own, exact = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=False)["state_dict"] for name in ("own", "exact")
    )
    assert own["net.0.weight"].dtype == torch.bfloat16
    masters = hs.optim.fp32_state_dict(module, plugin.session.optimizers[0])
    assert all(torch.equal(exact[name], value) for name, value in masters.items())
    x = digits(1).tensors[0]
    reloaded = Digits()
    reloaded.load_state_dict(exact)
    plugin.session.revert()
    assert torch.equal(reloaded.net.eval()(x), module.net.eval()(x))
