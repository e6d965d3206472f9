"""Hooks that `initialize` puts on a model at O2 and O3: batches cast by themselves, checkpoints in fp32."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.compat.apex._account import Account
from halfstep.optim import MasterWeights
from halfstep.torch_private import pytree


class CastBatches:
    """Forward pre-hook (with kwargs): batches of the user's own class are cast by their own `to(dtype)`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return pytree.tree_map(self._cast, (args, kwargs))

    def _cast(self, leaf: Any) -> Any:
        own = not isinstance(leaf, Tensor | nn.Module) and callable(getattr(leaf, "to", None))
        return leaf.to(self.dtype) if own else leaf


class CheckpointInFp32:
    """Module hook: `state_dict()` gives fp32 tensors, the masters where there are any."""

    def __init__(self, accounts: list[weakref.ref[Account]] | None = None) -> None:
        self._accounts = accounts or []

    def __reduce__(self) -> tuple[type[CheckpointInFp32], tuple[()]]:
        return CheckpointInFp32, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointInFp32:
        return CheckpointInFp32()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        live = [
            account
            for ref in self._accounts
            if (account := ref()) is not None and account.masters is not None
        ]
        masters = {id(w): m for account in live for w, m in cast(MasterWeights, account.masters).pairs()}
        exact = {
            prefix + name: masters.get(id(p)) for name, p in module.named_parameters(remove_duplicate=False)
        }
        for key, value in state.items():
            if key.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                master = exact.get(key)
                if master is not None:
                    state[key] = master.detach()
                elif value.dtype in (torch.float16, torch.bfloat16):
                    state[key] = value.float()
