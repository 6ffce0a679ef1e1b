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
    hub_record: bool = option(
        False,
        "Push that record with the model, prompts and completions included; otherwise a push leaves it out.",
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
        "warn",
        "What a failed check of an update does: `error` stops the run, `warn` logs a warning; `off` runs no checks.",
    )
    max_bad_updates: int = option(
        5,
        "Stop the run after this many updates in a row with a non-finite loss or gradient, all of which are skipped.",
    )
    process_timeout: float | None = option(
        20.0,
        "With several processes: seconds without a sign of life after which a process on another host counts as dead "
        "and the others stop (on the same host its end is noticed at once); None turns this off.",
    )
    stop_timeout: float | None = option(
        300.0,
        "With several processes, which finish the current update before they save: seconds after SIGTERM or SIGINT "
        "within which that must happen; otherwise the run ends unsaved, with code 74. None means no limit.",
    )
