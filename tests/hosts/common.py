"""What the cases of all hosts share: a small Llama with text, a CNN with digits, what counts as near fp32."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
WAYS = ["optimizer", "O1", "O2"]
DTYPES = ["bf16", "fp16"]
SEEDS = range(3)
STEPS, LENGTH, BATCH = 60, 32, 8
ACCUMULATE, RATE, CLIP = 2, 3e-3, 1.0
"""Every step is of two batches, and most are clipped."""
SKIPS = {"bf16": {"skip_nonfinite": True}, "fp16": {}}
"""What an adapter is given so that it skips."""
LOW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rows(seed: int) -> list[dict[str, torch.Tensor]]:
    """As many rows of the standard library's own source as the steps need, in an order of the seed."""
    with open(logging.__file__, "rb") as file:
        whole = torch.tensor([byte % 128 for byte in file.read()])
    parts = whole[: len(whole) // LENGTH * LENGTH].reshape(-1, LENGTH)
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed))
    picked = parts[order[: STEPS * BATCH * ACCUMULATE]]
    return [{"input_ids": row, "labels": row} for row in picked]


def llama(seed: int, dtype: torch.dtype = torch.float32):
    """About 30,000 parameters."""
    import transformers

    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def digits(seed: int, n: int) -> torch.utils.data.TensorDataset:
    """`n` of scikit-learn's digits, in an order of the seed."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))[:n]
    x = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
    return torch.utils.data.TensorDataset(x, torch.tensor(found.target)[order])


def cnn(seed: int) -> nn.Sequential:
    """About 2,000 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


def spoil(model: torch.nn.Module, call: int) -> None:
    """Make the loss of the training call with this number infinite."""
    calls = iter(range(10**6))

    def enlarge(module, args, output):
        if module.training and next(calls) == call:
            output.loss = output.loss * float("inf")
        return output

    model.register_forward_hook(enlarge)


def near(ours: list[float], plain: list[float]) -> None:
    """Each seed's last loss lies nearer to fp32's than fp32's own seeds lie apart."""
    spread = max(plain) - min(plain)
    assert all(abs(a - b) <= spread for a, b in zip(ours, plain)), f"{ours} is not near {plain}"


def like_fp32(ours: list, plain: list, rel: float) -> None:
    """Runs of ours end as near to fp32's as these to each other, and begin with the same norms."""
    near([run.last for run in ours], [run.last for run in plain])
    for run, other in zip(ours, plain):
        assert run.norms[:5] == pytest.approx(other.norms[:5], rel=rel)


def sees_the_skip(run) -> None:
    """Of six steps the fourth was skipped: the weights stayed, and the rate did."""
    assert run.skipped == [False, False, False, True, False, False]
    assert run.rates[2] == run.rates[3] > run.rates[4]
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


def near_in_two(ranks: list[dict], plain: list) -> None:
    """The mean of both ranks' last losses lies as near to those of fp32 runs as a single one must."""
    near([sum(rank["last"] for rank in ranks) / 2], [run.last for run in plain])


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models are equal bit for bit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def digest(model: torch.nn.Module) -> float:
    """A number that differs where any weight does."""
    values = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return float((values * torch.arange(1, len(values) + 1)).sum())


def launched(script: str, *arguments: str) -> list[dict]:
    """What each of two processes of torchrun wrote by `write`; the last argument is the folder.

    Both end with the same weights.
    """
    folder = Path(arguments[-1])
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, "-m", *launcher, script, *arguments]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    assert [rank["world"] for rank in ranks] == [2, 2]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    return ranks


def write(folder: str, **found: object) -> None:
    """Leave what this process found for the one that launched it, and end the process group."""
    rank = torch.distributed.get_rank()
    (Path(folder) / f"rank{rank}.json").write_text(
        json.dumps({"world": torch.distributed.get_world_size(), **found})
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def quiet() -> None:
    """Leave the hosts' own warnings and progress out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
