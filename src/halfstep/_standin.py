"""prepare() over torch.autocast, replaced by session.py."""

from contextlib import contextmanager
import torch
from halfstep.outcome import Outcome


class _S:
    def __init__(self, model, optimizer, level, dtype, loss_scale):
        self.model, self.optimizer, self.level = model, optimizer, level
        self.dtype = (
            dtype
            if isinstance(dtype, torch.dtype)
            else {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.bfloat16}[dtype]
        )
        self.device = next(model.parameters()).device
        self.loss_scale = 1.0
        self.n = 0

    def autocast(self):
        return torch.autocast("cpu", self.dtype, enabled=self.level != "O0")

    def backward(self, loss, optimizer=None):
        loss.backward()

    def step(self, optimizer=None, clip_norm=None, scheduler=None, zero_grad=True):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm) if clip_norm else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n += 1
        return Outcome(taken=True, finite=True, grad_norm=norm, step=self.n)

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, s):
        self.n = s["n"]

    @contextmanager
    def evaluating(self):
        yield


def prepare(model, optimizer, level="O1", dtype=None, policy=None, plan=None, loss_scale=None, device=None):
    return _S(model, optimizer, level, dtype, loss_scale)
