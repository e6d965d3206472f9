"""The command line and the documented three lines under torchrun, as users start them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doctor.zoo_quiet import SCRIPTS

ROOT = Path(__file__).parents[2]


def torchrun(*arguments, ranks=2, folder=ROOT):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.mark.long
def test_halfstep_train_shares_batches_and_reports_once():
    done = torchrun("-m", "halfstep", "train", "digits-mlp", "--level", "O1", "--steps", "4", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    (row,) = document["recipes"][0]["rows"]
    assert row["failed"] is None
    assert len(row["runs"][0]["losses"]) == 4


SICK = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import halfstep as hs

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 2)
amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16", on_nonfinite="skip")
ddp = DDP(model)
for step in range(3):
    x = torch.ones(4, 8)
    if step == 1 and dist.get_rank() == 1:
        x[0, 0] = float("inf")
    with amp.autocast():
        loss = ddp(x).square().mean()
    amp.backward(loss)
    amp.step()
"""


@pytest.mark.long
def test_the_doctor_gives_one_verdict_over_all_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SICK)
    done = torchrun("-m", "halfstep", "doctor", "train.py", "--steps", "3", "--json", folder=tmp_path)
    assert done.returncode == 1, done.stderr[-2000:]
    document = json.loads(done.stdout)
    (fault,) = document["bad"]
    assert (fault["step"], fault["rank"], fault["phase"], fault["cause"]["kind"]) == (1, 1, "forward", "data")
    assert "step 2, rank 1" in document["headline"]


@pytest.mark.long
def test_all_ranks_together_give_the_verdict_of_one(tmp_path):
    script = next(s for s in SCRIPTS if s.name == "gradients_that_vanish")
    (tmp_path / "train.py").write_text(script.text)
    command = ("-m", "halfstep", "doctor", "train.py", "--steps", str(script.steps), "--json")
    ranks = torchrun(*command, folder=tmp_path)
    alone = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=tmp_path)
    both, one = json.loads(ranks.stdout), json.loads(alone.stdout)
    assert both["bad"] == one["bad"] != []
    assert both["verdict"] == one["verdict"]


PAGE = (ROOT / "docs" / "many-ranks.md").read_text()
DDP, SHARDS, STEPS, STORE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.long
@pytest.mark.parametrize("way", [DDP, SHARDS], ids=["ddp", "fully_shard"])
def test_the_lines_of_the_page(tmp_path, way):
    *steps, last = STEPS.splitlines(keepends=True)
    store = STORE.replace("s3://bucket/run", (tmp_path / "store").as_uri())
    (tmp_path / "train.py").write_text("".join([way, *steps, store, last]))
    done = torchrun("train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    names = sorted(p.name for p in (tmp_path / "runs/step-3").iterdir())
    assert names == ["manifest.json", *(f"rank-0000{r}-of-00002.safetensors" for r in (0, 1))]
    kept = sorted(p.name for p in (tmp_path / "store/step-3").iterdir())
    assert kept == [".metadata", "__0_0.distcp", "__1_0.distcp", "halfstep.json"]
