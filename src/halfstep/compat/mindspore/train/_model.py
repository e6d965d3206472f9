"""Model: train, fit, eval and predict over `amp.build_train_network`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from halfstep.compat.mindspore import amp, nn
from halfstep.compat.mindspore.train._callbacks import (
    Callback,
    CallbackParam,
    RunContext,
    as_callbacks,
)
from halfstep.compat.mindspore.train._metrics import Loss, get_metrics
from halfstep.errors import ConfigError, DataError
from halfstep.trees import cast_floats

Callbacks = Callback | Iterable[Callback] | None


class Model:
    """A network with its loss, optimizer and metrics, trained at a precision level.

    Args:
        network: converted in place at `amp_level`.
        loss_fn: a Cell of (output, label); None where the network holds its loss.
        optimizer: over the network's parameters; None for evaluation only.
        metrics: a set of names, or a dict of Metrics, for `eval` and `fit`.
        eval_network: a Cell of (data, label) giving (loss, output, label), instead of network and loss.
        amp_level: "O0", "O1", "O2", "O3" or "auto".
        kwargs: `loss_scale_manager` and `keep_batchnorm_fp32`, instead of the level's presets;
            `boost_level`, which warns.

    `train_network` takes a training step, `eval_network` gives (loss, output, label).

    Raises:
        TypeError, ValueError: as `amp.build_train_network`.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        loss_fn: torch.nn.Module | None = None,
        optimizer: nn.Optimizer | None = None,
        metrics: Any = None,
        eval_network: torch.nn.Module | None = None,
        *,
        amp_level: str = "O0",
        boost_level: str = "O0",
        **kwargs: Any,
    ) -> None:
        if unknown := kwargs.keys() - {"loss_scale_manager", "keep_batchnorm_fp32"}:
            raise ConfigError(
                "The argument in 'kwargs' should be 'loss_scale_manager' or 'keep_batchnorm_fp32', but got "
                f"'{min(unknown)}'."
            )
        amp.check_level(amp_level, boost_level)
        if metrics and loss_fn is None and eval_network is None:
            raise ConfigError("the 'metrics' of a Model need a 'loss_fn' or an 'eval_network', got neither.")
        if optimizer is None and kwargs.get("loss_scale_manager") is not None:
            raise ConfigError("a Model with a 'loss_scale_manager' needs an 'optimizer', but got None.")
        self._output_dtype = torch.float16 if amp_level in ("O2", "O3") else None
        self.predict_network, self._loss_fn, self._optimizer = network, loss_fn, optimizer
        self._metrics = get_metrics(metrics)
        self.train_network: Any = None
        if optimizer is not None:
            self.train_network = amp.build_train_network(network, optimizer, loss_fn, amp_level, **kwargs)
        else:
            amp.auto_mixed_precision(network, amp_level)
        self.eval_network = eval_network
        if eval_network is None and loss_fn is not None:
            self.eval_network = nn.WithEvalCell(network, loss_fn, amp_level != "O0")

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Callbacks = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> None:
        """Train up to epoch number `epoch`. Sinking moves no data ahead here and changes nothing else."""
        self.fit(epoch, train_dataset, callbacks=callbacks, initial_epoch=initial_epoch)

    def fit(
        self,
        epoch: int,
        train_dataset: Any,
        valid_dataset: Any = None,
        valid_frequency: int | Iterable[int] = 1,
        callbacks: Callbacks = None,
        dataset_sink_mode: bool = False,
        valid_dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> None:
        """Train, and evaluate on `valid_dataset` every `valid_frequency` epochs, or after those listed.

        Raises:
            ValueError: an epoch that is not above `initial_epoch`, or an empty data set.
        """
        if self.train_network is None:
            raise ConfigError("this Model has no optimizer: give it one to train")
        if not isinstance(epoch, int) or epoch <= initial_epoch:
            raise ConfigError(
                f"'epoch' must be an integer above 'initial_epoch', got {epoch} and {initial_epoch}"
            )
        steps = _steps(train_dataset)
        listed = as_callbacks(callbacks)
        now = self._parameters(
            "train",
            steps,
            epoch_num=epoch,
            train_network=self.train_network,
            train_dataset=train_dataset,
            valid_dataset=valid_dataset,
        )
        context = RunContext(now)
        now.cur_step_num = initial_epoch * steps
        self.train_network.set_train()
        _tell(listed, "begin", context)
        for now.cur_epoch_num in range(initial_epoch + 1, epoch + 1):
            self._train_epoch(train_dataset, listed, context)
            every = valid_frequency
            due = now.cur_epoch_num % every == 0 if isinstance(every, int) else now.cur_epoch_num in every
            if valid_dataset is not None and due:
                metrics, loss = self._evaluate(valid_dataset, listed)
                now.metrics, now.eval_results = metrics, {**metrics, "eval_loss": loss}
                self.train_network.set_train()
            _tell(listed, "epoch_end", context)
            now.pop("metrics", None)
            now.pop("eval_results", None)
            if context.get_stop_requested():
                break
        _tell(listed, "end", context)

    def _train_epoch(self, dataset: Any, callbacks: list[Callback], context: RunContext) -> None:
        now = context.original_args()
        _tell(callbacks, "epoch_begin", context)
        for batch in dataset.create_tuple_iterator(num_epochs=1):
            now.cur_step_num += 1
            now.train_dataset_element = batch
            _tell(callbacks, "step_begin", context)
            now.net_outputs = self.train_network(*batch)
            _tell(callbacks, "step_end", context)
            if context.get_stop_requested():
                break

    def eval(
        self, valid_dataset: Any, callbacks: Callbacks = None, dataset_sink_mode: bool = False
    ) -> dict[str, Any]:
        """The metrics over a data set, by name."""
        return self._evaluate(valid_dataset, as_callbacks(callbacks))[0]

    def _evaluate(self, dataset: Any, callbacks: list[Callback]) -> tuple[dict[str, Any], float]:
        if self.eval_network is None:
            raise ConfigError(
                "this Model has neither loss_fn nor eval_network: give it one of them to evaluate"
            )
        if not self._metrics:
            raise ConfigError("For Model.eval, the model argument 'metrics' can not be None or empty.")
        now = self._parameters("eval", _steps(dataset), eval_network=self.eval_network, valid_dataset=dataset)
        context, loss = RunContext(now), Loss()
        for metric in self._metrics.values():
            metric.clear()
        self.eval_network.train(False)
        _tell(callbacks, "begin", context)
        _tell(callbacks, "epoch_begin", context)
        with torch.no_grad():
            for now.cur_step_num, batch in enumerate(dataset.create_tuple_iterator(num_epochs=1), start=1):
                _tell(callbacks, "step_begin", context)
                now.net_outputs = outputs = self.eval_network(*batch)
                loss.update(outputs[0])
                for metric in self._metrics.values():
                    metric.update(*(outputs[:1] if isinstance(metric, Loss) else outputs[1:3]))
                _tell(callbacks, "step_end", context)
        now.metrics = {name: metric.eval() for name, metric in self._metrics.items()}
        _tell(callbacks, "epoch_end", context)
        _tell(callbacks, "end", context)
        return now.metrics, loss.eval()

    def predict(self, *predict_data: Any) -> Any:
        """The network's output, in evaluation mode and without gradients; fp16 at O2 and O3, as there."""
        self.predict_network.train(False)
        with torch.no_grad():
            output = self.predict_network(*predict_data)
        return output if self._output_dtype is None else cast_floats(output, self._output_dtype)

    def _parameters(self, mode: str, steps: int, **more: Any) -> CallbackParam:
        return CallbackParam(
            mode=mode,
            batch_num=steps,
            network=self.predict_network,
            loss_fn=self._loss_fn,
            optimizer=self._optimizer,
            dataset_sink_mode=False,
            cur_epoch_num=0,
            cur_step_num=0,
            **more,
        )


def _steps(dataset: Any) -> int:
    if not callable(getattr(dataset, "get_dataset_size", None)):
        raise TypeError(
            f"a Model takes a dataset such as NumpySlicesDataset(...).batch(32), got {type(dataset).__name__}"
        )
    steps = dataset.get_dataset_size()
    if not steps:
        raise DataError("There is no valid data in dataset, please check dataset file firstly.")
    return steps


def _tell(callbacks: list[Callback], event: str, context: RunContext) -> None:
    """Call `on_<mode>_<event>` of each callback that has it, else the short name."""
    for callback in callbacks:
        hook_name = f"on_{context.original_args().mode}_{event}"
        getattr(callback, hook_name, getattr(callback, event))(context)
