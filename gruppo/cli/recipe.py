"""A run as described by a file and a command line.

    model: Qwen/Qwen2.5-0.5B-Instruct               # model_name_or_path
    dataset: prompts.jsonl                          # dataset_name; or a hub id, or {path: …, name: …, split: …}
    rewards: [accuracy_reward, my_rewards.py:brevity]       # reward_funcs
    output_dir: run                                 # this and everything else: fields of GRPOConfig or RLOOConfig
    learning_rate: 1e-6

Files for TRL's command line work too. docs/cli.md lists all keys.
"""

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from gruppo.cli.arguments import LaunchArguments, ModelArguments, RunArguments
from gruppo.cli.parser import TrlParser, read_yaml, take_config_option
from gruppo.config.hints import nearest
from gruppo.config.model import ModelConfig
from gruppo.config.script import DatasetMixtureConfig
from gruppo.errors import ConfigError

__all__ = ["TRAINERS", "RunFile", "make_parser"]

logger = logging.getLogger(__name__)

TRAINERS = ("grpo", "rloo")
USAGE = "gruppo %s [RECIPE.yaml] [--key value …]"


@dataclass(frozen=True)
class RunFile:
    """What to train, on which data and how.

    Example:
        run = RunFile.read(["recipes/grpo.yaml", "--model", "./model", "--max_steps", "2"])
        run.model, run.config.max_steps == "./model", 2
    """

    trainer: str
    script: RunArguments
    config: Any  # GRPOConfig or RLOOConfig; with build=False, a namespace of their fields
    model_args: ModelArguments
    mixture: DatasetMixtureConfig
    launching: LaunchArguments
    accelerate: tuple[str, ...] = ()  # options for accelerate's launcher
    path: Path | None = None  # the file

    @classmethod
    def read(
        cls,
        argv: Sequence[str] | Path,
        command: str = "train",
        *,
        build: bool = True,
        strict: bool = True,
        processes: int | None = None,
    ) -> "RunFile":
        """From the arguments of a command, or from a file alone.

        Without `build` the config is not constructed: a process that launches others must not initialise a GPU, and
        its world size would be 1. Without `strict`, unknown or missing settings are ignored, so that the rest can be
        checked. With `processes` the config is that of one process among that many.
        """
        strings = with_recipe([str(argv)] if isinstance(argv, Path) else argv)
        path, _ = take_config_option(list(strings))
        trainer, strings = _take_trainer(strings, {} if path is None else read_yaml(path), command)
        parser = make_parser(trainer, command, processes)
        if not build:
            parser.dataclass_types.pop()  # the remaining arguments are returned as a namespace
        _refuse_repetitions(parser, strings)
        try:
            *parsed, of_file, of_line = parser.parse_args_and_config(
                strings, return_remaining_strings=True, separate_remaining_strings=True
            )
        except ConfigError:
            raise
        except ValueError as error:  # raised by transformers about its own fields
            raise ConfigError(str(error)) from error
        script, model_args, mixture, launching, config = parsed
        if build:
            config = _with_model(config, model_args)
            _warn(script, mixture, model_args)
        script, mixture = _with_mixture(script, mixture)
        accelerate = _for_accelerate(parser, path, of_file, of_line) if strict else ()
        run = cls(trainer, script, config, model_args, mixture, launching, accelerate, path)
        if strict:
            run.check_complete()
        return run

    @classmethod
    def of_another_machine(cls, argv: Sequence[str] | Path, command: str = "train") -> "RunFile":
        """The run as it will be where it is launched: with all its processes, and on GPUs even if there are none here.

        Example:
            RunFile.of_another_machine(["recipes/multi_node.yaml"]).config.world_size == 16
        """
        import torch

        strings = [str(argv)] if isinstance(argv, Path) else list(argv)
        asked = cls.read(strings, command, build=False)
        # Without a GPU the config rejects half precision, so it is built with --use_cpu, which is then reset.
        pretend = not torch.accelerator.is_available() and not asked.config.use_cpu
        run = cls.read([*strings, *(["--use_cpu"] * pretend)], command, processes=asked.processes)
        if pretend:
            run.config.use_cpu = False
        return run

    @property
    def model(self) -> str:
        assert self.model_args.model_name_or_path is not None
        return self.model_args.model_name_or_path

    @property
    def processes(self) -> int:
        """The number of processes that the run specifies, else 1; the GPUs of this machine are not counted."""
        from gruppo.cli.sharing import sharing_of

        return sharing_of(self.launching, self.accelerate).processes or 1

    @property
    def folder(self) -> Path:
        """The folder of the file; files that it names are searched here if they are not in the working folder."""
        return Path.cwd() if self.path is None else self.path.parent

    @property
    def rewards(self) -> list[Any]:
        """The reward entries, the reward model first."""
        model = self.script.reward_model_name_or_path
        return [*([model] if model else []), *(self.script.reward_funcs or [])]

    def check_complete(self) -> None:
        """Raise if a required part is missing and nothing else provides it."""
        has_environment = self.script.environment_factory is not None
        missing = {
            "model": not self.model_args.model_name_or_path,
            "dataset": not (self.script.dataset_name or self.mixture.datasets or has_environment),
            "reward": not (self.rewards or has_environment),
        }
        for name, is_missing in missing.items():
            if is_missing:
                raise ConfigError(f"The run has no {name}: set `{name}: …` in the file, or --{name} … as a flag.")
        if self.script.rollout_func is not None and self.trainer == "rloo":
            raise ConfigError("rollout_func works with GRPO only: RLOOTrainer has no such argument.")


