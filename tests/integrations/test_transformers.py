"""A Trainer with the mixin: precision, clipping, logs and checkpoints by the Trainer's own options."""

import re

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import halfstep as hs
from halfstep.integrations.transformers import Precision

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory"
)


@pytest.fixture(autouse=True)
def fresh():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Trainer(Precision, transformers.Trainer):
    pass


def data():
    text = list((__doc__ * 20).encode())
    return [
        {"input_ids": torch.tensor(text[i : i + 16]), "labels": torch.tensor(text[i : i + 16])}
        for i in range(64)
    ]


def trainer(folder, steps, kind="ours", level="O2", cls=Trainer, **options):
    transformers.set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    make = hs.optim.AdamW if kind == "ours" else torch.optim.AdamW
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1,
        lr_scheduler_type="constant", save_steps=3, report_to=[], disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    how = {"level": level} if cls is Trainer else {}
    return cls(
        model=model,
        args=arguments,
        train_dataset=data(),
        optimizer_cls_and_kwargs=(make, {"lr": 3e-3}),
        **how,
    )


def logged(one, key):
    return [row[key] for row in one.state.log_history if key in row]


@pytest.mark.parametrize("word", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_trains_as_fp32_does_and_logs_the_same_norms(level, word, tmp_path):
    plain = trainer(tmp_path / "fp32", 6, "torch", cls=transformers.Trainer, max_grad_norm=0.5)
    plain.train()
    ours = trainer(tmp_path / "ours", 6, level=level, max_grad_norm=0.5, **{word: True})
    ours.train()
    assert hs.formats.dtype_name(ours.accelerator.session.policy.compute_dtype) == word
    assert ours.accelerator.session.steps == 6
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=5e-3)
    assert logged(ours, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=3e-2)


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_it_resumes_from_the_trainer_s_checkpoint_bit_for_bit(kind, tmp_path):
    whole = trainer(tmp_path / "one", 6, kind, fp16=True)
    whole.train()
    trainer(tmp_path / "two", 3, kind, fp16=True).train()
    again = trainer(tmp_path / "two", 6, kind, fp16=True)
    again.train(resume_from_checkpoint=True)
    assert again.accelerator.session.steps == whole.accelerator.session.steps == 6
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_second_trainer_trains_the_same_model(tmp_path):
    first = trainer(tmp_path, 2, bf16=True)
    first.train()
    again = Trainer(
        model=first.model,
        args=first.args,
        train_dataset=data(),
        level="O1",
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 3e-3}),
    )
    again.train()
    assert again.accelerator.session.steps == 2
    assert next(first.model.parameters()).dtype == torch.float32
    assert logged(again, "loss")[-1] < logged(first, "loss")[0]
    assert again.accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("rate", "keywords", "told"),
    [
        (3e-3, {}, "has no lr"),
        (3e-3, {"lr": 1e-3}, r"has lr=0\.001"),
        (3e-3, {"lr": 3e-3}, ""),
        (5e-5, {"lr": 1e-3}, ""),
    ],
)
def test_a_learning_rate_without_effect_is_told(rate, keywords, told, tmp_path, recwarn):
    arguments = TrainingArguments(str(tmp_path), learning_rate=rate, use_cpu=True, report_to=[])
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=0, num_attention_heads=1)
    )
    Trainer(model=model, args=arguments, optimizer_cls_and_kwargs=(hs.optim.AdamW, keywords))
    found = [str(w.message) for w in recwarn if isinstance(w.message, hs.HalfstepWarning)]
    assert len(found) == bool(told)
    assert all(re.search(told, text) for text in found)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_saved_within_evaluating_are_the_fp32_masters(level, tmp_path):
    ours = trainer(tmp_path, 2, level=level, bf16=True)
    ours.train()
    ours.save_model(str(tmp_path / "own"))
    session = ours.accelerator.session
    with session.evaluating():
        ours.save_model(str(tmp_path / "exact"))
    own, exact = (
        LlamaForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("own", "exact")
    )
    assert own.config.dtype == own.lm_head.weight.dtype == {"O1": torch.float32, "O2": torch.bfloat16}[level]
    assert exact.config.dtype == exact.lm_head.weight.dtype == torch.float32
    session.revert()
    ids = data()[0]["input_ids"][None]
    losses = [model.eval()(input_ids=ids, labels=ids).loss.item() for model in (exact, ours.model)]
    assert losses[0] == losses[1]
