import os
from dataclasses import dataclass, field

import pytest

from gruppo.cli.parser import TrlParser
from gruppo.config.grpo import GRPOConfig
from gruppo.config.model import ModelConfig
from gruppo.config.script import DatasetConfig, DatasetMixtureConfig, GRPOScriptArguments
from gruppo.errors import ConfigError


@dataclass
class Args:
    size: int
    name: str = "a"
    rate: float | None = 1.0
    shuffle: bool = True
    extra: dict[str, int] | None = None
    tags: list[str] | None = None
    counts: list[int] = field(default_factory=list)
    flag: bool | None = None
    mode: str = field(default="fast", metadata={"choices": ["fast", "slow", "no"]})


@dataclass
class Other:
    learning_rate: float = 0.5


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write_text


def parse(arguments, **kwargs):
    return TrlParser(Args).parse_args_and_config(arguments, **kwargs)[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--size 3", Args(3)),
        ("--size 3 --rate 2", Args(3, rate=2.0)),
        ("--size 3 --rate none", Args(3, rate=None)),
        ("--size 3 --rate NULL", Args(3, rate=None)),
        ("--size 3 --name none", Args(3, name="none")),
        ("--size 3 --no_shuffle", Args(3, shuffle=False)),
        ("--size 3 --no-shuffle", Args(3, shuffle=False)),
        ("--size 3 --shuffle false", Args(3, shuffle=False)),
        ("--size 3 --flag true", Args(3, flag=True)),
        ("--size 3 --flag none", Args(3, flag=None)),
        ("--size 3 --flag", Args(3, flag=True)),
        ("--flag --size 3", Args(3, flag=True)),
        ("--size 3 --tags a none", Args(3, tags=["a", "none"])),
        ("--size 3 --counts 1 2", Args(3, counts=[1, 2])),
        ('--size 3 --extra {"b":1}', Args(3, extra={"b": 1})),
        ("--size 3 --extra null", Args(3, extra=None)),
    ],
)
def test_command_line(arguments, expected):
    assert parse(arguments.split()) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("size: 3", Args(3)),
        ("size: 3.0", Args(3)),
        ("size: '3'", Args(3)),
        ("size: 3\nrate: 1e-5", Args(3, rate=1e-5)),  # YAML reads 1e-5 as a string
        ("size: 3\nrate: null", Args(3, rate=None)),
        ("size: 3\nrate: none", Args(3, rate=None)),
        ("size: 3\nname: 7", Args(3, name="7")),
        ("size: 3\nshuffle: false", Args(3, shuffle=False)),
        ("size: 3\nshuffle: 'no'", Args(3, shuffle=False)),
        ("size: 3\nextra: {b: 1}", Args(3, extra={"b": 1})),
        ("size: 3\ntags: a", Args(3, tags=["a"])),
        ("size: 3\ntags: [a, b]", Args(3, tags=["a", "b"])),
        ("size: 3\ncounts: ['1', 2]", Args(3, counts=[1, 2])),
        ("size: 3\nmode: slow", Args(3, mode="slow")),
        ("size: 3\nmode: no", Args(3, mode="no")),  # YAML reads a bare no as false
        ("size: 3\nextra: {b: 1e-7, c: [2E+3]}", Args(3, extra={"b": 1e-7, "c": [2000.0]})),
        ("size: 3\nname: 2024-01-01", Args(3, name="2024-01-01")),
    ],
)
def test_yaml(write, text, expected):
    got = parse(["--config", write(text)])
    assert got == expected
    assert isinstance(got.size, int)
    assert parse([f"--config={write(text)}"]) == expected


@pytest.mark.parametrize(("value", "expected"), [("auto", None), ("8", 8), ("none", None)])
def test_padding_in_all_its_spellings(value, expected, write, tmp_path):
    base = f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n"
    (of_file,) = TrlParser(GRPOConfig).parse_args_and_config(["--config", write(f"{base}pad_to_multiple_of: {value}")])
    (of_line,) = TrlParser(GRPOConfig).parse_args_and_config(
        ["--config", write(base), "--pad_to_multiple_of", value, "--gradient_checkpointing"]
    )
    assert (of_file.pad_to_multiple_of, of_line.pad_to_multiple_of) == (expected, expected)
    assert of_line.gradient_checkpointing is True


def test_command_line_wins(write):
    path = write("size: 3\nname: file\nshuffle: true\ntags: [a, b]")
    got = parse(["--size", "4", "--config", path, "--no_shuffle", "--tags", "c"])
    assert got == Args(4, name="file", shuffle=False, tags=["c"])


