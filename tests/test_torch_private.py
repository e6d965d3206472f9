"""Private names of torch: one module uses them; this torch has every one; a missing one is named."""

import ast
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfstep import torch_private
from halfstep.errors import UnsupportedError

SOURCE = Path(torch_private.__file__).parent
#: What is not counted, as `torch_private` says; what we set on parameters; what is Python's.
KNOWN = {"_version", "_parameters", "_buffers", "_modules", "_stands_for", "_replace", "_asdict", "_fields"}
#: Files that may use private names of torch, and why. The list may only shrink.
EXCEPTIONS = {
    "compat/device_module.py": {"_is_in_bad_fork", "_register_device_module"},  # what torch asks of a device
    "compat/apex/fp16_utils.py": {"_loss_scale", "_unskipped"},  # Apex's own
    "compat/mindspore/nn/_layers.py": {"_conv_forward"},  # layers that are torch's with another padding
    # ops, by their names in torch.ops; one that is missing is not chosen
    "casting/kinds/products.py": {"_linear_pointwise"},
    "casting/kinds/attention.py": {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "devices/capabilities.py": {"_scaled_mm"},  # an op too
    "scaling/grad_scaler.py": {  # a subclass of torch's GradScaler, which says itself what it needs of it
        *("_scale", "_growth_tracker", "_per_optimizer_states", "_check_inf_per_device"),
        *("_check_scale_growth_tracker", "_unscale_grads_", "_maybe_opt_step"),
        *("_lazy_init_scale_growth_tracker", "_get_growth_tracker"),
    },
    "numerics/cures.py": {"_scale"},  # any scaler's
    "integrations/lightning.py": {"_after_closure"},  # Lightning's, for those who write a precision plugin
}


def is_private(name: str) -> bool:
    return name[:1] == "_" and name[:2] != "__" and len(name) > 1


def own_names(trees: list[ast.Module]) -> set[str]:
    """Private names that the package itself defines, as attributes, functions, classes, arguments or keys."""
    found: set[str] = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            root = node.value
            found |= {node.attr} if isinstance(root, ast.Name) and root.id in ("self", "cls") else set()
    return found


def uses(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names of others in a file: imported, reached through a name, or asked for by a string."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if any(map(is_private, a.name.split(".")))}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("halfstep"):
            names = [f"{node.module}.{a.name}" for a in node.names]
            found |= {name for name in names if any(map(is_private, name.split(".")))}
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | KNOWN:
            python = isinstance(node.value, ast.Name) and node.value.id in ("os", "sys", "atexit")
            found |= set() if python else {node.attr}
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "vars(torch)":
            found.add(ast.literal_eval(node.slice))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            asked = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            found |= {name for name in asked if is_private(name) and name not in own | KNOWN}
    return found


def test_one_module_uses_the_private_names_of_torch():
    trees = {str(f.relative_to(SOURCE)): ast.parse(f.read_text()) for f in SOURCE.rglob("*.py")}
    own, outside = own_names(list(trees.values())), defaultdict(set)
    for file, tree in trees.items():
        found = uses(tree, own) - EXCEPTIONS.get(file, set())
        if found and file != "torch_private.py":
            outside[file] = found
    assert dict(outside) == {}
    assert "torch._ops.OpOverload" in uses(trees["torch_private.py"], own)  # the search finds them


def test_the_search_finds_each_way_to_use_one():
    code = """
import torch._dynamo
from torch._C import _current_graph_task_id
from torch.utils import _pytree as pytree
torch._foreach_norm(tensors, 2)
ddp._join_config
getattr(module, "_flat_weights", None)
vars(torch)["_foreach_sub_"]
"""
    names = {"torch._dynamo", "torch._C._current_graph_task_id", "torch.utils._pytree"}
    assert uses(ast.parse(code), set()) == names | {
        "_foreach_norm",
        "_foreach_sub_",
        "_join_config",
        "_flat_weights",
    }


@pytest.mark.parametrize("name", sorted(torch_private._NAMES))
def test_this_torch_has_every_private_name_that_the_package_uses(name):
    assert getattr(torch_private, name) is not None


def test_every_name_says_what_breaks_without_it():
    said = [use for _, use in torch_private._NAMES.values()]
    assert all(re.fullmatch(r"to [a-z].{8,}", use) for use in said)
    public = [f for n, f in vars(torch_private).items() if not is_private(n) and hasattr(f, "__code__")]
    assert [f.__name__ for f in public if f.__module__ == torch_private.__name__ and not f.__doc__] == []


@pytest.mark.parametrize("lacking", ["_C._no_such_function", "_no_such_module.function"])
def test_a_missing_name_is_named_at_its_first_use(monkeypatch, lacking):
    monkeypatch.setitem(torch_private._NAMES, "graph_task", (lacking, "to tell backward from forward"))
    monkeypatch.delitem(vars(torch_private), "graph_task", raising=False)
    told = f"torch {torch.__version__} has no torch.{lacking}, which halfstep needs to tell backward"
    with pytest.raises(UnsupportedError, match=re.escape(told)):
        torch_private.graph_task()


def test_what_is_no_name_at_all_is_an_attribute_error():
    assert not hasattr(torch_private, "graph_tusk")


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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_objects_of_torch_have_what_is_asked_of_them():
    """The functions that reach into objects, each on a real one."""
    torch.manual_seed(0)
    lstm, linear = nn.LSTM(2, 3), nn.Linear(2, 2)
    names, weights = torch_private.flat_weights(lstm)
    assert list(map(id, weights)) == [id(getattr(lstm, name)) for name in names]
    torch_private.set_flat_weights(lstm, list(weights))
    assert torch_private.flat_weights(linear) is None
    handle = linear.register_forward_pre_hook(lambda module, args: None)
    before, after, *notes = torch_private.hooks_of(linear)
    assert list(before) == [handle.id]
    assert (len(after), len(notes)) == (0, 3)
    add = torch.ops.aten.add.Tensor
    assert torch_private.schema_of(add).name == "aten::add"
    assert torch_private.overload_packet_name(torch.ops.aten.add) == "aten::add"
    assert torch.equal(torch_private.call_of(add)(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    one = torch.ones(2, requires_grad=True)
    assert torch_private.node_number((one + 1).grad_fn) < torch_private.node_number((one + 1).grad_fn)
    assert torch_private.sequence_number() > 0
    assert (torch_private.in_forward_ad(), torch_private.is_jit_tracing()) == (False, False)
    assert (torch_private.graph_task(), torch_private.running_node()) == (-1, None)
    assert torch_private.functorch_level() is None
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (3,), check_invariants=True)
    assert torch_private.stored_values(twice).tolist() == [1.0, 1.0]
    assert torch_private.local_tensor(one) is one
    assert torch_private.memory_of(one) == torch_private.memory_of(one.detach())
    assert [dict(hooks) for hooks in torch_private.load_hooks(torch.optim.SGD([one], lr=0.1))] == [{}, {}]
    handle = one.register_post_accumulate_grad_hook(lambda p: None)
    assert list(torch_private.gradient_hooks(one)) == [handle.id]
    assert dict(torch_private.hooks_after_load(linear)) == {}
    sgd = torch.optim.SGD(linear.parameters(), lr=0.1)
    assert [dict(hooks) for hooks in torch_private.step_hooks(sgd)] == [{}, {}]
    library = torch.library.Library("halfstep_seam_test", "DEF")
    torch_private.destroy(library)
    assert isinstance(torch_private.dynamo_traces_autocast(), bool)
    assert torch_private.not_compiled(is_private) is is_private
