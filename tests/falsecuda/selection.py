"""The tests of the ordinary suite that run with their tensors on the false CUDA device.

They say nothing of devices; with the default device set, their models, batches and optimizers lie on it. A
GPU tells of a step after it: a test that expects an answer, a warning or an error in the step is left out.
"""

GROUPS: dict[str, tuple[str, ...]] = {
    "steps": (
        "tests/session/test_session.py",
        "tests/session/test_losses.py",
        "tests/session/test_accumulate.py",
        "tests/scaling/test_grad_scaler.py",
    ),
    "observation": (
        "tests/session/test_precision.py",
        "tests/session/test_round.py",
        "tests/session/test_refusals.py",
        "tests/gradients",
        "tests/scaling/test_torch_names.py",
        "tests/numerics/test_watch.py",
    ),
    "training": (
        "tests/session/test_ranks.py",
        "tests/optim/test_backends.py",
        "tests/optim/test_options.py",
        "tests/optim/test_step.py",
        "tests/optim/test_loading.py",
        "tests/trainer/test_loop.py",
        "tests/behaviour/test_gan.py",
        "tests/behaviour/test_newcomers.py",
        "README.md",
        "docs/concepts.md",
        "docs/getting-started.md",
    ),
}
"""Files of a group, a process each."""

_LATER = "it expects in the step what a GPU tells a step later"
_SPARSE = "the device has no sparse tensors"
_CPU = "it is about a CPU"
_CHIP = "its page makes a device of its own out of the host's memory"
_GLOO = "gloo joins its ranks, which ends the process where tensors are the device's"
_BATCHES = "the Trainer looks over batches of the host alone: reading those of a GPU would wait"
_SESSION = "tests/session/test_session.py::"
_NEWCOMERS = "tests/behaviour/test_newcomers.py::"
_LOOP = "tests/trainer/test_loop.py::"
_WATCH = "tests/numerics/test_watch.py::"
_SCALER = "tests/scaling/test_grad_scaler.py::"

CANNOT: dict[str, str] = {
    "docs/new-accelerator.md": _CHIP,
    _SESSION + "test_no_loss_scale_takes_every_step_and_warns_once": _LATER,
    _SESSION + "test_a_collapsing_scale_is_an_error": _LATER,
    _SESSION + "test_released_gradients_refuse_what_would_apply_twice_and_tell_a_partial_skip": _LATER,
    "tests/session/test_round.py::test_the_value_is_frozen_and_comes_back": _LATER,
    _LOOP + "test_bad_values_in_the_data_are_named_before_they_spoil_a_weight": _BATCHES,
    _LOOP + "test_a_diverging_run_warns_once_and_says_where": _LATER,
    _LOOP + "test_evaluation_leaves_frozen_parts_in_their_mode": _BATCHES,
    _LOOP + "test_a_file_of_an_earlier_version_is_read": "it compares with numbers that lie on the host",
    _WATCH + "test_a_session_s_gradients_are_noted_as_backward_left_them": _LATER,
    _WATCH + "test_each_optimizer_s_step_notes_its_own_gradients": _LATER,
    _WATCH + "test_released_gradients_are_noted": _LATER,
    _WATCH + "test_skips_and_scale_are_noted": _LATER,
    _WATCH + "test_a_scaler_s_scale_is_noted_as_the_step_had_it": _LATER,
    _WATCH + "test_a_nonfinite_gradient_is_noted_with_its_parameter": _LATER,
    _WATCH + "test_largest_of_any_dtype_and_layout": _SPARSE,
    "tests/optim/test_step.py::test_exact_fp16_says_when_a_weight_outgrows_it": _LATER,
    "tests/optim/test_step.py::test_what_cannot_be_updated_is_refused": _SPARSE,
    _NEWCOMERS + "test_an_epsilon_that_is_zero_is_named_where_the_loss_turns_nan": _LATER,
    "tests/gradients/test_outcome.py::test_queue_reads_host_outcomes_at_once": _LATER,
    _SCALER + "test_one_of_two_optimizers_skips_and_the_scale_backs_off_once": _LATER,
    _SCALER + "test_disabled_is_torchs_no_op_but_tells": _LATER,
    _SCALER + "test_a_collapsing_scale_is_an_error": _LATER,
    _SCALER + "test_a_host_sees_a_skip_by_step_not_being_called": (
        "on a GPU the step is called with the flag, as that of torch's fused optimizers is"
    ),
    "tests/gradients/test_stats.py::test_sparse_duplicates_count_summed_and_nothing_is_written": _SPARSE,
    "tests/session/test_accumulate.py::test_sparse_gradients_add_up_in_fp32_too": _SPARSE,
    "tests/gradients/test_unscale.py::test_mixed_dtypes_sparse_and_none": _SPARSE,
    _SCALER + "test_sparse_gradients": _SPARSE,
    _SCALER + "test_sparse_duplicates_whose_sum_overflows_are_found": _SPARSE,
    "tests/gradients/test_stats.py::test_a_look_without_the_largest_magnitude_agrees_with_measure": _CPU,
    "tests/session/test_accumulate.py::test_the_error_of_many_micro_batches_does_not_grow_over_ranks": _GLOO,
    "tests/gradients/test_unscale.py::test_a_vendors_kernels_are_used": _CPU,
    _SCALER + "test_same_calls_same_scales_skips_and_bits_as_torch": _CPU,
    _SCALER + "test_state_says_what_torchs_five_entries_cannot[HeadroomLossScale]": (
        "it compares a history of the device by `==`"
    ),
    "tests/scaling/test_torch_names.py::test_gradients_are_unscaled_by_a_scale_of_ones_own": _CPU,
}
"""Tests that are skipped, by name (with all or one of its parameters) or whole page, with the reason."""
