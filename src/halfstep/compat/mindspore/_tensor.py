"""Tensor and Parameter under MindSpore's names: torch's own, with `asnumpy` and `astype` added."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from halfstep.errors import ConfigError

__all__ = ["Parameter", "ParameterTuple", "Tensor", "from_numpy", "mutable", "tensor"]


class _Methods:
    """The tensor methods that torch spells otherwise."""

    def asnumpy(self: Any) -> np.ndarray[Any, Any]:
        """The values as a numpy array, sharing memory where it can; bf16, which numpy lacks, as float32."""
        plain = plain_tensor(self).detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()

    def astype(self: Any, dtype: Any, copy: bool = True) -> Tensor:
        """The tensor in another dtype: one of `dtype`, numpy's, Python's or a name; gradients flow through.

        With `copy=False` a tensor that has it already comes back as it is. TypeError for what is no dtype.
        """
        return as_tensor(self.to(_dtype_of(dtype), copy=copy))

    def expand_dims(self: Any, axis: int) -> Tensor:
        """With one more dimension, of size 1, at `axis`."""
        return as_tensor(self.unsqueeze(axis))

    def copy(self: Any) -> Tensor:
        """A copy; gradients flow through."""
        return as_tensor(self.clone())

    def value(self: Any) -> Tensor:
        """The tensor itself, as a Tensor where it is a Parameter."""
        return as_tensor(plain_tensor(self))

    def init_data(self: Any, *_: Any) -> Any:
        """The tensor itself: it was filled when it was made."""
        return self


class Tensor(_Methods, torch.Tensor):
    """A torch.Tensor with MindSpore's methods; what torch functions make of it is one too."""

    def __new__(
        cls, input_data: Any = None, dtype: torch.dtype | None = None, shape: Any = None, init: Any = None
    ) -> Tensor:
        """From numbers, lists, numpy arrays or tensors, or of a shape filled by an Initializer.

        `dtype` None keeps theirs. TypeError for neither data nor a shape with an Initializer.
        """
        if input_data is not None:
            return torch.as_tensor(input_data, dtype=dtype).as_subclass(cls)
        if shape is None or not hasattr(init, "fill"):
            raise TypeError(
                "Tensor takes data, or a 'shape' with an Initializer as 'init' such as One(): got "
                f"shape={shape}, init={init!r}"
            )
        filled = torch.empty(shape, dtype=dtype)
        init.fill(filled)
        return filled.as_subclass(cls)

    @staticmethod
    def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
        """A tensor that shares the array's memory."""
        return from_numpy(array)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Parameter(_Methods, torch.nn.Parameter):
    """A torch.nn.Parameter with MindSpore's methods and a name, which its network replaces by its path."""

    def __new__(
        cls,
        default_input: Any,
        name: str | None = None,
        requires_grad: bool = True,
        layerwise_parallel: bool = False,
        parallel_optimizer: bool = True,
    ) -> Parameter:
        """From anything `Tensor` takes; the data is shared with a tensor given. These cells train alone."""
        data = plain_tensor(torch.as_tensor(default_input)).detach()
        parameter = super().__new__(cls, data, requires_grad and data.is_floating_point())
        parameter._called = "Parameter" if name is None else name
        return parameter

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def name(self) -> str:
        """What it is called: its path, once its network has listed it."""
        return self._called

    @name.setter
    def name(self, name: str) -> None:
        self._called = name

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = Parameter(data, self.name, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Parameter, (plain_tensor(self).detach(), self.name, self.requires_grad)

    def set_data(self, data: Any) -> Parameter:
        """Copy new values in; shape and dtype stay."""
        with torch.no_grad():
            self.copy_(torch.as_tensor(data, dtype=self.dtype))
        return self


class ParameterTuple(tuple[torch.nn.Parameter, ...]):
    """Parameters side by side, as optimizers and gradient functions take them."""

    def clone(self, prefix: str, init: str = "same") -> ParameterTuple:
        """Parameters of their own called `prefix.name`: equal ("same"), or filled with "zeros" or "ones".

        ValueError for another `init`.
        """
        if init not in _CLONES:
            raise ConfigError(f"ParameterTuple.clone: 'init' must be one of {list(_CLONES)}, got {init!r}")
        copies = ((getattr(p, "name", ""), _CLONES[init](plain_tensor(p.detach()))) for p in self)
        return ParameterTuple(Parameter(t, f"{prefix}.{name}") for name, t in copies)


_CLONES = {"same": torch.clone, "zeros": torch.zeros_like, "ones": torch.ones_like}


def _dtype_of(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if dtype == "bfloat16" or dtype is None else np.dtype(dtype).name
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"For 'Tensor.astype', expected a dtype such as mindspore.float16, but got {dtype!r}")
    return found


def tensor(input_data: Any, dtype: torch.dtype | None = None) -> Tensor:
    """`Tensor(input_data, dtype)`."""
    return Tensor(input_data, dtype)


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor that shares the array's memory."""
    return as_tensor(torch.from_numpy(array))


def mutable(input_data: Any, dynamic_len: bool = False) -> Any:
    """`input_data`; nothing here is frozen into a graph."""
    return input_data


def check_kind(owner: str, name: str, value: Any, *kinds: type) -> None:
    """TypeError for what is of none of these classes; True and False are no numbers, as in MindSpore."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"For '{owner}', the '{name}' must be {expected}, but got '{type(value).__name__}'.")


def check_whole(owner: str, name: str, value: Any, least: int = 1) -> None:
    """TypeError for what is no integer, ValueError for one below `least`, as in MindSpore."""
    check_kind(owner, name, value, int)
    if value < least:
        raise ConfigError(f"For '{owner}', the '{name}' must be int and must be >= {least}, but got {value}.")


def as_tensor(t: torch.Tensor) -> Tensor:
    """The same tensor, graph included, with MindSpore's methods."""
    return t if isinstance(t, Tensor) else t.as_subclass(Tensor)


def plain_tensor(t: torch.Tensor) -> torch.Tensor:
    """The same tensor, graph included, as torch's own class."""
    return t if type(t) is torch.Tensor else t.as_subclass(torch.Tensor)
