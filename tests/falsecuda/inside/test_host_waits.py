"""A session's steady step in a host's loop waits no more often than the host alone does.

A wait is a read or a blocking copy, or for an event recorded just before; outcomes of two steps ago are none.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator as HostAccelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import halfstep as hs
from halfstep.integrations.accelerate import Accelerator
from tests import falsecuda

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, eps=1e-4, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, eps=1e-4, foreach=True),
    "hs": hs.optim.AdamW,
}
LIGHTNING = importlib.util.find_spec("lightning") is not None
LEVELS = ["O1", "O2"] if importlib.util.find_spec("triton") is not None else ["O1"]
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
STEADY, STEPS = 4, 2
"""The step after which waits are counted, and over how many steps."""


class Regressor(nn.Module):
    """A network as transformers' Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).cpu()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x).float() - x[:, :1]).square().mean()}


@contextmanager
def waits() -> Iterator[list[str]]:
    """The waits of a region, once it is over."""
    found = list[str]()
    with falsecuda.counted_waits(events=True) as counted:
        yield found
    found += [n for n in counted.names if "since it was recorded" not in n or n.startswith("0 ops")]


class Steps:
    """Counts the waits of `STEPS` steady steps of a loop that calls `after` after each."""

    def __init__(self) -> None:
        self.number, self.names = 0, list[str]()

    def after(self) -> None:
        self.number += 1
        if self.number == STEADY:
            self.region = waits()
            self.names = self.region.__enter__()
        if self.number == STEADY + STEPS:
            self.region.__exit__(None, None, None)


def of_accelerate(
    level: str | None, optimizer: str, dtype: str, clips: bool, tmp_path: Path, scheduled: bool = False
) -> list[str]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator: Any = (
        Accelerator(mixed_precision=dtype, level=level) if level else HostAccelerator(mixed_precision=dtype)
    )
    net = Regressor().to(accelerator.device)
    opt = OPTIMIZERS[optimizer](net.parameters())
    net, opt, schedule = accelerator.prepare(net, opt, torch.optim.lr_scheduler.StepLR(opt, 2))
    x, steps = torch.randn(32, 6, device=accelerator.device), Steps()
    while steps.number < STEADY + STEPS:
        with accelerator.autocast():
            loss = net(x)["loss"]
        accelerator.backward(loss)
        if clips:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if scheduled:
            schedule.step()
        opt.zero_grad()
        steps.after()
    return steps.names


def of_transformers(level: str | None, optimizer: str, dtype: str, clips: bool, tmp_path: Path) -> list[str]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from halfstep.integrations.transformers import Precision

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    steps, net = Steps(), Regressor()

    class Count(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.after()

    class Ours(Precision, Trainer): ...

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEADY + STEPS, per_device_train_batch_size=8, report_to=[],
        logging_strategy="no", save_strategy="no", disable_tqdm=True, max_grad_norm=1.0 if clips else 0.0,
        bf16=dtype == "bf16", fp16=dtype == "fp16",
    )  # fmt: skip
    rows = [{"x": torch.randn(6, device="cpu"), "labels": 0} for _ in range(64)]
    with torch.device("cpu"):
        trainer = (Ours if level else Trainer)(
            model=net,
            args=arguments,
            train_dataset=rows,  # pyright: ignore[reportArgumentType]
            callbacks=[Count()],
            optimizers=(OPTIMIZERS[optimizer](net.cuda().parameters()), None),
            **({"level": level} if level else {}),
        )
        trainer.train()
    return steps.names


def of_fabric(level: str | None, optimizer: str, dtype: str, clips: bool, tmp_path: Path) -> list[str]:
    from lightning import Fabric as HostFabric

    from halfstep.integrations.fabric import Fabric

    where: dict[str, Any] = {"accelerator": "cuda", "devices": 1}
    fabric: Any = (
        Fabric(**where, level=level, dtype=dtype)
        if level
        else HostFabric(**where, precision={"bf16": "bf16-mixed", "fp16": "16-mixed"}[dtype])
    )
    fabric.launch()
    net = Regressor().to(fabric.device)
    net, opt = fabric.setup(net, OPTIMIZERS[optimizer](net.parameters()))
    x, steps = torch.randn(32, 6, device=fabric.device), Steps()
    while steps.number < STEADY + STEPS:
        fabric.backward(net(x)["loss"])
        if clips:
            fabric.clip_gradients(net, opt, max_norm=1.0, error_if_nonfinite=False)
        opt.step(), opt.zero_grad()
        steps.after()
    return steps.names


def of_lightning(level: str | None, optimizer: str, dtype: str, clips: bool, tmp_path: Path) -> list[str]:
    import lightning

    from halfstep.integrations.lightning import Precision

    steps = Steps()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Regressor()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0])["loss"]

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[optimizer](self.parameters())

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            steps.after()

    word = {"bf16": "bf16-mixed", "fp16": "16-mixed"}[dtype]
    how: dict[str, Any] = {"plugins": Precision(level=level, dtype=dtype)} if level else {"precision": word}
    trainer = lightning.Trainer(
        accelerator="cuda", devices=1, max_steps=STEADY + STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0 if clips else None,
        default_root_dir=str(tmp_path), **how,
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(torch.randn(64, 6, device="cpu"))
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=8))
    return steps.names


HOSTS = {"accelerate": of_accelerate, "transformers": of_transformers}
if LIGHTNING:
    HOSTS |= {"fabric": of_fabric, "lightning": of_lightning}


@pytest.mark.parametrize("optimizer", ["fused", "foreach", pytest.param("hs", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.exhaustive), "fp16"])
@pytest.mark.parametrize("host", list(HOSTS))
def test_a_session_adds_no_wait_to_its_host(host: str, dtype: str, optimizer: str, tmp_path: Path):
    clips = optimizer != "fused"  # which Lightning refuses to clip
    alone = HOSTS[host](None, "foreach" if optimizer == "hs" else optimizer, dtype, clips, tmp_path)
    scheduled = host == "transformers" and dtype == "fp16" and optimizer == "fused"
    for level in LEVELS:
        found = HOSTS[host](level, optimizer, dtype, clips, tmp_path)
        # Trainer asks whether a step was skipped; the host alone takes every fused step for taken.
        assert len(found) <= len(alone) + (STEPS if scheduled else 0), (found, alone)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_schedule_takes_one_wait_where_a_step_may_be_skipped(dtype: str, tmp_path: Path):
    found = of_accelerate("O1", "fused", dtype, True, tmp_path, scheduled=True)
    assert len(found) == (STEPS if dtype == "fp16" else 0), found
