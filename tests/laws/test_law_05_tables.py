"""Law 5: a policy gives every device the same rules; only the table "torch" mirrors torch's own lists."""

import pytest

from halfstep.policy import Policy
from halfstep.policy.ops import TABLES, Rule, rows


@pytest.mark.parametrize("table", sorted(set(TABLES) - {"torch"}))
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_rules_do_not_depend_on_the_device(table: str, device: str) -> None:
    assert Policy(table=table).rows(device) == Policy(table=table).rows()


def test_the_torch_table_is_the_exception() -> None:
    assert rows("torch", "cpu")["cross_entropy_loss"].rule is Rule.FULL
    assert "cross_entropy_loss" not in rows("torch", "cuda")
    assert rows("torch", "npu") == rows("torch", "cuda")


def test_the_default_table_decides_every_op_that_a_native_list_casts() -> None:
    """An op that only one device's native list casts would get another dtype there."""
    assert (set(rows("torch", "cpu")) | set(rows("torch", "cuda"))) - set(TABLES["halfstep"]) == set()
