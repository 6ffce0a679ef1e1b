"""How rewards are computed, and what happens when they fail."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class RewardConfig:
    """Limits on rewards, and what happens when a reward exceeds them or fails."""

    reward_timeout: float | None = option(
        None,
        "Seconds a reward may take for a batch: it runs in a worker process, which is killed when it overruns, and "
        "the batch is then asked sample by sample, for at most four times as long. Loading the function in a worker "
        "is not counted; it may take 120 s. None runs your functions in process, without a bound.",
    )
    reward_sample_timeout: float | None = option(
        None, "Seconds for one sample, where samples are asked one by one; None is a tenth of the above, at least 1."
    )
    reward_workers: int | None = option(
        None, "Worker processes of one reward while a batch is asked sample by sample; None is the CPUs, at most 4."
    )
    reward_memory_gb: float | None = option(
        None, "GiB that a reward worker may use on top of what it needs to load the function; None is no limit."
    )
    reward_concurrency: int = option(32, "Calls of one async reward at a time, where samples are asked one by one.")
    reward_retries: int = option(2, "How often an async reward is asked again after an exception, with growing waits.")
    reward_on_error: str = option(
        "abstain", "What a failed reward does: `abstain` leaves the completion out of the baseline, `raise` stops."
    )
    max_reward_failure_rate: float | None = option(
        0.5,
        "Save a checkpoint and stop when rewards failed on more than this share of the completions of the last 20 "
        "updates, or of the last 5 generations if those took more; a shorter run is judged at its end. Below 1, a "
        "reward that fails on all of the first generation stops at once. None never stops.",
    )
    worker_env: list[str] | None = option(
        None,
        "Names of environment variables that reward workers get, such as `OPENAI_API_KEY`, beside those that Python "
        "and its libraries need. All others stay in the process of the run.",
    )