class RunParser(TrlParser):
    """A TrlParser that raises a one-line error instead of printing the usage with all option names."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")


def make_parser(trainer: str, command: str = "train", processes: int | None = None) -> RunParser:
    """The parser of all arguments of a run; the config is its last dataclass."""
    import gruppo

    config: Any = gruppo.GRPOConfig if trainer == "grpo" else gruppo.RLOOConfig
    if processes is not None:
        config = type(config.__name__, (config,), {"world_size": property(lambda self: processes)})
    types = [RunArguments, ModelArguments, DatasetMixtureConfig, LaunchArguments, config]
    return RunParser(types, prog=f"gruppo {command}", usage=USAGE % command, allow_abbrev=False, add_help=False)


def take_help(argv: Sequence[str], command: str) -> tuple[bool, list[str]]:
    """Whether help is requested; and the arguments, where a `-h` that is the value of an option is joined to it.

    Example:
        take_help(["run.yaml", "-h"], "train") == (True, ["run.yaml", "-h"])
        take_help(["run.yaml", "--run_name", "-h"], "train") == (False, ["run.yaml", "--run_name=-h"])
    """
    strings: list[str] = []
    for string in argv:
        if string == "-h" and strings and _waits_for_value(strings[-1], command):
            strings[-1] += "=-h"
        else:
            strings.append(string)
    return "-h" in strings or "--help" in strings, strings


def _waits_for_value(string: str, command: str) -> bool:
    """Whether the next string can only be the value of this one."""
    if not string.startswith("--") or "=" in string:
        return False
    own = ("--config", "--trainer", "--answer_template", "--answer-template")
    actions = [make_parser(trainer, command)._option_string_actions.get(string) for trainer in TRAINERS]
    return string in own or any(action is not None and action.nargs in (None, "+") for action in actions)


def with_recipe(argv: Sequence[str]) -> list[str]:
    """`RECIPE.yaml …` as `--config RECIPE.yaml …`."""
    strings = ["--config", *argv] if argv and not argv[0].startswith("-") else list(argv)
    if sum(string.partition("=")[0] == "--config" for string in strings) > 1:
        raise ConfigError("Two files are given; give one, as the first argument or with --config.")
    return strings


def _refuse_repetitions(parser: RunParser, strings: Sequence[str]) -> None:
    """Raise for a list option given twice, since argparse would drop the first values."""
    given = [parser._option_string_actions.get(string.partition("=")[0]) for string in strings]
    for action in given:
        if action is not None and action.nargs == "+" and given.count(action) > 1:
            flag = action.option_strings[-1]
            raise ConfigError(f"{flag} is given more than once: give it once, with all values: {flag} A B.")


def _take_trainer(strings: list[str], values: Mapping[str, Any], command: str) -> tuple[str, list[str]]:
    """The algorithm, from the command or from `trainer` on the line or in the file; and the other strings."""
    named, where, rest, remaining = values.get("trainer"), "The file sets trainer:", [], iter(strings)
    for string in remaining:
        flag, sign, value = string.partition("=")
        if flag == "--trainer":
            named, where = value if sign else next(remaining, ""), "The command line sets --trainer"
            if not named or named.startswith("--"):
                raise ConfigError(f"--trainer needs one of {', '.join(TRAINERS)}.")
        else:
            rest.append(string)
    trainer = str(named or (command if command in TRAINERS else "grpo")).lower()
    if trainer not in TRAINERS:
        raise ConfigError(f"trainer={named!r} is not one of {', '.join(TRAINERS)}.{nearest(trainer, TRAINERS)}")
    if command in TRAINERS and trainer != command:
        raise ConfigError(f"{where} {trainer}, which does not match `gruppo {command}`. Use `gruppo train`.")
    return trainer, rest


def trainer_of(argv: Sequence[str], command: str) -> str:
    """The algorithm that a command line and its file select.

    Example:
        trainer_of(["recipes/rloo.yaml"], "train") == "rloo"
    """
    strings = with_recipe(argv)
    path, _ = take_config_option(list(strings))
    return _take_trainer(strings, {} if path is None else read_yaml(path), command)[0]


# ---- options for accelerate


def named_processes(accelerate: Sequence[str]) -> int | None:
    """The value of --num_processes among accelerate's options; None without it."""
    if "--num_processes" not in accelerate:
        return None
    place = accelerate.index("--num_processes") + 1
    said = accelerate[place] if place < len(accelerate) else ""
    if not said.isdecimal() or int(said) < 1:
        raise ConfigError(f"--num_processes {said} must be a whole number of at least 1.".replace("  ", " "))
    return int(said)


