"""Fully qualified names (FQNs) of modules and parameters: the same under DDP, compile and other wrappers.

State is keyed by these names (law 11, ARCHITECTURE.md). Nothing here knows about precision.
"""

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def fqn(name: str) -> str:
    """`name` without the path segments that DDP, torch.compile and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def fqns(names: Iterable[str]) -> dict[str, str]:
    """Each name with its fully qualified form, or unchanged where two names would become one."""
    full_names = list(names)
    short = [fqn(name) for name in full_names]
    times = Counter(short)
    return {name: (c if c and times[c] == 1 else name) for name, c in zip(full_names, short)}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters under fully qualified names, a tied parameter once, under its first name."""
    parameters = dict(model.named_parameters())
    names = fqns(parameters)
    return {names[name]: parameter for name, parameter in parameters.items()}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module that a compiled module (`torch.compile`) wraps, or the module itself."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else unwrap(inner)


NORMALISATIONS = ("_NormBase", "GroupNorm", "*LayerNorm", "*RMSNorm")
"""Globs over class names: under these torch and the model libraries keep normalisation layers."""


def is_normalisation(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer, by its class's name or a base's.

    Level O2 keeps the weights of such modules in fp32; of any other class a rule of a plan says so.
    """
    names = [base.__name__ for base in type(module).__mro__]
    return any(fnmatchcase(name, pattern) for name in names for pattern in NORMALISATIONS)
