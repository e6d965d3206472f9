"""How a remedy's code is written in a script, by the interface through which that trains."""

from dataclasses import dataclass, replace

from halfstep.numerics.snapshot import StepParticipants
from halfstep.trees import compute_device

_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
_TORCH_WIDE = 'with torch.autocast("cpu", enabled=False): ...  # inputs .float()'
_MASTERS = 'hs.prepare(model, optimizer, level="O2")'


@dataclass(frozen=True)
class Terms:
    """What to write in a script, by the interface it trains through; defaults are those of a plain loop.

    `clip`: clips gradients. `bf16`: computes in bf16. `wide`: runs one op in fp32. `scale`: asks for another
    loss scale, `{}` where its value stands; `begin`: has a dynamic one begin there, where that is written in
    another way. `masters`: keeps fp32 master weights. `rule`: runs the op `{}` in fp32 by a rule, where that
    can be.
    """

    clip: str = f"{_CLIP}  # before optimizer.step()"
    bf16: str = ".bfloat16() in place of .half(), torch.bfloat16 in place of torch.float16"
    wide: str = "inputs .float()"
    scale: str = 'torch.amp.GradScaler("cpu", init_scale={})'
    begin: str = ""
    masters: str = f'{_MASTERS}  # or weights in fp32, and torch.autocast("cpu", dtype=torch.bfloat16)'
    rule: str = ""


PLAIN = Terms()
AUTOCAST = Terms(bf16='torch.autocast("cpu", dtype=torch.bfloat16)', wide=_TORCH_WIDE)
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
    begin="hs.prepare(..., loss_scale=hs.DynamicLossScale({}))",
    masters=_MASTERS,
    rule='hs.prepare(..., policy="full={}")',
)
TRAINER = replace(
    SESSION,
    clip="hs.Trainer(..., clip_norm=1.0)",
    bf16='hs.Trainer(..., dtype="bf16")',
    scale='hs.Trainer(..., loss_scale="dynamic")',
    begin="hs.Trainer(..., loss_scale=hs.DynamicLossScale({}))",
    masters='hs.Trainer(..., level="O2")',
    rule='hs.Trainer(..., policy="full={}")',
)
APEX = Terms(
    clip="torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)",
    bf16='hs.prepare(model, optimizer, dtype="bf16")  # in place of amp.initialize, which knows fp16 alone',
    wide="with amp.disable_casts(): ...  # inputs .float()",
    scale='amp.initialize(..., loss_scale="dynamic")',
    begin="amp.initialize(..., max_loss_scale={})",
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
    begin='Trainer(plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale={})))',
    masters='Trainer(precision="bf16-mixed")',
)
TRANSFORMERS = replace(
    AUTOCAST,
    clip="TrainingArguments(max_grad_norm=1.0)",
    bf16="TrainingArguments(bf16=True, fp16=False)",
    scale="TrainingArguments(fp16=True)",
    begin="Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale={})])",
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
    """Return the words for a script of these parts; `in_region`: whether the op ran under autocast."""
    kinds = {kind.__module__ for model in parts.models for kind in type(model).__mro__}
    if parts.loop in LOOPS:
        terms = LOOPS[parts.loop]
    elif parts.session is not None:
        terms = SESSION
    elif getattr(parts.scaler, "frontend", "") == "apex":
        terms = APEX
    elif any(kind.startswith("halfstep.compat.mindspore") for kind in kinds):
        terms = MINDSPORE
    else:
        terms = SCALER if parts.scaler is not None and parts.scaler.is_enabled() else AUTOCAST
        terms = terms if in_region else replace(terms, bf16=PLAIN.bf16)
    if terms.wide == _TORCH_WIDE and not in_region:
        terms = replace(terms, wide=PLAIN.wide)
    device = compute_device(parts.parameters()).type
    return replace(
        terms, **{name: text.replace('"cpu"', f'"{device}"') for name, text in vars(terms).items()}
    )
