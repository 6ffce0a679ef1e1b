"""`gruppo eval`: benchmarks from the command line."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gruppo.cli.options import CommandParser

__all__ = ["main"]

DESCRIPTION = """\
Accuracy of a model on GSM8K, MATH, MGSM-zh, CMATH or a benchmark of your own.

  gruppo eval MODEL --benchmarks gsm8k cmath --data-dir data        a name, a folder, or a training run
  gruppo eval MODEL --benchmarks gsm8k:200 --samples 8              part of a set; avg@k, maj@k, pass@k
  gruppo eval MODEL --mode tir                                      with programs, in a sandbox
  gruppo eval --compare evaluations/before evaluations/after        paired, problem by problem
  gruppo eval --check-gold --data-dir data                          does the grader accept every reference answer?
"""
BENCHMARKS = "gsm8k, math, math500, mgsm_zh, cmath; NAME:200 for 200 of its problems; file.py:NAME for your own"
MACHINE = (
    "backend",
    "dtype",
    "device",
    "batch_size",
    "trust_remote_code",
    "allow_unconfined",
)  # arguments of `evaluate` that are not fields of `Settings`


LONGEST_NAME = 150  # characters of a default folder's name; file systems allow 255 bytes


def parser() -> argparse.ArgumentParser:
    """The options, with the same defaults as `gruppo.evaluate`."""
    parser = CommandParser(prog="gruppo eval", description=DESCRIPTION)
    parser.add_argument("model", nargs="?", help="a model's name, its folder, or the folder of a training run")
    parser.add_argument("--benchmarks", nargs="+", metavar="NAME", help=f"{BENCHMARKS} (default: gsm8k)")
    parser.add_argument("--data-dir", type=Path, help="a folder of JSONL files (default: the hub, through `datasets`)")
    parser.add_argument("--output-dir", type=Path, help="default: evaluations/<path>--<to>--<model>-<mode>")
    parser.add_argument("--name", help="name of the model in the tables")
    parser.add_argument("--restart", action="store_true", help="delete all attempts and results in the output folder")
    other = parser.add_argument_group("other actions")
    other.add_argument("--compare", nargs=2, type=Path, metavar=("FIRST", "SECOND"), help="two output folders")
    other.add_argument("--check-gold", action="store_true", help="grade the reference answers, right and shuffled")
    _add_settings(parser)
    machine = parser.add_argument_group("where the model runs")
    samplers = ("auto", "builtin", "transformers", "vllm")
    machine.add_argument("--backend", choices=samplers, default="auto", help="the sampler")
    machine.add_argument("--dtype", default="auto", help="float32, bfloat16, … (auto: bfloat16 on a GPU)")
    machine.add_argument("--device", help="cuda, cuda:1, cpu (default: a GPU if there is one)")
    machine.add_argument("--batch-size", type=int, help="completions to sample at once")
    machine.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    machine.add_argument(
        "--allow-unconfined", nargs="+", default=(), metavar="NAME", help="sandbox protections that may be missing"
    )
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add one option per field of `Settings`; an option not given keeps the default of its field."""
    asked = parser.add_argument_group("prompts and sampling")

    def number(name: str, kind: type, help: str) -> None:
        asked.add_argument(name, type=kind, default=argparse.SUPPRESS, help=help)

    asked.add_argument(
        "--mode", choices=("cot", "tir"), default=argparse.SUPPRESS, help="chain of thought (default), or programs"
    )
    asked.add_argument(
        "--rendering",
        choices=("auto", "chat", "plain"),
        default=argparse.SUPPRESS,
        help="the chat template, or User:/Assistant: (default: the template if there is one)",
    )
    number("--shots", int, "exemplars before each problem (default: 0)")
    number("--max-new-tokens", int, "limit for a completion; tir: for each round (default: 1024)")
    number("--samples", int, "sampled attempts at each problem, besides the greedy one (default: 0)")
    asked.add_argument(
        "--no-greedy", dest="greedy", action="store_false", default=argparse.SUPPRESS, help="only the sampled attempts"
    )
    number("--temperature", float, "of samples (default: 0.7)")
    number("--top-p", float, "of samples (default: 1)")
    number("--seed", int, "of samples (default: 0)")
    number("--rounds", int, "tir: most rounds of generation per attempt (default: 4; 2 in the paper)")
    number("--max-total-tokens", int, "tir: limit for all rounds together (default: 2048)")
    counted = parser.add_argument_group("scoring")
    counted.add_argument(
        "--ks",
        type=int,
        nargs="+",
        default=argparse.SUPPRESS,
        help="values of k for pass@k and maj@k, besides 1, 2, 4, 8, …",
    )
    counted.add_argument(
        "--paper",
        action="store_true",
        default=argparse.SUPPRESS,
        help="also grade as the DeepSeekMath paper's code does",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = parser()
    options = arguments.parse_args(argv)
    given = {name for name, value in vars(options).items() if value != arguments.get_default(name)}
    if options.compare:
        _refuse(arguments, given - {"compare"}, "--compare")
        return _compare(*options.compare)
    if options.check_gold:
        _refuse(arguments, given - {"check_gold", "benchmarks", "data_dir", "paper"}, "--check-gold")
        return _check_gold(options.benchmarks, options.data_dir, "paper" in given)
    if options.model is None:
        arguments.error("name a model, or use --compare or --check-gold")
    return _evaluate(options)


def _refuse(arguments: argparse.ArgumentParser, others: set[str], what: str) -> None:
    if others:
        named = ", ".join("a model" if name == "model" else f"--{name.replace('_', '-')}" for name in sorted(others))
        arguments.error(f"{what} cannot be combined with {named}")


def _evaluate(options: argparse.Namespace) -> int:
    from dataclasses import fields

    from gruppo.evaluation.run import evaluate
    from gruppo.evaluation.settings import Settings

    values = vars(options)
    settings = {each.name: values[each.name] for each in fields(Settings) if each.name in values}
    if "ks" in settings:
        settings["ks"] = tuple(settings["ks"])
    output = options.output_dir or default_folder(options.model, settings.get("mode", "cot"))
    try:
        results = evaluate(
            options.model,
            options.benchmarks or "gsm8k",
            data_dir=options.data_dir,
            output_dir=output,
            restart=options.restart,
            name=options.name,
            progress=True,
            **{name: values[name] for name in MACHINE},
            **settings,
        )
    except KeyboardInterrupt:
        without = " without --restart" if options.restart else ""
        print(f"Interrupted. Run the same command{without} to continue from {output}.", file=sys.stderr)
        return 130
    print(results.markdown(references=False))
    for benchmark, summary in results.summary["benchmarks"].items():
        print(f"{benchmark}: {'; '.join(_sentences(summary))}")
    print(f"Everything is in {output}: results.json, results.md, results.tex, completions/")
    return 0


def default_folder(model: str, mode: str) -> Path:
    """The default output folder of an evaluation: a separate one for each model, the same one every time.

    Its name holds the whole path, since checkpoints of different runs often share a name. Hub ids include the owner.

    Example, in the folder that has `runs`:
        default_folder("runs/mine/checkpoint-40", "cot") == Path("evaluations/runs--mine--checkpoint-40-cot")
    """
    path = Path(model)
    if path.is_dir():
        path, here = path.resolve(), Path.cwd().resolve()
        path = path.relative_to(here) if here in path.parents else path
    name = "--".join(part for part in path.parts if part != path.anchor)
    if len(name) > LONGEST_NAME:
        name = f"{blake2b(name.encode(), digest_size=4).hexdigest()}--{name[-LONGEST_NAME:]}"
    return Path("evaluations") / f"{name}-{mode}"


def _sentences(summary: Mapping[str, Any]) -> list[str]:
    """The results of a benchmark as phrases for one line."""
    said = []
    if (greedy := summary.get("greedy")) is not None:
        low, high = greedy["interval"]
        said.append(
            f"top-1 {greedy['accuracy']:.1%} ({low:.1%} to {high:.1%}) of {greedy['problems']} problems, "
            f"boxed {greedy['boxed_rate']:.1%}, cut off {greedy['truncation_rate']:.1%}, "
            f"{greedy['mean_tokens']:.0f} tokens each, {greedy['seconds']:.1f} s"
        )
    if (sampled := summary.get("sampled")) is not None:
        most = max(sampled["pass"], key=int)
        votes = f", maj@{most} {sampled['maj'][most]:.1%}" if most in sampled["maj"] else ""
        said.append(f"avg@{most} {sampled['accuracy']:.1%}, pass@{most} {sampled['pass'][most]:.1%}{votes}")
    return said


def _compare(first: Path, second: Path) -> int:
    """Print how two evaluations differ, problem by problem."""
    from gruppo.errors import ConfigError
    from gruppo.evaluation.compare import check_same_problems, compare
    from gruppo.evaluation.store import EvaluationFolder

    folders = EvaluationFolder(first), EvaluationFolder(second)
    shared = [each for each in folders[0].passes() if each in set(folders[1].passes())]
    if not shared:
        raise ConfigError(f"{first} and {second} have no benchmark and pass in common.")
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    for each in shared:  # all of them, before anything is printed
        check_same_problems(folders[0].problems(*each), folders[1].problems(*each), names=names)
    for benchmark, decoding in shared:
        print(f"{benchmark}, {decoding}: {_differences([each.identity(benchmark, decoding) for each in folders])}")
        for metric, scores in _metrics(folders, benchmark, decoding):
            print(f"{benchmark}, {metric}")
            print(compare(*scores, names=names).describe(), end="\n\n")
    return 0


def _differences(identities: Sequence[Mapping[str, Any]]) -> str:
    """The settings in which two passes differ, except their weights."""
    first, second = identities
    other = [key for key in {**first, **second} if first.get(key) != second.get(key) and key != "weights"]
    said = [f"{key} {first.get(key)} and {second.get(key)}" for key in other]
    return f"settings differ: {'; '.join(said)}" if said else "same settings"


def _metrics(folders: Sequence[Any], benchmark: str, decoding: str) -> Iterator[tuple[str, list[Any]]]:
    """The metrics to compare for one pass, each with the per-problem scores of both folders."""
    from gruppo.evaluation.summary import problem_scores

    scored = [folder.attempts(benchmark, decoding) for folder in folders]
    counts = [1 + max(each.attempt.sample for each in rows) for rows in scored]
    most, least = max(counts), min(counts)
    mean = f"avg@{most}" if most == least else f"avg@{counts[0]} and avg@{counts[1]}"
    metrics = {"accuracy": "top-1" if decoding == "greedy" else mean}
    if least > 1:
        metrics |= {f"{kind}@{least}": f"{kind}@{least}" for kind in ("pass", "maj")}
    for metric, title in metrics.items():
        yield title, [problem_scores(rows, metric) for rows in scored]


def _check_gold(names: Sequence[str] | None, data_dir: Path | None, paper: bool) -> int:
    """Grade the reference answers of the named benchmarks; by default of all that the data folder has."""
    from gruppo.errors import ConfigError
    from gruppo.evaluation.benchmarks import BENCHMARKS, find_benchmark
    from gruppo.evaluation.data import file_in, load_problems
    from gruppo.evaluation.gold import check_gold
    from gruppo.evaluation.grading import Graders

    if names is None and data_dir is None:
        raise ConfigError("--check-gold needs --data-dir, or --benchmarks to load from the hub.")
    chosen = names or [each.name for each in BENCHMARKS.values() if data_dir and file_in(each, data_dir)]
    if not chosen:
        raise ConfigError(f"{data_dir} has none of the files of {', '.join(BENCHMARKS)}.")
    reports = []
    with Graders() as graders:
        for name in chosen:
            benchmark, limit = find_benchmark(name)
            problems = load_problems(benchmark, data_dir, limit)
            reports.append(check_gold(benchmark, problems, paper=paper, workers=graders))
            print(reports[-1].describe())
    return 0 if all(report.ok for report in reports) else 1
