"""A small Llama with bf16 weights, fine-tuned by Hugging Face's Trainer: torch's AdamW beside ours.

    python benchmarks/hosts.py [--steps 200] [--seeds 3]

The model is trained in fp32 first. From there each row fine-tunes it at a learning rate of 1e-5, which is
below half a unit of most bf16 weights. Prints the loss over all the text, and the bytes that a weight takes
with gradient and states.
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
import warnings

import torch
import transformers

import halfstep as hs

ROWS = {
    "fp32, torch AdamW": (torch.float32, torch.optim.AdamW, {}),
    "bf16 as loaded, torch AdamW": (torch.bfloat16, torch.optim.AdamW, {}),
    "bf16, hs.optim.AdamW": (torch.bfloat16, hs.optim.AdamW, {}),
    "bf16, hs.optim.AdamW, 8-bit states": (torch.bfloat16, hs.optim.AdamW, {"state_dtype": "8bit"}),
    "the same, rounded at random": (
        torch.bfloat16,
        hs.optim.AdamW,
        {"state_dtype": "8bit", "master": "stochastic"},
    ),
}
LENGTH = 64


def text() -> torch.Tensor:
    """Rows of characters of the standard library's own source."""
    with open(logging.__file__, "rb") as file:
        whole = torch.tensor([byte % 128 for byte in file.read()])
    return whole[: len(whole) // LENGTH * LENGTH].reshape(-1, LENGTH)


def llama() -> transformers.LlamaForCausalLM:
    """About 200,000 parameters."""
    transformers.set_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4,
        )
    )  # fmt: skip


def train(model: torch.nn.Module, make: type, options: dict, rate: float, steps: int, seed: int) -> float:
    """Train by the Trainer's own loop; bytes a parameter takes with its gradient and its states."""
    sizes = list[int]()

    class Bytes(transformers.TrainerCallback):
        def on_optimizer_step(self, args: object, state: object, control: object, **seen: object) -> None:
            held = seen["optimizer"].state.values()
            states = [x for one in held for x in one.values() if isinstance(x, torch.Tensor)]
            kept = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
            sizes[:] = [sum(x.nbytes for x in kept if x is not None)]

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, seed=seed, lr_scheduler_type="constant",
            use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in text()]
        chosen = (make, {"lr": rate, **options})
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            optimizer_cls_and_kwargs=chosen,
            callbacks=[Bytes()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return sizes[0] / sum(p.numel() for p in model.parameters())


@torch.no_grad()
def loss(model: torch.nn.Module) -> float:
    """The mean loss over all rows, computed in fp32."""
    wide = copy.deepcopy(model).float().eval()
    return sum(float(wide(input_ids=part, labels=part).loss) * len(part) for part in text().split(64)) / len(
        text()
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    start = llama()
    train(start, torch.optim.AdamW, {}, 1e-3, given.steps, 0)
    before = loss(start)
    print(f"loss before {before:.3f}; {given.steps} steps at a learning rate of 1e-5, {given.seeds} seeds")
    for name, (dtype, make, options) in ROWS.items():
        losses = list[float]()
        for seed in range(given.seeds):
            model = copy.deepcopy(start).to(dtype)
            size = train(model, make, options, 1e-5, given.steps, seed)
            losses.append(loss(model))
        print(
            f"{name:36} loss {min(losses):.3f} to {max(losses):.3f}, {size:5.2f} bytes a parameter",
            flush=True,
        )


if __name__ == "__main__":
    main()