def accelerate_options() -> dict[str, bool]:
    """The options of `accelerate launch`, each with whether it is a flag without a value."""
    from accelerate.commands.launch import launch_command_parser

    own = ("help", "config_file", "module", "no_python", "training_script", "training_script_args")
    actions = [action for action in launch_command_parser()._actions if action.dest not in own]
    strings = {string: action.nargs == 0 for action in actions for string in action.option_strings}
    return {string.lstrip("-").replace("-", "_"): bare for string, bare in strings.items() if string.startswith("--")}


def _for_accelerate(parser: TrlParser, path: Path | None, of_file: list[str], of_line: list[str]) -> tuple[str, ...]:
    """The options that the parser does not know, for the launcher; raises if accelerate has no such option either."""
    of_file = _without_trainer(of_file)
    if not of_file and not of_line:
        return ()
    known = accelerate_options()
    if of_line and not of_line[0].startswith("-"):
        raise ConfigError(f"Unexpected argument {of_line[0]!r}; the file must be the first argument: {parser.usage}")
    found: list[str] = []
    for where, strings in ((f"{path}: ", of_file), ("", of_line)):
        names = [s.lstrip("-").partition("=")[0] for s in strings if s.startswith("--")]
        if wrong := [name for name in names if name.replace("-", "_") not in known]:
            raise ConfigError(where + parser.explain_unknown(wrong))
    for flag, value in zip(of_file[::2], of_file[1::2], strict=True):
        if known[flag.lstrip("-").replace("-", "_")]:  # a flag without a value
            found += [flag] * (value == "True")
        else:
            found += [flag, value]
    for string in of_line:
        if string.startswith("--"):  # normalise --num-processes=8 to --num_processes 8
            flag, *given = string[2:].split("=", 1)
            found += [f"--{flag.replace('-', '_')}", *given]
        else:
            found.append(string)
    return tuple(found)


def _without_trainer(of_file: list[str]) -> list[str]:
    pairs = zip(of_file[::2], of_file[1::2], strict=True)
    return [string for pair in pairs if pair[0] != "--trainer" for string in pair]


def is_launched() -> bool:
    """Whether a launcher started this process, so that launch options have already taken effect."""
    return "LOCAL_RANK" in os.environ or "GRUPPO_LAUNCHED" in os.environ


# ---- settings after parsing


def _with_mixture(script: RunArguments, mixture: DatasetMixtureConfig) -> tuple[RunArguments, DatasetMixtureConfig]:
    """Turn a `dataset` that is a mapping or a list into a mixture."""
    named: Any = script.dataset_name
    if named is None or isinstance(named, str):
        return script, mixture
    listed = mixture.datasets or (named if isinstance(named, list) else [named])
    return replace(script, dataset_name=None), replace(mixture, datasets=listed)


def _warn(script: RunArguments, mixture: DatasetMixtureConfig, model: ModelArguments) -> None:
    """Warn about settings without effect; TRL accepts them as well."""
    if script.dataset_name is not None and mixture.datasets:
        logger.warning(f"`datasets` is given, so dataset_name={script.dataset_name!r} is not used.")
    about_adapters = [f.name for f in fields(ModelConfig) if f.name.startswith(("lora_", "use_rslora", "use_dora"))]
    changed = [name for name in about_adapters if getattr(model, name) != getattr(ModelConfig, name)]
    if changed and not model.use_peft:
        logger.warning(f"{', '.join(changed)}: no effect without use_peft.")


def _with_model(config: Any, model: ModelArguments) -> Any:
    """The config, with ModelConfig's loading settings added to its model_init_kwargs."""
    words = {"model_revision": "revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
    said = {
        word: getattr(model, name)
        for name, word in words.items()
        if getattr(model, name) != getattr(ModelConfig, name)
    }
    given = dict(config.model_init_kwargs or {})
    for word, value in said.items():
        if given.setdefault(word, value) != value:
            logger.warning(f"model_init_kwargs sets {word}={given[word]!r}, so {word}={value!r} is not used.")
    if given:
        config = copy.copy(config)
        config.model_init_kwargs = given
    return config
