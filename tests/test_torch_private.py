"""Private names of torch: this torch has every one that the package uses; a missing one is named."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfstep import torch_private
from halfstep.errors import UnsupportedError

SOURCE = Path(torch_private.__file__).parent
DOTTED = re.compile(r"(?<![\w.\"])(torch(?:\.[a-z]\w*)*\._\w+(?:\.\w+)*|_C\.\w+(?:\.\w+)*)")
IMPORTED = re.compile(r"^\s*from (torch[\w.]*) import (.+)$", re.MULTILINE)


def private_names() -> dict[str, str]:
    """Name -> a file that has it, for every private name of torch's that is written out in the package."""
    found = {}
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        names = {re.sub("^_C", "torch._C", name) for name in DOTTED.findall(text)}
        for module, listed in IMPORTED.findall(text):
            each = [n.strip("() ").partition(" ")[0] for n in listed.partition("#")[0].split(",")]
            names |= {f"{module}.{n}" for n in each if n and (n[0] == "_" or "._" in module)}
        found |= dict.fromkeys(names, str(file.relative_to(SOURCE)))
    return found


def is_there(name: str) -> bool:
    """Whether this torch has it."""
    found = torch
    for depth, part in enumerate(name.split(".")[1:], 2):
        if not hasattr(found, part):
            try:
                found = importlib.import_module(".".join(name.split(".")[:depth]))
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


def test_this_torch_has_every_private_name_that_the_package_uses():
    names = private_names()
    assert "torch._C._current_graph_task_id" in names  # the search finds them
    assert {name: file for name, file in names.items() if not is_there(name)} == {}


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (torch_private.fsdp_policy_holders, "mp_policy"),
        (torch_private.fsdp_shards, "sharded_param"),
        (torch_private.fsdp_read_again, "reset_sharded_param"),
    ],
)
def test_a_torch_without_a_name_gives_an_error_that_names_both(ask, name):
    group = SimpleNamespace(fsdp_params=[SimpleNamespace()])
    with pytest.raises(UnsupportedError, match=rf"torch {re.escape(torch.__version__)} has no \w+\.{name}, "):
        ask(group)


def test_fsdp_groups_are_never_silently_none(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    class Sharded(nn.Linear, FSDPModule):
        def __new__(cls, *args):
            return object.__new__(cls)

        def _get_fsdp_state(self):
            return SimpleNamespace()

    with pytest.raises(UnsupportedError, match="_fsdp_param_group"):
        torch_private.fsdp_groups(Sharded(2, 2))
    assert torch_private.fsdp_groups(nn.Linear(2, 2)) == []
