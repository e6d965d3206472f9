"""The recipes of docs/hosts.md for hosts that need no adapter: the optimizer alone."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from safetensors.torch import load_file

import halfstep as hs

pytestmark = pytest.mark.filterwarnings("ignore")


def llama():
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16()


def test_peft():
    peft = pytest.importorskip("peft", reason="peft is in the environment of `make hosts`")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model = model.bfloat16()
    optimizer = hs.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(1, 64, (8, 16))
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    assert hs.audit(model, optimizer) == []


def bytes_saved(model, region):
    """Bytes that a forward keeps for backward, weights aside."""
    ids = torch.randint(1, 64, (4, 64))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), region:
        loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    return sum(storage.nbytes() for place, storage in kept.items() if place not in weights)


def test_lora_in_fp32_copies_inputs_and_both_cures_keep_none():
    peft = pytest.importorskip("peft", reason="peft is in the environment of `make hosts`")
    found, words = {}, {}
    for way in ("as it comes", "uncast", "O2"):
        config = peft.LoraConfig(r=2, lora_dropout=0.05, target_modules="all-linear")
        model = peft.get_peft_model(llama(), config)
        optimizer = hs.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        level = "O2" if way == "O2" else "O1"
        amp = hs.prepare(model, optimizer, level=level, dtype="bf16")
        if way == "uncast":
            with peft.helpers.disable_input_dtype_casting(model):
                words[way] = [row.rule for row in hs.audit(model, optimizer)]
                found[way] = bytes_saved(model, amp.autocast())
        else:
            words[way] = [row.rule for row in hs.audit(model, optimizer)]
            found[way] = bytes_saved(model, amp.autocast())
    assert words == {"as it comes": ["adapters"], "uncast": [], "O2": []}
    assert found["as it comes"] > 1.15 * found["uncast"]
    assert found["O2"] <= found["uncast"]


@pytest.mark.parametrize("within", [False, True])
def test_an_adapter_is_saved_in_16_bits_or_in_fp32(within, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is in the environment of `make hosts`")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear"))
    optimizer = hs.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    ids = torch.randint(1, 64, (4, 16))
    for _ in range(3):
        with amp.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        amp.backward(loss)
        amp.step()
    with amp.evaluating() if within else nullcontext():
        model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32 if within else torch.bfloat16}
    exact = hs.optim.fp32_state_dict(model, optimizer)
    for name, value in saved.items():
        wide = exact[name.replace(".weight", ".default.weight")]
        assert torch.equal(value, wide if within else wide.bfloat16())


def tokenizer():
    import tokenizers

    words = {"[PAD]": 0, "[EOS]": 1, **{word: i + 2 for i, word in enumerate("abcdefgh")}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]")


def test_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is in the environment of `make hosts`")
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a b c d e f g h"] * 64})
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=20, per_device_train_batch_size=4, bf16=False, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_steps=1, max_length=16, lr_scheduler_type="constant",
        learning_rate=1e-2, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=llama(), args=arguments, train_dataset=rows, processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(hs.optim.AdamW, {"lr": 1e-2, "state_dtype": "8bit"}),
    )  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    assert next(trainer.model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_trl_s_trainers_take_an_optimizer_that_was_made(kind, level, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is in the environment of `make hosts`")
    import datasets

    from halfstep.integrations.transformers import Precision

    columns = {"prompt": ["a b"] * 32}
    more = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    config = {"num_generations": 2, "max_completion_length": 8}
    if kind == "DPO":
        columns |= {"chosen": ["c d e"] * 32, "rejected": ["f g h"] * 32}
        more, config = {"ref_model": llama().float()}, {}
    trainer_class = type(kind, (Precision, getattr(trl, f"{kind}Trainer")), {})
    arguments = getattr(trl, f"{kind}Config")(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, bf16=True, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", gradient_checkpointing=False, **config,
    )  # fmt: skip
    model = llama().float()
    optimizer = hs.optim.AdamW(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(columns), level=level,
        processing_class=tokenizer(), optimizers=(optimizer, None), **more,
    )  # fmt: skip
    trainer.train()
    assert trainer.accelerator.session.steps == 4
    assert trainer.accelerator.session.optimizers == [optimizer]
    assert model.lm_head.weight.dtype == {"O1": torch.float32, "O2": torch.bfloat16}[level]
    assert any(not torch.equal(a, b.float()) for a, b in zip(before, model.parameters()))
