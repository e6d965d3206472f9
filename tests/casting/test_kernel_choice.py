"""Choices follow from given measurements; as data they are read, written, pinned and saved."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.casting import autocast, kernel_choice
from halfstep.casting.kernel_choice import (
    KernelTable,
    Row,
    decide,
    decide_whole,
    dump_table,
    from_plain,
    load_table,
    read_toml,
    table_of,
    to_plain,
)
from halfstep.casting.kinds.kind import NATIVE, ROUNDED, Choice, OpClass
from halfstep.errors import CheckpointError, ConfigError
from halfstep.policy.plan import toml_table

CONV = OpClass("convolution", "fp16", "2d dense", "small", 1)


def test_a_table_prints_what_it_holds() -> None:
    table = KernelTable([Row(Choice(forward="rounded"), op="linear"), Row(Choice())], name="mine")
    assert repr(table) == "KernelTable('mine': 2 rows, 1 of them another way than native)"


def test_another_way_replaces_native_at_four_fifths_of_its_time() -> None:
    times = {"forward": {"native": 1.0, "rounded": 0.8}, "input": {"native": 1.0, "rounded": 0.81}}
    assert decide(times, 0.0)[0] == Choice(forward="rounded")


def test_the_fastest_of_several_is_taken_and_the_reason_says_its_share() -> None:
    times = {"weight": {"native": 1.0, "rounded": 0.3, "rounded_channels_last": 0.25, "channels_last": 0.9}}
    choice, why = decide(times, 0.0)
    assert choice == Choice(weight="rounded_channels_last")
    assert why == "weight: rounded_channels_last at 0.25 of native"


def test_a_native_kernel_that_was_never_tried_again_is_left() -> None:
    choice, why = decide({"weight": {"native": None, "rounded": 1.0}}, 1.0)
    assert choice == Choice(weight="rounded")
    assert "small part" in why


def test_leaving_native_must_win_more_than_it_costs() -> None:
    times = {"forward": {"native": 50e-6, "rounded": 20e-6}, "input": {"native": 50e-6, "rounded": 20e-6}}
    assert decide(times, 59e-6)[0] == Choice("rounded", "rounded")
    assert decide(times, 61e-6)[0] == NATIVE


def test_an_op_as_a_whole_follows_the_sum_of_its_directions() -> None:
    times = {"forward": {"native": 1.0, "rounded": 2.0}, "weight": {"native": 146.0, "rounded": 1.0}}
    assert decide_whole(times, 0.0)[0] == ROUNDED
    assert decide_whole({"forward": times["forward"]}, 0.0)[0] == NATIVE
    assert decide_whole({"forward": {"native": 1.0, "rounded": 0.7}}, 0.4)[0] == NATIVE


def test_a_class_is_measured_once_and_only_what_it_needs() -> None:
    asked: list[tuple[str, str]] = []

    def measure(cls: OpClass, direction: str) -> dict[str, float | None]:
        asked.append((cls.op, direction))
        return {"native": 2.0, "rounded": 1.0}

    table = KernelTable((), measure)
    assert table.choose(CONV, "w") == Choice("rounded", "native", "rounded")
    assert table.choose(CONV, "w") == Choice("rounded", "native", "rounded")
    assert asked == [("convolution", "forward"), ("convolution", "weight")]


def test_a_choice_that_does_not_pay_in_a_layer_is_not_made() -> None:
    asked: list[tuple[OpClass, str, Choice]] = []

    def pays(cls: OpClass, needs: str, choice: Choice) -> bool:
        asked.append((cls, needs, choice))
        return cls.op != "linear"

    table = KernelTable((), lambda cls, direction: {"native": 2.0, "rounded": 1.0}, pays=pays)
    linear = OpClass("linear", "bf16", "plain", "tiny", 1)
    assert table.choose(linear, "w") == NATIVE
    assert "does not pay" in table.row(linear, "w").why
    assert table.choose(CONV, "w") == Choice("rounded", "native", "rounded")
    assert table.with_rows([Row(ROUNDED, op="gru")]).choose(linear, "iw") == NATIVE
    assert [cls.op for cls, _, _ in asked] == ["linear", "convolution", "linear"]


def test_a_table_pinned_to_its_own_choices_is_itself_so_that_loads_pile_nothing_up() -> None:
    table = KernelTable((), lambda cls, direction: {"native": 2.0, "rounded": 1.0})
    table.choose(CONV, "iw")
    assert table.with_rows(table.rows) is table
    assert load_table(dump_table(table), table) is table
    other = table.with_rows([replace(table.rows[0], choice=NATIVE)])
    assert other.choose(CONV, "iw") == NATIVE
    assert load_table(dump_table(other), other) is other
    whole = load_table([*dump_table(table), *to_plain([Row(NATIVE)])], table)
    assert load_table(dump_table(whole), whole) is whole


def test_the_first_row_that_fits_holds_and_what_no_row_knows_is_native() -> None:
    table = KernelTable(
        [Row(Choice(weight="rounded"), op="convolution", dtype="fp16"), Row(ROUNDED, dtype="fp16")]
    )
    assert table.choose(CONV, "iw") == Choice(weight="rounded")
    assert table.choose(OpClass("linear", "fp16", "plain", "tiny", 2), "") == ROUNDED
    assert table.choose(OpClass("linear", "bf16", "plain", "tiny", 2), "") == NATIVE


def test_rows_survive_toml_and_state(tmp_path) -> None:
    rows = (
        Row(Choice("native", "rounded", "onednn"), "linear", "bf16", "plain", "large", 4, "iw", 'says "so"'),
        Row(ROUNDED, "aten::conv_tbc", "bf16", "", "", 0, "*"),
        Row(ROUNDED, dtype="fp16", why="of two\nlines,\ta \\ and \x7f, größer"),
    )
    file = tmp_path / "kernels.toml"
    tables = [toml_table("[[kernel]]", row) for row in to_plain(rows)]
    file.write_text("\n".join(["# of one machine\nformat = 1\n", *tables]), encoding="utf-8")
    assert read_toml(file) == rows
    assert from_plain(to_plain(rows)) == rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("format = 2", "this version reads format = 1"),
        ("format = 1\n[[kernel]]\nforward = 'fast'", "row 1 has forward = 'fast'; expected 'native', "),
        ("format = 1\n[[kernel]]\nneeds = 'x'", "row 1 has needs = 'x'"),
        ("format = 1\n[[kernel]]\nopp = 'x'", "row 1 has 'opp'; expected some of op, dtype"),
        ("format = 1\n[[kernel]]\nthreads = 'x'", "threads = 'x'; expected a number"),
        ("format = 1\nkernel = 'x'", "expected a list"),
        ("format = 1\n[[kernel]]\nop = 'convolutoin'", "row 1 has op = 'convolutoin'; .* mean 'convolution'"),
        ("format = 1\n[[kernel]]\nop = 'aten::liner'", "did you mean 'aten::linear'"),
        ("format = 1\n[[kernel]]\ndtype = 'bf17'", "dtype = 'bf17'; expected 'bf16', 'fp16'; did you"),
        ("format = 1\n[[kernel]]\nsize = 'tyny'", "size = 'tyny'; .* did you mean 'tiny'"),
        ("format = 1\n[[kernel]]\ngeometry = '2d dens'", "did you mean '2d dense'"),
        ("format = 1\n[[kernel]]\nop = 'linear'\ngeometry = '2d dense'", "expected 'plain', 'thin'"),
        ("format = 1\n[[kernels]]\nop = 'linear'", "it has 'kernels'; expected format = 1"),
        ("not toml", "kernels file"),
    ],
)
def test_a_wrong_file_says_what_is_wrong_with_it(text: str, words: str, tmp_path) -> None:
    file = tmp_path / "kernels.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        autocast("cpu", "bf16", kernels=file)


@pytest.mark.parametrize("given", ["fastest", 3, "/no/such/file.toml"])
def test_unknown_kernels_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="'measured', 'native', 'rounded'"):
        hs.prepare(nn.Linear(2, 2), kernels=given)


def test_the_environment_names_the_default(monkeypatch) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, "rounded")
    assert table_of() is table_of("rounded")
    monkeypatch.setenv(kernel_choice.VARIABLE, "nonsense")
    with pytest.raises(ConfigError, match="HALFSTEP_KERNELS='nonsense'"):
        autocast("cpu")
    monkeypatch.delenv(kernel_choice.VARIABLE)
    assert table_of() is table_of("measured")


def test_a_region_inside_another_keeps_its_kernels() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with autocast("cpu", "bf16", kernels="rounded"), autocast("cpu", "fp16"):
        assert (x @ x).grad_fn.name() == "ProductBackward"
    with autocast("cpu", "bf16", kernels="rounded"), autocast("cpu", "fp16", kernels="native"):
        assert (x @ x).grad_fn.name() != "ProductBackward"


def test_choices_change_neither_ops_of_other_rules_nor_fp32_regions() -> None:
    region, off = autocast("cpu", "bf16", kernels="rounded"), autocast("cpu", "fp32", kernels="rounded")
    x = torch.randn(4, 4, requires_grad=True)
    with region:
        assert torch.exp(x).dtype is torch.float32
    with off:
        assert (x @ x).grad_fn.name() == "MmBackward0"


# --- saved and loaded --------------------------------------------------------------------------------------


def test_a_state_brings_its_choices_and_leaves_the_rest_to_the_machine() -> None:
    there = KernelTable((), lambda cls, direction: {"native": 2.0, "rounded": 1.0}, name="measured")
    there.choose(CONV, "iw")
    here = KernelTable((), lambda cls, direction: {"native": 1.0, "rounded": 2.0}, name="measured")
    assert here.choose(CONV, "iw") == NATIVE
    table = load_table(dump_table(there), here)
    assert table.choose(CONV, "iw") == ROUNDED
    assert table.choose(CONV, "w") == NATIVE
    assert here.choose(CONV, "iw") == NATIVE, "the machine's own table was changed"


def test_ranks_keep_their_whole_table_beside_what_a_state_brings() -> None:
    there = KernelTable((), lambda cls, direction: {"native": 2.0, "rounded": 1.0}, name="measured")
    there.choose(CONV, "iw")
    mine = [
        Row(NATIVE, CONV.op, CONV.dtype, CONV.geometry, CONV.size, 1, "iw"),
        Row(Choice("rounded"), CONV.op, CONV.dtype, CONV.geometry, CONV.size, 1, "w"),
    ]
    table = load_table(dump_table(there), KernelTable(mine, name="of rank 0", measured=True))
    assert table.choose(CONV, "iw") == ROUNDED
    assert table.choose(CONV, "w") == Choice("rounded")
    again = load_table(dump_table(table), KernelTable((), name="of rank 0", measured=True))
    assert again.rows == table.rows


def test_a_row_for_all_of_an_op_holds_over_what_was_measured_before_the_load() -> None:
    here = KernelTable((), lambda cls, direction: {"native": 2.0, "rounded": 1.0}, name="measured")
    assert here.choose(CONV, "iw") == ROUNDED
    table = load_table([{"op": "convolution", "forward": "native"}], here)
    assert table.choose(CONV, "iw") == NATIVE


def test_a_state_that_cannot_be_read_changes_nothing() -> None:
    amp = hs.prepare(nn.Linear(2, 2))
    state, before = amp.state_dict(), amp.kernels
    for damaged in ("x", 3, {"rows": []}, [{"forward": "fast"}]):
        with pytest.raises(CheckpointError, match="kernel"):
            amp.load_state_dict({**state, "kernels": damaged})
    assert amp.kernels is before


def test_a_loaded_state_is_saved_as_it_was() -> None:
    for word in ("native", "rounded", None):
        first, second = (hs.prepare(nn.Linear(2, 2), kernels=word) for _ in range(2))
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()


def test_a_loaded_session_computes_by_the_saved_kernels() -> None:
    first = hs.prepare(nn.Linear(4, 4), kernels=KernelTable([Row(ROUNDED, op="linear")]))
    second = hs.prepare(nn.Linear(4, 4), kernels="native")
    with second.autocast():
        assert "Linear" not in second.model(torch.randn(2, 4)).grad_fn.name()
    second.load_state_dict(first.state_dict())
    with second.autocast():
        assert second.model(torch.randn(2, 4)).grad_fn.name() == "LinearBackward"
