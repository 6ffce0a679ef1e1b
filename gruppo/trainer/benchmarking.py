"""Benchmarks at each evaluation, beside the evaluation set or in its place.

They are sampled with the backend of the run and leave no trace in it: generators, budgets and settings of the sampler
are afterwards what they were, so that the weights of a run do not depend on which benchmarks it has.
"""

import logging
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import Trainer

from gruppo.config.hints import nearest
from gruppo.config.validate import check_eval_batches
from gruppo.errors import ConfigError
from gruppo.rollout.base import RolloutBackend
from gruppo.trainer.presence import Presence
from gruppo.trainer.state import RandomState

if TYPE_CHECKING:
    from gruppo.evaluation.training import TrainingBenchmarks

logger = logging.getLogger(__name__)


def load_benchmarks(args: Any, eval_dataset: Any) -> "TrainingBenchmarks | None":
    """The benchmarks that the config names, with their problems; None if it names none."""
    if not args.eval_benchmarks:
        return None
    # Not above: runs without benchmarks have no need of graders and sandboxes.
    from gruppo.evaluation.training import TrainingBenchmarks

    benchmarks = TrainingBenchmarks(
        args.eval_benchmarks, data_dir=args.eval_benchmarks_dir, settings=args.eval_benchmarks_settings
    )
    if args.eval_strategy == "no":
        if not args.eval_on_start and args.process_index == 0:
            logger.warning(
                f"eval_benchmarks={args.eval_benchmarks!r} with eval_strategy='no': they run only when evaluate() is "
                "called. Set eval_strategy='steps' or 'epoch' to see them during training."
            )
    elif eval_dataset is not None:
        check_eval_batches(args)
    elif args.metric_for_best_model is not None:
        _check_best_metric(args.metric_for_best_model, benchmarks.metric_names)
    return benchmarks


def _check_best_metric(wanted: str, names: list[str]) -> None:
    """Without an evaluation set there are no other metrics, and the first evaluation would end the run."""
    known = [f"eval_{name}" for name in names]
    name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
    if name not in known:
        raise ConfigError(
            f"metric_for_best_model={wanted!r} is not among the metrics of eval_benchmarks, and there is no "
            f"eval_dataset.{nearest(name, known)} Set it to one of {', '.join(known)}."
        )


class Benchmarking(Trainer):
    """The part of the trainer that runs benchmarks."""

    benchmarks: "TrainingBenchmarks | None" = None
    backend: RolloutBackend
    control: Any
    presence: Presence
    _eval_prefix: str
    _found: dict[str, float] | None = None  # by the benchmarks of the evaluation under way
    _found_prefix = ""

    def __init__(self, *args: Any, eval_dataset: Any = None, **kwargs: Any):
        # Trainer insists on a set where there is an eval_strategy. None in a dict of them: benchmarks are no dataset.
        stand_in = {} if eval_dataset is None and self.benchmarks is not None else eval_dataset
        super().__init__(*args, eval_dataset=stand_in, **kwargs)
        self.eval_dataset = eval_dataset

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        if self.benchmarks is None or self._found is not None:  # one of several sets: they have been run
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        found = self._run_benchmarks(metric_key_prefix)
        sets = self.eval_dataset if eval_dataset is None else eval_dataset
        if sets is None:
            return self._report(found, metric_key_prefix)
        self._found, self._found_prefix = found, metric_key_prefix
        try:
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._found = None
        # Each of several sets has a log of its own, and so have the benchmarks beside them.
        return metrics | self._report(found, metric_key_prefix) if isinstance(sets, dict) else metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        if self._found is not None and kwargs.get("metric_key_prefix", "eval") == self._found_prefix:
            output.metrics.update(self._found)
        return output

    def _run_benchmarks(self, prefix: str) -> dict[str, float]:
        assert self.benchmarks is not None
        if callable(getattr(self.optimizer, "eval", None)):  # some have other weights until the next update
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
                self.backend.release()  # what was made for other budgets
        return {f"{prefix}_{name}": value for name, value in found.items()}

    def _gather_shares(self, own: list[Any]) -> list[Any]:
        with self.presence.waiting():
            shares: list[Any] = gather_object(own)
        return shares

    def _report(self, found: dict[str, float], prefix: str) -> dict[str, float]:
        """As Trainer does for a set of prompts."""
        self._eval_prefix = prefix
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found
