"""Evaluation: completions of evaluation prompts with their loss and rewards, benchmarks, or both.

Benchmarks use the backend of the run and leave its state unchanged: random generators, budgets and sampler settings
are restored afterwards, so that the weights of a run do not depend on its benchmarks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from gruppo.trainer.display.completions import CompletionLog
from gruppo.trainer.resume.state import RandomState
from gruppo.trainer.running import Running


class Evaluating(Running):
    """The part of the trainer that evaluates."""

    def __init__(self, *args: Any, eval_dataset: Any = None, **kwargs: Any):
        # Trainer requires an eval_dataset if there is an eval_strategy. Benchmarks alone: give it an empty dict.
        stand_in = {} if eval_dataset is None and self.benchmarks is not None else eval_dataset
        super().__init__(*args, eval_dataset=stand_in, **kwargs)
        self.eval_dataset = eval_dataset

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        """Trainer's method; a resumed run skips the evaluation before the first update (`skip_scheduler`)."""
        if skip_scheduler and self._random_state_due is not None:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        previous, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = previous

    @contextmanager
    def _without_predictions(self) -> Iterator[None]:
        """Keep Trainer's loop from including rows for metrics of predictions: it takes them for a dict of tensors."""
        kept, self.args.include_for_metrics = self.args.include_for_metrics, []
        try:
            yield
        finally:
            self.args.include_for_metrics = kept

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        with self.presence.watching(), self._in_mode("eval"):
            if self.benchmarks is None or self._benchmark_results is not None:  # they ran before the first dataset
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return self._evaluate_with_benchmarks(eval_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loop, with the metrics of the sampled completions beside its loss."""
        prefix = self._eval_prefix = kwargs.get("metric_key_prefix", "eval")
        self.completion_logs["eval"] = CompletionLog(self.args.generation_batch_size)
        self.metrics.take("eval")  # drop those of an evaluation that an exception ended
        self._batches_evaluated, self._rows_evaluated, self._loss_evaluated = 0, 0, 0.0
        with self._without_predictions():
            output = super().evaluation_loop(*args, **kwargs)
        if self._benchmark_results is not None and prefix == self._results_prefix:
            output.metrics.update(self._benchmark_results)
        output.metrics.update({f"{prefix}_{key}": value for key, value in self.metrics.take("eval").items()})
        if self._rows_evaluated:
            # Trainer treats every batch as full, but the last may have fewer rows.
            output.metrics[f"{prefix}_loss"] = self._loss_evaluated / self._rows_evaluated
        return output._replace(num_samples=self._rows_evaluated)

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        with self._in_mode("eval"):
            place = (self.state.global_step, crc32(self._eval_prefix.encode()), self._batches_evaluated)
            self._batches_evaluated += 1
            with self._drawing_at(place):
                tensors = self._prepare_inputs(self._generate_and_score_completions(inputs))
            loss = self.compute_loss(model, tensors)
            rows = int(self._size.rows)
            self._rows_evaluated += rows
            self._loss_evaluated += rows * self.accelerator.reduce(loss.detach(), reduction="mean").item()
            self.metrics.flush("eval")
        return loss.detach(), None, None

    # ---- benchmarks

    def _evaluate_with_benchmarks(
        self, eval_dataset: Any, ignore_keys: list[str] | None, prefix: str
    ) -> dict[str, float]:
        found = self._run_benchmarks(prefix)
        sets = self.eval_dataset if eval_dataset is None else eval_dataset
        if sets is None:
            return self._report(found, prefix)
        self._benchmark_results, self._results_prefix = found, prefix
        try:
            metrics = super().evaluate(eval_dataset, ignore_keys, prefix)
        finally:
            self._benchmark_results = None
        # Several datasets are logged separately, and so are the benchmarks.
        return metrics | self._report(found, prefix) if isinstance(sets, dict) else metrics

    def _run_benchmarks(self, prefix: str) -> dict[str, float]:
        assert self.benchmarks is not None
        if callable(getattr(self.optimizer, "eval", None)):  # some optimizers use other weights for evaluation
            self.optimizer.eval()
        generators, budgets = RandomState.now(), self.backend.state_dict()
        try:
            with self.backend.ready():
                self.backend.refresh()
                with self.presence.during("running benchmarks"):
                    found = self.benchmarks.run(
                        self.backend,
                        self.accelerator.process_index,
                        self.accelerator.num_processes,
                        self._gather_shares,
                    )
        finally:
            generators.restore()
            if budgets is not None and self.backend.state_dict() != budgets:
                self.backend.load_state_dict(budgets)
                self.backend.release()  # frees what was allocated for other budgets
        return {f"{prefix}_{name}": value for name, value in found.items()}

    def _gather_shares(self, own: list[Any]) -> list[Any]:
        with self.presence.waiting():
            shares: list[Any] = gather_object(own)
        return shares

    def _report(self, found: dict[str, float], prefix: str) -> dict[str, float]:
        """Log the results of benchmarks and notify callbacks, as Trainer does for a dataset."""
        self._eval_prefix = prefix
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found
