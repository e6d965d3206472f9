"""mindspore.context: modes and device. Functions run as written in either mode, on torch's devices.

What changes no number here is taken and remembered (`get_context` gives it back); what would change one and
does not is told by a warning, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from halfstep import devices
from halfstep.compat.mindspore._tensor import check_kind
from halfstep.errors import ConfigError, UnsupportedError, warn

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "ParallelMode",
    "get_auto_parallel_context",
    "get_context",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_context",
    "set_deterministic",
    "set_device",
]

GRAPH_MODE, PYNATIVE_MODE = 0, 1
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "mode": (GRAPH_MODE, PYNATIVE_MODE),
    "device_target": ("CPU", "GPU", "Ascend"),
    "deterministic": ("ON", "OFF"),
}
_NO_EFFECT = """
    aoe_config aoe_tune_mode auto_tune_mode check_bprop compile_cache_path debug_level device_id
    disable_format_transform dump_config enable_compile_cache enable_dump enable_graph_kernel
    enable_mem_reuse enable_profiling env_config_path exec_order gpu_config grad_for_scalar
    graph_kernel_flags host_scheduling_max_threshold inter_op_parallel_num jit_config jit_enable_inplace_ops
    jit_level jit_syntax_level max_call_depth max_device_memory memory_offload memory_optimize_level
    memory_optimize_threshold mempool_block_size op_timeout parallel_speed_up_json_path print_file_path
    profiling_options pynative_synchronize reserve_class_name_in_scope runtime_num_threads
    save_compile_cache save_dump_path save_graphs save_graphs_path support_binary variable_memory_max_size
"""
"""Settings of MindSpore that change no number here."""
_OF_PRECISION = ("ascend_config", "enable_reduce_precision")


class ParallelMode:
    """Names of the ways to train by many devices; here one process trains alone, or torchrun starts many."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


_said: dict[str, Any] = {
    "mode": PYNATIVE_MODE,
    "device_target": "CPU",
    "device_id": 0,
    "deterministic": "OFF",
}


def set_context(**kwargs: Any) -> None:
    """Take MindSpore's settings: `mode`, `device_target`, `deterministic` and those that change no number.

    Raises:
        ValueError: a keyword that MindSpore has not, or a mode, target or value that it refuses.
    """
    for key, value in kwargs.items():
        _check_key("context.set_context", key)
        _check_value("context.set_context", key, value)
    for key, value in kwargs.items():
        if key == "device_target":
            _check_target("context.set_context", value)
        elif key == "deterministic":
            set_deterministic(value == "ON")
        elif key in _OF_PRECISION:
            mode = value.get("precision_mode") if isinstance(value, Mapping) else value
            if mode:
                warn(
                    f"{key} asks for {mode!r}, which has no effect here: precision is what "
                    "auto_mixed_precision, to_float and the loss scale say"
                )
        _said[key] = value


def get_context(attr_key: str) -> Any:
    """What `set_context` was told, or what holds without; None for what was not said.

    Raises:
        ValueError: a key that MindSpore has not.
    """
    _check_key("context.get_context", attr_key)
    return _said.get(attr_key)


def _check_key(owner: str, key: str) -> None:
    if key not in (*_said, *_OF_PRECISION, *_NO_EFFECT.split()):
        raise ConfigError(
            f"For '{owner}', the argument {key} is not recognized: expected mode, device_target, "
            "deterministic or another of MindSpore's"
        )


def _check_value(owner: str, key: str, value: Any) -> None:
    if value not in _ALLOWED.get(key, (value,)):
        raise ConfigError(
            f"For '{owner}', the argument '{key}' must be one of {list(_ALLOWED[key])}, but got {value}."
        )


def set_device(device_target: str, device_id: int | None = None) -> None:
    """Name the device: "CPU" changes nothing, since tensors live where torch puts them.

    Raises:
        ValueError: another word than "CPU", "GPU" and "Ascend", a negative number, a device that is absent.
    """
    if device_id is not None and device_id < 0:
        raise ConfigError(f"The device id must bigger than or equal to 0, but got {device_id}.")
    _check_value("set_device", "device_target", device_target)
    _check_target("set_device", device_target)
    _said.update(device_target=device_target, device_id=device_id or 0)


def _check_target(owner: str, target: Any) -> None:
    if target == "CPU":
        return
    kind = {"GPU": "cuda", "Ascend": "npu"}[target]
    if kind not in devices.available():
        raise ConfigError(
            f"For '{owner}', device_target {target!r} needs torch's device {kind!r}, and this torch has "
            f"{', '.join(devices.available())}: say 'CPU', or bring the device up first"
        )
    warn(
        f"device_target={target!r} moves nothing here: move the network with net.to({kind!r}) and each batch "
        f"with x.to({kind!r})"
    )


def set_deterministic(deterministic: bool) -> None:
    """Have torch use deterministic kernels only, or all; TypeError for what is no bool."""
    check_kind("set_deterministic", "deterministic", deterministic, bool)
    torch.use_deterministic_algorithms(deterministic)
    _said["deterministic"] = "ON" if deterministic else "OFF"


def set_auto_parallel_context(**kwargs: Any) -> None:
    """Take the settings of a process that trains alone.

    Raises:
        UnsupportedError: another `parallel_mode`; torchrun and DDP train by many processes here.
    """
    mode = kwargs.get("parallel_mode", ParallelMode.STAND_ALONE)
    if mode != ParallelMode.STAND_ALONE:
        raise UnsupportedError(
            f"parallel_mode={mode!r}: these cells train alone. By many processes train natively, with "
            "torchrun, hs.prepare and DistributedDataParallel (docs/many-ranks.md)"
        )
    _parallel.update(kwargs)


_ALONE = {"parallel_mode": ParallelMode.STAND_ALONE, "gradients_mean": False, "device_num": 1}
_parallel: dict[str, Any] = {**_ALONE}


def get_auto_parallel_context(attr_key: str) -> Any:
    """What `set_auto_parallel_context` was told, None for what was not said."""
    return _parallel.get(attr_key)


def reset_auto_parallel_context() -> None:
    """Forget what `set_auto_parallel_context` was told."""
    _parallel.clear()
    _parallel.update(_ALONE)