def test_arguments_default_to_the_command_line(write, monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--config", write("size: 3"), "--name", "b"])
    assert parse(None) == Args(3, name="b")


def test_env_is_exported(write, monkeypatch):
    monkeypatch.setenv("GRUPPO_TEST_A", "old")
    monkeypatch.setenv("GRUPPO_TEST_B", "old")
    assert parse(["--config", write("env: {GRUPPO_TEST_A: new, GRUPPO_TEST_B: 5}\nsize: 3")]) == Args(3)
    assert (os.environ["GRUPPO_TEST_A"], os.environ["GRUPPO_TEST_B"]) == ("new", "5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size: 3\nnam: b", r"config\.yaml: Unknown argument `nam`. Did you mean `name`"),
        ("size: 3\nzzzzzz: b", r"Unknown argument `zzzzzz`\.$"),
        ("size: 3.5", r"size=3\.5 must be a whole number"),
        ("size: true", "size=True must be a number"),
        ("size: 3\nrate: [1]", r"rate=\[1\] must be a number"),
        ("size: 3\nshuffle: 7", "shuffle=7 must be true or false"),
        ("size: 3\nname: no", "name=False must be text; write it in quotes"),
        ("size: 3\nmode: warp", "mode='warp' is not one of fast, slow, no"),
        ("size: 3\nenv: [a]", "`env` must be a mapping"),
        ("size: 3\nenv: {A: [1]}", r"env\.A=\[1\]"),
        ("- size", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("size: [", "not valid YAML"),
    ],
)
def test_bad_yaml(write, text, message):
    with pytest.raises(ConfigError, match=message):
        parse(["--config", write(text)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "3", "--nime", "b"], "Unknown argument `nime`. Did you mean `name`"),
        (["--size", "3", "--nime=b"], "Unknown argument `nime`"),
        (["--size", "3", "stray"], r"Unexpected arguments: \['stray'\]"),
        (["--config"], "--config needs the path"),
        (["--config", "missing.yaml"], "no such file"),
    ],
)
def test_bad_command_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse(arguments)


@pytest.mark.parametrize("arguments", [[], ["--size", "x"], ["--size", "3", "--mode", "warp"], ["--size", "none"]])
def test_argparse_errors_end_the_program(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "error:" in capsys.readouterr().err


def test_unknown_strings_can_be_handed_on(write):
    parser = TrlParser(Args)
    arguments = ["--config", write("size: 3\nnum_processes: 8\nmachines: [a]"), "--port", "1"]
    args, rest = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    assert args == Args(3)
    assert rest == ["--num_processes", "8", "--machines", "['a']", "--port", "1"]
    _, of_file, of_line = parser.parse_args_and_config(
        arguments, return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (of_file, of_line) == (["--num_processes", "8", "--machines", "['a']"], ["--port", "1"])


def test_a_keyword_of_another_library_names_the_field():
    with pytest.raises(ConfigError, match=r"Unknown argument `max-new-tokens`\. Use `max_completion_length`"):
        TrlParser(GRPOConfig).parse_args_and_config(["--output_dir", "a", "--max-new-tokens", "9"])
    with pytest.raises(ConfigError, match=r"Unknown argument `max-new-tokens`\.$"):
        parse(["--size", "3", "--max-new-tokens", "9"])


def test_unknown_keys_of_the_file_can_be_allowed(write):
    path = write("size: 3\nnum_processes: 8")
    assert parse(["--config", path], fail_with_unknown_args=False) == Args(3)
    with pytest.raises(ConfigError, match="Unknown argument `port`"):
        parse(["--config", path, "--port", "1"], fail_with_unknown_args=False)


def test_several_dataclasses(write):
    parser = TrlParser((Args, Other))
    assert parser.parse_args_and_config(["--config", write("size: 3\nlearning_rate: 2e-6")]) == (Args(3), Other(2e-6))
    with pytest.raises(ConfigError, match="Did you mean `learning_rate`"):
        parser.parse_args_and_config(["--size", "3", "--learning-rte", "1"])


def test_defaults_reach_subparsers():
    parser = TrlParser()
    commands = parser.add_subparsers(parser_class=TrlParser)
    commands.add_parser("run", dataclass_types=[Args])
    assert parser.set_defaults_with_config(size=3, other=4) == ["--other", "4"]
    assert parser.parse_args(["run"]).size == 3


def test_a_field_called_config_is_refused():
    @dataclass
    class Bad:
        config: str = "a"

    with pytest.raises(ConfigError, match="Bad has a field `config`"):
        TrlParser(Bad)


def test_the_shipped_configs(write):
    parser = TrlParser((GRPOScriptArguments, ModelConfig, DatasetMixtureConfig))
    path = write(
        "model_name_or_path: m\nlora_target_modules: all-linear\nreward_funcs: accuracy_reward\n"
        "datasets:\n  - path: a\n    fraction: 0.5\n  - {path: b, fraction: 0.5}\ntest_split_size: 10\n"
    )
    script, model, mixture = parser.parse_args_and_config(["--config", path, "--use_peft", "--dtype", "bfloat16"])
    assert script.reward_funcs == ["accuracy_reward"]
    assert (model.model_name_or_path, model.lora_target_modules, model.use_peft) == ("m", "all-linear", True)
    assert model.dtype == "bfloat16"
    assert mixture.datasets == [DatasetConfig("a", fraction=0.5), DatasetConfig("b", fraction=0.5)]
    assert mixture.test_split_size == 10
    _, _, mixture = parser.parse_args_and_config(["--datasets", "c", "d"])
    assert mixture.datasets == [DatasetConfig("c"), DatasetConfig("d")]
