"""What can go wrong, and who is told.

    ConfigError(ValueError)      a setting or a combination of settings that cannot work; raised at construction
    DataError(ValueError)        a dataset, row or prompt that cannot be used; raised as early as it can be known
    RewardError(ValueError)      a reward function broke its contract (wrong length, wrong type, NaN)
    RolloutError(RuntimeError)   a rollout backend broke its contract (lost a completion, returned nothing)
    PackingError(RuntimeError)   a model does something that packed rows cannot do (an attention mask of its own)
    ParityError(RuntimeError)    the fast path of an update differs from the slow one by more than rounding

The policy:

1. A user's mistake raises at construction, with the offending value and the fix in the message.
2. An unfinished or unscorable completion is data: it is counted in the metrics and training goes on.
3. Everything else propagates; nothing is caught broadly.
"""

__all__ = ["ConfigError", "DataError", "PackingError", "ParityError", "RewardError", "RolloutError"]


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(ValueError):
    """A dataset, row or prompt that cannot be used."""


class RewardError(ValueError):
    """A reward function broke its contract."""


class RolloutError(RuntimeError):
    """A rollout backend broke its contract."""


class PackingError(RuntimeError):
    """A model does something that packed rows cannot do."""


class ParityError(RuntimeError):
    """The fast path of an update differs from the slow one by more than rounding."""
