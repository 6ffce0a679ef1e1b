"""The settings of a run as plain YAML. The file is untrusted when it is read."""

from collections.abc import Mapping
from typing import Any

import yaml

from gruppo.runs.lines import plain

__all__ = ["read_settings", "settings_text"]

DEEPEST = 100
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # several times as fast, if libyaml is available


def settings_text(settings: Mapping[str, Any]) -> str:
    """The content of config.yaml."""
    return str(yaml.dump(plain(settings, finite=False), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read_settings(text: str) -> dict[str, Any]:
    """The settings in a config.yaml; raises ValueError if `settings_text` cannot have written it."""
    try:
        _check_shape(text)
        settings = yaml.safe_load(text)
        repr(settings)  # settings are compared by their repr, so it must work
    except yaml.YAMLError as error:
        raise ValueError(f"it is not plain YAML: {error}") from error
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ValueError("it holds no settings")
    return settings


def _check_shape(text: str) -> None:
    """Reject YAML bombs: aliases can expand beyond any memory, and deep nesting can take unbounded time."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it is not plain YAML: it has aliases")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is not plain YAML: it is nested more than {DEEPEST} deep")
