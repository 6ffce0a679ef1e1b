"""The benchmarks that a run evaluates itself with, as the config names them."""

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
