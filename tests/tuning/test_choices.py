"""What is decided from given measurements; no machine's speed is asked here."""

from dataclasses import replace

from halfstep.tuning.choices import NO_TIME, TORCHS, LevelChoice, Trial, decide, gradient_bound, loss_bound

FP32 = LevelChoice("O0")
O1, O2 = LevelChoice("O1", "bf16"), LevelChoice("O2", "bf16")
LAST = LevelChoice("O2", "bf16", "channels_last")


def timed(choice: LevelChoice, ms: float, gradient: float = 0.01, loss: float = 1e-4) -> Trial:
    error = (0.0, 0.0) if choice.dtype is None else (loss, gradient)
    return Trial(choice, (ms / 1e3,) * 3, *error)


def test_the_fastest_is_taken_and_its_time_is_the_reason() -> None:
    choice, reason = decide([timed(FP32, 100), timed(O1, 80), timed(O2, 60)])
    assert choice == O2
    assert "O2 bf16: 1.7x faster than fp32 (60 ms a step against 100 ms)" in reason
    assert "relative gradient error 0.01 (allowed 0.5 in bf16)" in reason


def test_where_nothing_beats_fp32_it_is_taken_and_said() -> None:
    choice, reason = decide([timed(FP32, 100), timed(O1, 119), timed(O2, 99)])
    assert choice == FP32
    assert reason.startswith(
        "O0: nothing here is faster than fp32; the best other setting, O2 bf16, is as fast "
        "(99 ms a step against 100 ms)"
    )


def test_a_gradient_far_from_fp32s_is_not_worth_any_speed() -> None:
    choice, reason = decide([timed(FP32, 100), timed(O1, 90), timed(O2, 10, gradient=0.6)])
    assert choice == O1
    assert "O2 bf16: its gradient is 0.6 of fp32's away from fp32's, more than 0.5" in reason


def test_a_loss_far_from_fp32s_is_refused_too() -> None:
    assert decide([timed(FP32, 100), timed(O1, 50, loss=0.02)])[0] == FP32


def test_gradients_that_are_not_numbers_are_far() -> None:
    choice, reason = decide([timed(FP32, 100), timed(O1, 50, gradient=float("nan"))])
    assert choice == FP32
    assert "O1 bf16: its gradient or fp32's is inf or NaN" in reason


def test_the_bounds_follow_the_dtypes_rounding() -> None:
    assert gradient_bound("bf16") == 0.5
    assert gradient_bound("fp16") == 0.0625
    assert loss_bound("bf16") == 8 * loss_bound("fp16") == 2**-6


def test_among_equals_the_plainest_is_taken() -> None:
    assert decide([timed(FP32, 100), timed(O1, 60), timed(O2, 60), timed(LAST, 60)])[0] == O1


def test_what_failed_is_named_and_passed_over() -> None:
    broken = Trial(O2, failed="LBFGS keeps its own references")
    choice, reason = decide([timed(FP32, 100), timed(O1, 120), broken])
    assert choice == FP32
    assert "O2 bf16: LBFGS keeps its own references" in reason


def test_nothing_else_at_all() -> None:
    choice, reason = decide([timed(FP32, 100), Trial(O1, failed="no")])
    assert choice == FP32
    assert reason == "O0: nothing else can be used; O1 bf16: no"


def test_where_time_ran_out_the_reason_says_so_and_what_to_give() -> None:
    late = [Trial(O1, failed=NO_TIME), Trial(O2, failed=NO_TIME)]
    choice, reason = decide([timed(FP32, 100), *late])
    assert choice == FP32
    assert reason == (
        "O0: nothing else was measured in the time there was; give more by seconds= (--seconds)"
    )
    assert "nothing else can be used" in decide([timed(FP32, 100), *late, Trial(LAST, failed="no")])[1]


def test_fp32_in_another_layout_counts_as_a_gain() -> None:
    trials = [timed(FP32, 100), timed(O1, 98), timed(LevelChoice("O0", layout="channels_last"), 70)]
    assert decide(trials)[0].label == "O0 channels_last"


def test_labels_name_what_is_not_plain() -> None:
    assert LevelChoice("O2", "fp16", "channels_last").label == "O2 fp16 channels_last"
    assert FP32.label == "O0"


TORCHS_BF16 = LevelChoice(TORCHS, "bf16")


def compiled(choice: LevelChoice, ms: float, seconds: float = 12.0) -> Trial:
    return replace(timed(replace(choice, compiled=True), ms), compiling=seconds)


def test_compiling_is_taken_where_it_is_faster_and_what_it_cost_is_said() -> None:
    choice, reason = decide([timed(FP32, 100), timed(O1, 80), timed(O2, 60), compiled(O2, 40)])
    assert choice == replace(O2, compiled=True)
    assert choice.label == "O2 bf16 compiled"
    assert reason.startswith("O2 bf16 compiled: 2.5x faster than fp32 (40 ms a step against 100 ms)")
    assert reason.endswith("O2 bf16 compiled is 1.5x faster than O2 bf16, after 12 s of compiling")


def test_compiling_that_buys_less_than_2_percent_is_not_taken_and_said() -> None:
    choice, reason = decide([timed(FP32, 100), timed(O1, 60), timed(O2, 70), compiled(O2, 59)])
    assert choice == O1
    assert "O2 bf16 compiled is 1.2x faster than O2 bf16, after 12 s of compiling" in reason
    assert decide([timed(FP32, 100), timed(O1, 60), compiled(O1, 58)])[0].compiled
    assert "as fast as O1 bf16" in decide([timed(FP32, 100), timed(O1, 60), compiled(O1, 59.5)])[1]
    assert "1.5x slower than O1 bf16" in decide([timed(FP32, 100), timed(O1, 60), compiled(O1, 90)])[1]


def test_fp32_may_be_what_is_compiled() -> None:
    assert decide([timed(FP32, 100), timed(O1, 120), compiled(FP32, 90)])[0].label == "O0 compiled"
    assert decide([timed(FP32, 100), timed(O1, 120), compiled(FP32, 99)])[0] == FP32


def test_torchs_region_is_never_taken_and_named_where_it_is_faster() -> None:
    choice, reason = decide([timed(FP32, 100), timed(O1, 60), timed(TORCHS_BF16, 50)])
    assert choice == O1
    assert reason.endswith("torch.autocast bf16 without halfstep is 1.2x faster than that (50 ms a step)")
    slower = decide([timed(FP32, 100), timed(O1, 60), timed(TORCHS_BF16, 59)])
    assert "torch.autocast" not in slower[1]
    wrong = decide([timed(FP32, 100), timed(O1, 60), timed(TORCHS_BF16, 50, gradient=0.6)])
    assert "torch.autocast" not in wrong[1]
    fp32, reason = decide([timed(FP32, 100), timed(O1, 120), timed(TORCHS_BF16, 50)])
    assert fp32 == FP32
    assert "torch.autocast bf16 without halfstep is 2x faster than that" in reason


def test_a_first_that_is_far_from_itself_is_no_error_of_ours() -> None:
    nan = float("nan")
    assert decide([timed(O1, 100, gradient=nan), timed(TORCHS_BF16, 50), timed(O2, 200)])[0] == O1


def test_no_time_to_compile_is_no_time() -> None:
    late = Trial(replace(FP32, compiled=True), failed=f"{NO_TIME}: compiling takes about 30 s")
    assert "give more by seconds=" in decide([timed(FP32, 100), Trial(O1, failed=NO_TIME), late])[1]
