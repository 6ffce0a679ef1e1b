"""The settings of a run as plain YAML, which a stranger may have changed since."""

from collections.abc import Mapping
from typing import Any

import yaml

from gruppo.runs.lines import plain

__all__ = ["read_settings", "settings_text"]

DEEPEST = 100
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # several times as fast, where libyaml is there


def settings_text(settings: Mapping[str, Any]) -> str:
    """What config.yaml holds."""
    return str(yaml.dump(plain(settings, finite=False), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read_settings(text: str) -> dict[str, Any]:
    """The settings in a config.yaml; ValueError if it is nothing that `settings_text` writes."""
    try:
        _check_shape(text)
        settings = yaml.safe_load(text)
        repr(settings)  # what cannot be shown cannot be compared either
    except yaml.YAMLError as error:
        raise ValueError(f"it is not plain YAML: {error}") from error
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ValueError("it holds no settings")
    return settings


def _check_shape(text: str) -> None:
    """Refuse what a few lines can hurt with: aliases unpack to more than any memory holds, depth to endless work."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it is not plain YAML: it has aliases")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is not plain YAML: it is nested more than {DEEPEST} deep")
