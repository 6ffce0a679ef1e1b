"""Parse command-line arguments and YAML files into config dataclasses."""

import argparse
import dataclasses
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from gruppo.config.hints import RENAMED, nearest
from gruppo.errors import ConfigError

__all__ = ["TrlParser"]

NONE_WORDS = ("none", "null")


class TrlParser(HfArgumentParser):
    """An argument parser over dataclasses that also reads a YAML file.

    `--config file.yaml` holds a flat mapping of the same names. Its values replace the defaults, and the command line
    overrides both. A mapping under `env` is exported to the environment. A name that no dataclass has is an error that
    suggests the nearest known name. Aliases of a field (`aliases` in its metadata) are accepted in files too.

    Example:
        parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
        script_args, training_args, model_args = parser.parse_args_and_config()
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        if dataclass_types is None:
            dataclass_types = []
        elif not isinstance(dataclass_types, Iterable):
            dataclass_types = [dataclass_types]
        dataclass_types = list(dataclass_types)
        for dataclass_type in dataclass_types:
            if any(field.name == "config" for field in dataclasses.fields(dataclass_type)):
                raise ConfigError(
                    f"{dataclass_type.__name__} has a field `config`, which would hide the option --config; rename it."
                )
        super().__init__(dataclass_types, **kwargs)

    @staticmethod
    def _parse_dataclass_field(parser: Any, field: Any) -> None:
        annotation = field.type  # saved first: the base class replaces it with the type of one value
        HfArgumentParser._parse_dataclass_field(parser, field)
        _adapt(parser._option_string_actions[f"--{field.name}"], annotation)
        if field.name == "gradient_checkpointing" and field.default is None:
            # The base class adds this flag only if the default is True; scripts rely on it.
            flags = ("--no_gradient_checkpointing", "--no-gradient-checkpointing")
            parser.add_argument(*flags, action="store_false", dest=field.name, default=None)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Parse arguments (default: the command line) and the file of `--config` into dataclass instances.

        With `return_remaining_strings`, unknown arguments are returned as a list of strings after the instances
        (`--name value …`, the file's before the command line's; with `separate_remaining_strings`, as two lists).
        Otherwise an unknown argument is an error, and so is an unknown key of the file unless
        `fail_with_unknown_args` is False.
        """
        strings = list(sys.argv[1:] if args is None else args)
        path, strings = take_config_option(strings)
        from_file: list[str] = []
        if path is not None:
            values = read_yaml(path)
            _export(values.pop("env", {}), path)
            try:
                from_file = self.set_defaults_with_config(**values)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from error
            if from_file and fail_with_unknown_args and not return_remaining_strings:
                unknown = [key for key in values if f"--{key}" in from_file]
                raise ConfigError(f"{path}: {self.explain_unknown(unknown)}")

        *parsed, unknown = self.parse_args_into_dataclasses(strings, return_remaining_strings=True)
        if not return_remaining_strings:
            if unknown:
                names = [s.lstrip("-").partition("=")[0] for s in unknown if s.startswith("--")]
                raise ConfigError(self.explain_unknown(names) if names else f"Unexpected arguments: {unknown}.")
            return tuple(parsed)
        if separate_remaining_strings:
            return (*parsed, from_file, unknown)
        return (*parsed, from_file + unknown)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Make the values the defaults of this parser and its subparsers; options that get one are no longer required.

        Returns the values that no option takes, as strings: `["--name", "value", …]`.
        """
        taken = _set_known_defaults(self, kwargs)
        return [s for key, value in kwargs.items() if key not in taken for s in (f"--{key}", str(value))]

    def explain_unknown(self, names: Iterable[str]) -> str:
        """A sentence about each unknown name, with a suggestion of the name that was probably meant."""
        known = {name for action in self._actions for name in _names(action)} | {"config", "env"}
        renamed = RENAMED if "num_generations" in known else {}  # RENAMED is about fields of our own configs
        said = []
        for name in names:
            plain = name.replace("-", "_")
            hint = f" {renamed[plain]}" if plain in renamed else nearest(plain, known - {name})
            said.append(f"Unknown argument `{name}`.{hint}")
        return " ".join(said)


def _set_known_defaults(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> set[str]:
    taken = set()
    for action in list(parser._actions):
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                taken |= _set_known_defaults(subparser, values)
        elif not _is_negation(action) and (given := [name for name in _names(action) if name in values]):
            if len(given) > 1:
                raise ConfigError(f"`{given[0]}` and `{given[1]}` are two names of one setting; keep one of them.")
            parser.set_defaults(**{action.dest: _checked(action, values[given[0]])})
            action.required = False
            taken.add(given[0])
    return taken


def _names(action: argparse.Action) -> list[str]:
    """The names by which a file may set an option: its field's name and its aliases."""
    spelled = (string.lstrip("-").replace("-", "_") for string in action.option_strings)
    return list(dict.fromkeys([action.dest, *spelled]))


