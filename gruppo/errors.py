"""The library's exceptions, and when each is raised.

All are a `GruppoError` as well: their messages say what is wrong and what to do.

    ConfigError(ValueError)      a setting or a combination of settings that cannot work; raised at construction
    DataError(ValueError)        a dataset, row or prompt that cannot be used; raised as early as it can be known
    RewardError(ValueError)      a reward function broke its contract (wrong length or type), or too many failed
    RolloutError(RuntimeError)   a rollout backend broke its contract (lost a completion, returned nothing)
    PackingError(RuntimeError)   a model does something that packed rows do not support (its own attention mask)
    CheckpointError(ValueError)  a checkpoint that is damaged, or was made with other settings
    RunLockedError(RuntimeError) another process writes into the same output folder
    AuditError(RuntimeError)     an audit, which runs on every update, found something that silently spoils the run
    ParityError(RuntimeError)    packed rows differ from padded ones, or padded ones from rows that are run alone
    ProcessLostError(RuntimeError) another process of the run died or failed, and this one cannot continue without it
    SandboxError(RuntimeError)   this machine cannot sandbox model-written code as configured; raised at construction
    ToolError(RuntimeError)      a tool call failed; the error is reported to the model and training continues

The policy:

1. A user's mistake raises at construction, with the offending value and the fix in the message.
2. An unfinished or unscorable completion is data, whatever a reward raised: it is counted in the metrics and training
   continues.
3. Everything else propagates. Exceptions of any kind are caught where code of users runs (rewards, tools, rollout
   functions), where other processes must hear of a failure, and at the top of a command.
"""

import re
import sys
import warnings
from importlib import metadata

__all__ = [
    "AuditError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "GruppoError",
    "PackingError",
    "ParityError",
    "ProcessLostError",
    "RewardError",
    "RolloutError",
    "RunLockedError",
    "SandboxError",
    "ToolError",
    "install_line",
    "packages_of",
    "warn_deprecated",
]


class GruppoError(Exception):
    """The base of all errors whose messages are written for the user."""


class ConfigError(GruppoError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(GruppoError, ValueError):
    """A dataset, row or prompt that cannot be used."""


class RewardError(GruppoError, ValueError):
    """A reward function broke its contract."""


class RolloutError(GruppoError, RuntimeError):
    """A rollout backend broke its contract."""


class PackingError(GruppoError, RuntimeError):
    """A model does something that packed rows do not support."""


class CheckpointError(GruppoError, ValueError):
    """A checkpoint is damaged, or was made with other settings."""


class RunLockedError(GruppoError, RuntimeError):
    """Another process writes into the same output folder."""


class AuditError(GruppoError, RuntimeError):
    """An audit, which runs on every update, found something that would silently spoil the run."""


class ParityError(GruppoError, RuntimeError):
    """The fast path of an update differs from the padded reference path by more than rounding."""


class ProcessLostError(GruppoError, RuntimeError):
    """Another process of the run died or failed."""


class SandboxError(GruppoError, RuntimeError):
    """This machine cannot sandbox model-written code as configured."""


class ToolError(GruppoError, RuntimeError):
    """A tool call failed; the error is reported to the model."""


def packages_of(extra: str) -> str:
    """The packages that an extra of this library asks for, quoted for a shell, as its own metadata lists them.

    Not the extra itself: wherever this library came from, an index may have another one, a stranger's, by its name.

    Example: packages_of("view") == '"starlette>=1.0" "uvicorn>=0.40"'
    """
    try:
        listed = metadata.requires("gruppo") or []
    except metadata.PackageNotFoundError:  # the source itself, which was never installed
        return f'".[{extra}]" in the folder of pyproject.toml'
    ours = re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    return " ".join(f'"{each.partition(";")[0].strip()}"' for each in listed if ours.search(each))


def install_line(extra: str) -> str:
    """The command that installs what an extra asks for."""
    return f"pip install {packages_of(extra)}"


def warn_deprecated(message: str) -> None:
    """A FutureWarning that points to the line outside this package from which it was called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "gruppo":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, FutureWarning, stacklevel=level)
