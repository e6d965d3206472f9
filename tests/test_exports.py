"""What `import halfstep` gives, and what it leaves unloaded."""

import inspect
import subprocess
import sys
from collections.abc import Mapping

import pytest

import halfstep as hs

PUBLIC = [
    *("FORMATS", "LEVELS"),
    *("BannedOpError", "CheckpointError", "ConfigError", "DataError", "HalfstepError", "HalfstepWarning"),
    *("LossScaleCollapsed", "MasterRangeError", "PlanError", "ScalerStateError", "UnsupportedError"),
    *("Format", "Level", "Rule", "Policy", "Plan", "PlanRule", "Conversion", "MasterWeights", "Outcome"),
    *("LossScale", "NoLossScale", "StaticLossScale", "DynamicLossScale", "HeadroomLossScale", "GradScaler"),
    *("Session", "prepare"),
    *("active_policy", "all_finite", "autocast", "convert", "custom_bwd", "custom_fwd", "devices"),
    *("format_of", "frozen_weights", "op", "round_to", "select_tree", "to_float"),
]
LAZY = (
    *("numba", "rich", "tyro", "matplotlib", "sklearn", "scipy", "triton", "safetensors", "torch._inductor"),
    *("halfstep.cli", "halfstep.report", "halfstep.recipes", "halfstep.numerics.tape", "halfstep.trainer"),
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
    assert foreign == set()
