"""What `import halfstep` gives, and what it leaves unloaded."""

import inspect
import subprocess
import sys
from collections.abc import Mapping

import pytest

import halfstep as hs

PUBLIC = [
    *("Audit", "BadOp", "BannedOpError", "CheckpointError", "ConfigError", "Conversion", "DataError"),
    *("DynamicLossScale", "FORMATS", "Finding", "Format", "GradScaler", "HalfstepError"),
    *("HalfstepWarning", "HeadroomLossScale", "LEVELS", "Level", "LossScale", "LossScaleCollapsed"),
    *(
        "MasterRangeError",
        "MasterWeights",
        "NoLossScale",
        "NonFiniteError",
        "Outcome",
        "Plan",
        "PlanError",
        "RankError",
        "PlanRule",
    ),
    *("Policy", "Replayable", "Rule", "ScalerStateError", "Session", "StaticLossScale", "Trace"),
    *("Trainer", "Tuning", "UnsupportedError", "Watch", "active_policy", "all_finite", "audit"),
    *("autocast", "convert"),
    *("custom_bwd", "custom_fwd", "devices", "distributed", "doctor", "first_bad_op", "format_of"),
    *("frozen_weights", "lint", "op", "optim", "prepare", "revert", "round_to", "select_tree"),
    *("to_float", "trace_step", "tune", "watch"),
]
LAZY = (
    *("numba", "rich", "tyro", "matplotlib", "sklearn", "scipy", "triton", "safetensors", "torch._inductor"),
    *("halfstep.cli", "halfstep.report", "halfstep.recipes"),
)


def test_the_public_names_are_these():
    assert sorted(hs.__all__) == sorted(PUBLIC)
    assert len(set(hs.__all__)) == len(hs.__all__)
    assert [name for name in PUBLIC if not hasattr(hs, name)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name):
    thing = getattr(hs, name)
    if isinstance(thing, Mapping):  # tables: every row is documented by its class
        assert {inspect.getdoc(type(row)) is None for row in thing.values()} == {False}
        return
    doc = inspect.getdoc(thing) or ""
    assert len(doc.split()) >= 4
    # The signature that dataclass puts where no docstring was written.
    assert not doc.startswith(f"{name}(")


def test_the_class_autocast_hides_no_package():
    code = "import halfstep as hs, halfstep.casting.regions as regions; regions.resolve, hs.autocast('cpu')"
    subprocess.run([sys.executable, "-c", code], check=True)


def loaded_after(statement):
    """Modules in a fresh process after `statement`."""
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy():
    before, after = loaded_after("import torch"), loaded_after("import halfstep")
    added = after - before
    assert "halfstep.session" in added
    assert sorted(added & set(LAZY)) == []
    foreign = {name.split(".")[0] for name in added} - {"halfstep", "torch"} - set(sys.stdlib_module_names)
    foreign = {name for name in foreign if not name.startswith("_sysconfigdata")}  # the interpreter's own
    assert foreign == set()


@pytest.mark.parametrize(
    "module", [hs, hs.optim, hs.devices, hs.distributed, hs.doctor], ids=lambda m: m.__name__
)
def test_dir_shows_public_names_alone(module):
    assert set(dir(module)) - {"__version__"} == set(module.__all__)
