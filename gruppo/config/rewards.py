"""How rewards are computed, and what happens when they fail."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class RewardConfig:
    """Limits on rewards, and what happens when a reward exceeds them or fails."""

    reward_timeout: float | None = option(
        None,
        "Seconds a reward may take for a batch: it runs in a worker process, which is killed when it overruns, and "
        "the batch is then scored sample by sample, for at most four times as long. Loading the function in a worker "
        "is not counted; it may take 120 s. None runs your functions in the training process, without a limit.",
    )
    reward_sample_timeout: float | None = option(
        None,
        "Seconds for one sample when samples are scored one by one; None is a tenth of reward_timeout, at least 1.",
    )
    reward_workers: int | None = option(
        None,
        "Worker processes of one reward while a batch is scored sample by sample; None: one per CPU, at most 4.",
    )
    reward_memory_gb: float | None = option(
        None, "GiB that a reward worker may use on top of what it needs to load the function; None means no limit."
    )
    reward_concurrency: int = option(32, "Concurrent calls of one async reward when samples are scored one by one.")
    reward_retries: int = option(2, "How often an async reward is retried after an exception, with growing waits.")
    reward_on_error: str = option(
        "abstain", "What a failed reward does: `abstain` leaves the completion out of the baseline, `raise` stops."
    )
    max_reward_failure_rate: float | None = option(
        0.5,
        "Save a checkpoint and stop when rewards failed on more than this share of the completions of the last 20 "
        "updates, or of the last 5 generations if those took more updates; a shorter run is judged at its end. Below "
        "1, a reward that fails on all of the first generation stops at once. None never stops.",
    )
    worker_env: list[str] | None = option(
        None,
        "Names of environment variables that reward workers get, such as `OPENAI_API_KEY`, in addition to those that "
        "Python and its libraries need. No others are passed on.",
    )
