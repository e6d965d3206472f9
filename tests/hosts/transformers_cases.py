"""Hugging Face transformers: Trainer's loop, its options and logs, its checkpoint, two processes."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

import halfstep as hs
from halfstep.integrations.transformers import Precision
from tests.hosts import common
from tests.hosts.common import ACCUMULATE, BATCH, CLIP, DTYPES, LOW, RATE, SEEDS, STEPS, WAYS

pytestmark = pytest.mark.filterwarnings("ignore")
SAVED = STEPS // 2


class Trainer(Precision, transformers.Trainer):
    pass


class Seen(transformers.TrainerCallback):
    """Which steps were skipped, as the host says."""

    def __init__(self):
        self.skipped, self.trainer = [], None

    def on_step_end(self, args, state, control, **kwargs):
        self.skipped.append(bool(self.trainer.accelerator.optimizer_step_was_skipped))


def train(way, dtype="bf16", seed=0, folder="", steps=STEPS, spoiled=None, stop=False, resume=False, **how):
    """Train by Trainer's loop; `stop` after half the steps, `resume` from there."""
    common.quiet()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = common.llama(seed, LOW[dtype] if way == "optimizer" else LOW["fp32"])
    if spoiled is not None:
        common.spoil(model, spoiled * ACCUMULATE)
    adapted = way in WAYS[1:]
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=CLIP, learning_rate=RATE, warmup_steps=4, seed=seed, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_steps=1, save_steps=SAVED, logging_nan_inf_filter=False,
        **({dtype: True} if adapted else {}),
    )  # fmt: skip
    kind = torch.optim.AdamW if way == "fp32" else hs.optim.AdamW
    seen = Seen()

    class Stop(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = control.should_training_stop or stop

    seen.trainer = (Trainer if adapted else transformers.Trainer)(
        model=model, args=arguments, train_dataset=common.rows(seed), callbacks=[seen, Stop()],
        optimizer_cls_and_kwargs=(kind, {"lr": RATE}), **({"level": way, **how} if adapted else {}),
    )  # fmt: skip
    seen.trainer.train(resume_from_checkpoint=resume)
    rows = seen.trainer.state.log_history
    found = {key: [row[key] for row in rows if key in row] for key in ("loss", "grad_norm", "learning_rate")}
    last = sum(found["loss"][-10:]) / 10
    return SimpleNamespace(model=model, skipped=seen.skipped, last=last, norms=found["grad_norm"], **found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_loss_norm_and_checkpoint(way, dtype, tmp_path):
    plain = [train("fp32", seed=seed, folder=f"{tmp_path}/fp32") for seed in SEEDS]
    ours = [train(way, dtype, seed, f"{tmp_path}/ours") for seed in SEEDS]
    common.like_fp32(ours, plain, 0.03)
    for run, other in zip(ours, plain):
        assert run.learning_rate == pytest.approx(other.learning_rate)
        assert not any(run.skipped)
    train(way, dtype, 0, f"{tmp_path}/two", stop=True)
    again = train(way, dtype, 0, f"{tmp_path}/two", resume=True)
    assert common.same(again.model, ours[0].model)
    assert again.loss == ours[0].loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_skipped_step_is_seen_by_the_scheduler(way, dtype, tmp_path):
    run = train(way, dtype, 0, str(tmp_path), steps=6, spoiled=3, **common.SKIPS[dtype])
    assert run.skipped == [False, False, False, True, False, False]
    assert run.learning_rate[3] == run.learning_rate[4] < run.learning_rate[5]  # logged: the step's own rate
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes(way, dtype, tmp_path):
    ranks = common.launched(__file__, way, dtype, str(tmp_path))
    plain = [train("fp32", seed=seed, folder=str(tmp_path), steps=STEPS // 2).last for seed in SEEDS]
    common.near([ranks[0]["last"]], plain)


if __name__ == "__main__":
    run = train(*sys.argv[1:3], folder=sys.argv[3] + "/trained", steps=STEPS // 2)
    common.write(sys.argv[3], last=run.last, digest=common.digest(run.model))
