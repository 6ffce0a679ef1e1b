"""The benchmarks that a run is evaluated on, as named in the config."""

import logging
from typing import TYPE_CHECKING, Any

from gruppo.config.hints import nearest
from gruppo.config.validate import check_eval_batches
from gruppo.errors import ConfigError

if TYPE_CHECKING:
    from gruppo.evaluation.training import TrainingBenchmarks

logger = logging.getLogger(__name__)


def load_benchmarks(args: Any, eval_dataset: Any) -> "TrainingBenchmarks | None":
    """The benchmarks that the config names, with their problems; None if it names none."""
    if not args.eval_benchmarks:
        return None
    # Imported here because runs without benchmarks need no graders and sandboxes.
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
    """Raise if the metric is not one of the benchmarks'.

    Without an evaluation dataset there are no other metrics, so the first evaluation would fail and end the run.
    """
    known = [f"eval_{name}" for name in names]
    name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
    if name not in known:
        raise ConfigError(
            f"metric_for_best_model={wanted!r} is not among the metrics of eval_benchmarks, and there is no "
            f"eval_dataset.{nearest(name, known)} Set it to one of {', '.join(known)}."
        )
