"""Run files in the docs: what they say is read by the command line itself."""

import yaml

from gruppo.cli.train import Run, load_reward


def check_run(text: str) -> None:
    """The fields of a run file exist and fit together; rewards of the library are found."""
    import gruppo

    asked = Run.of(yaml.safe_load(text))
    config = gruppo.RLOOConfig if asked.trainer == "rloo" else gruppo.GRPOConfig
    config(**{"report_to": "none", "use_cpu": True, "bf16": False, **(asked.settings or {})})
    for entry in asked.rewards:
        if str(entry).startswith("gruppo."):
            load_reward(entry)
