"""How a cure is written down: in the words of the front door through which the script trains.

A row for each door, as text; nothing here decides which cure is right. What takes part in the step tells
which door it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from halfstep.numerics.participants import StepParticipants
from halfstep.policy.levels import LOW_DTYPES

_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@dataclass(frozen=True)
class Terms:
    """What to write, by door.

    `clip`: clips gradients. `bf16`: computes in bf16. `wide`: runs one op in fp32. `scale`: asks for another
    loss scale, `{}` where its value stands. `masters`: keeps fp32 master weights. `in_policy`: whether one op
    can be put into fp32 by a rule.
    """

    clip: str
    bf16: str
    wide: str
    scale: str
    masters: str
    in_policy: bool = False


_TORCH_WIDE = 'with torch.autocast("cpu", enabled=False): ...  # inputs .float()'
_MASTERS = 'hs.prepare(model, optimizer, level="O2")'

PLAIN = Terms(
    clip=f"{_CLIP}  # before optimizer.step()",
    bf16="torch.bfloat16 in place of torch.float16",
    wide="inputs .float()",
    scale='torch.amp.GradScaler("cpu", init_scale={})',
    masters=f'{_MASTERS}  # or weights in fp32, and torch.autocast("cpu", dtype=torch.bfloat16)',
)
AUTOCAST = replace(
    PLAIN,
    bf16='torch.autocast("cpu", dtype=torch.bfloat16)',
    wide=_TORCH_WIDE,
)
SCALER = replace(
    AUTOCAST,
    clip=f"scaler.unscale_(optimizer); {_CLIP}",
    bf16='torch.autocast("cpu", dtype=torch.bfloat16)  # and no GradScaler',
)
SESSION = Terms(
    clip="amp.step(clip_norm=1.0)",
    bf16='hs.prepare(..., dtype="bf16")',
    wide="with hs.autocast(enabled=False): ...  # inputs .float()",
    scale='hs.prepare(..., loss_scale="dynamic")',
    masters=_MASTERS,
    in_policy=True,
)
TRAINER = replace(
    SESSION,
    clip="hs.Trainer(..., clip_norm=1.0)",
    bf16='hs.Trainer(..., dtype="bf16")',
    scale='hs.Trainer(..., loss_scale="dynamic")',
    masters='hs.Trainer(..., level="O2")',
)
APEX = Terms(
    clip="torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)",
    bf16='hs.prepare(model, optimizer, dtype="bf16")  # in place of amp.initialize, which knows fp16 alone',
    wide="with amp.disable_casts(): ...  # inputs .float()",
    scale='amp.initialize(..., loss_scale="dynamic")',
    masters='amp.initialize(..., opt_level="O2")',
)
MINDSPORE = Terms(
    clip="grads = [g * min(1.0, 1.0 / float(g.norm())) for g in grads]",
    bf16='amp.auto_mixed_precision(net, "O2", dtype=ms.bfloat16)',
    wide="x.astype(ms.float32)",
    scale="amp.DynamicLossScaler(scale_value={}, scale_factor=2, scale_window=1000)",
    masters='amp.auto_mixed_precision(net, "O2")',
)
LIGHTNING = replace(
    AUTOCAST,
    clip="Trainer(gradient_clip_val=1.0)",
    bf16='Trainer(precision="bf16-mixed")',
    scale='Trainer(precision="16-mixed")',
    masters='Trainer(precision="bf16-mixed")',
)
TRANSFORMERS = replace(
    AUTOCAST,
    clip="TrainingArguments(max_grad_norm=1.0)",
    bf16="TrainingArguments(bf16=True, fp16=False)",
    scale="TrainingArguments(fp16=True)",
    masters="TrainingArguments(bf16=True)  # weights in fp32",
)

#: Loops that call a script's step, by the end of the path of their source.
LOOPS = {
    "/halfstep/trainer/loop.py": TRAINER,
    "/lightning/pytorch/trainer/trainer.py": LIGHTNING,
    "/pytorch_lightning/trainer/trainer.py": LIGHTNING,
    "/transformers/trainer.py": TRANSFORMERS,
}


def terms_of(parts: StepParticipants, in_region: bool = False) -> Terms:
    """The words for a step of these; `in_region`: whether the op that is to change ran under autocast."""
    if parts.loop in LOOPS:
        found = LOOPS[parts.loop]
    elif parts.session is not None:
        found = SESSION
    elif getattr(parts.scaler, "door", "") == "apex":
        found = APEX
    elif any(_of_mindspore(m) for m in parts.models):
        found = MINDSPORE
    elif parts.scaler is not None and parts.scaler.is_enabled():
        found = SCALER
    else:
        found = AUTOCAST if in_region or not _has_halves(parts) else PLAIN
    if found.wide == _TORCH_WIDE and not in_region:
        found = replace(found, wide=PLAIN.wide)
    device = next((p.device.type for p in parts.parameters()), "cpu")
    return found if device == "cpu" else _on(found, device)


def _has_halves(parts: StepParticipants) -> bool:
    return any(p.dtype in LOW_DTYPES for p in parts.parameters())


def _of_mindspore(module: Any) -> bool:
    return any(kind.__module__.startswith("halfstep.compat.mindspore") for kind in type(module).__mro__)


def _on(terms: Terms, device: str) -> Terms:
    written = {k: v.replace('"cpu"', f'"{device}"') for k, v in vars(terms).items() if isinstance(v, str)}
    return replace(terms, **written)