def _is_negation(action: argparse.Action) -> bool:
    """Whether this is `--no_x`: it shares its destination with `--x`, and the file's value goes to `--x`."""
    return isinstance(action, argparse._StoreFalseAction)


def take_config_option(strings: list[str]) -> tuple[Path | None, list[str]]:
    """Split `--config FILE` or `--config=FILE` off the arguments; given twice, the last one counts."""
    path: Path | None = None
    rest: list[str] = []
    remaining = iter(strings)
    for string in remaining:
        if string == "--config":
            value = next(remaining, None)
            if value is None:
                raise ConfigError("--config needs the path of a YAML file.")
            path = Path(value)
        elif string.startswith("--config="):
            path = Path(string.partition("=")[2])
        else:
            rest.append(string)
    return path, rest


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-7 is a number, as in JSON, and 2024-01-01 is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file that holds a mapping."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of names to values, not {type(values).__name__}.")
    return {str(key): value for key, value in values.items()}


def _export(env: Any, path: Path) -> None:
    if not isinstance(env, dict):
        raise ConfigError(f"{path}: `env` must be a mapping of names to values, not {env!r}.")
    for name, value in env.items():
        if value is None or isinstance(value, list | dict):
            raise ConfigError(f"{path}: env.{name}={value!r} must be a string or a number.")
        os.environ[str(name)] = str(value)


def _adapt(action: argparse.Action, annotation: Any) -> None:
    """Add what the base class does not support: None for optional values, and dicts as JSON."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    origins = [typing.get_origin(member) or member for member in members]
    if dict in origins and str not in origins:
        action.type = _json_object
    if bool in members:  # the base class takes a bare flag only for those without None
        action.nargs, action.const = "?", True
    # In a list, a `none` would become one of its items.
    if type(None) in members and str not in members and action.type is not None and action.nargs != "+":
        action.type = _or_none(action.type)  # type: ignore[arg-type]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def converted(text: str) -> Any:
        return None if text.lower() in NONE_WORDS else convert(text)

    # argparse puts the name of the type into its error messages.
    converted.__name__ = getattr(convert, "__name__", repr(convert))
    converted.base = convert  # type: ignore[attr-defined]
    return converted


def _checked(action: argparse.Action, value: Any) -> Any:
    """Convert a file's value to what the option would produce; argparse itself converts defaults that are strings."""
    if value is None:
        return None
    if action.nargs != "+":
        return _checked_item(action, value)
    items = [_checked_item(action, item) for item in (value if isinstance(value, list | tuple) else [value])]
    convert: Any = action.type
    try:
        return [convert(item) if isinstance(item, str) else item for item in items]
    except ValueError as error:
        raise ConfigError(f"{action.dest}={value!r}: {error}.") from error


def _checked_item(action: argparse.Action, item: Any) -> Any:
    convert = getattr(action.type, "base", action.type)
    if action.choices is not None:
        # YAML reads a bare `no`, as in `eval_strategy: no`, as a boolean.
        item = "no" if item is False and "no" in action.choices else item
        if item not in action.choices:
            raise ConfigError(f"{action.dest}={item!r} is not one of {', '.join(map(str, action.choices))}.")
        return item
    if isinstance(item, str):
        return item
    if convert is str and isinstance(item, bool):
        raise ConfigError(f"{action.dest}={item!r} must be text; write it in quotes.")
    if convert is str and isinstance(item, int | float):
        return str(item)
    if convert is string_to_bool and item not in (True, False):
        raise ConfigError(f"{action.dest}={item!r} must be true or false.")
    if convert in (int, float) and (isinstance(item, bool) or not isinstance(item, int | float)):
        raise ConfigError(f"{action.dest}={item!r} must be a number.")
    if convert is int and item != int(item):
        raise ConfigError(f"{action.dest}={item!r} must be a whole number.")
    return int(item) if convert is int else item
