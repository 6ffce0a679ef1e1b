"""What a run writes to disk, how it resumes after an interruption, and what is checked in every update."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class RunConfig:
    """The record of a run, resuming, and audits."""

    record: str = option(
        "all",
        "What is written into output_dir beside checkpoints: `all` (metrics, events, every completion), `metrics` "
        "(no completions) or `off`.",
    )
    resume_allow_changes: list[str] | None = option(
        None,
        "Names of settings that may differ from those a checkpoint was made with; ['*'] allows all. Any other "
        "difference refuses the checkpoint.",
    )
    save_on_signal: bool = option(
        True,
        "On SIGTERM and SIGINT save a checkpoint and exit with code 75; a second signal exits at once. A single "
        "process also saves when an exception ends the run.",
    )
    audit: str = option(
        "warn", "What a violated check of an update is: an `error`, a warning (`warn`), or `off` for no checks."
    )
    max_bad_updates: int = option(
        5, "Updates in a row whose loss or gradient is not finite, all of them skipped, before the run stops."
    )
    process_timeout: float | None = option(
        20.0,
        "With several processes: seconds without a sign of life after which one on another host counts as dead and "
        "the others stop (on the same host it is noticed at once); None does not watch.",
    )
    stop_timeout: float | None = option(
        300.0,
        "With several processes, which finish the update under way before they save: seconds after SIGTERM or SIGINT "
        "within which it must have ended; else the run ends unsaved, with code 74. None waits.",
    )
