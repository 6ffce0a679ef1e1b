"""`gruppo eval`: benchmarks from the command line."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

DESCRIPTION = """\
Accuracy of a model on GSM8K, MATH, MGSM-zh, CMATH or a benchmark of your own.

  gruppo eval MODEL --benchmarks gsm8k cmath --data-dir data        a name, a folder, or a training run
  gruppo eval MODEL --benchmarks gsm8k:200 --samples 8              part of a set; avg@k, maj@k, pass@k
  gruppo eval MODEL --mode tir                                      with programs, in a sandbox
  gruppo eval --compare evaluations/before evaluations/after        paired, problem by problem
  gruppo eval --check-gold --data-dir data                          does the grader accept every reference answer?
"""
BENCHMARKS = "gsm8k, math, math500, mgsm_zh, cmath; NAME:200 for 200 problems of it; file.py:NAME for your own"
MACHINE = (
    "backend",
    "dtype",
    "device",
    "batch_size",
    "trust_remote_code",
    "allow_unconfined",
)  # arguments of evaluate, not settings


def parser() -> argparse.ArgumentParser:
    """The options; their defaults are those of `gruppo.evaluate`."""
    parser = argparse.ArgumentParser(
        prog="gruppo eval", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a model's name, its folder, or the folder of a training run")
    parser.add_argument("--benchmarks", nargs="+", metavar="NAME", help=f"{BENCHMARKS} (default: gsm8k)")
    parser.add_argument("--data-dir", type=Path, help="a folder of JSONL files (default: the hub, through `datasets`)")
    parser.add_argument("--output-dir", type=Path, help="default: evaluations/<model>-<mode>")
    parser.add_argument("--name", help="of the model, in the tables")
    parser.add_argument("--restart", action="store_true", help="forget the attempts that are in the output folder")
    other = parser.add_argument_group("other things to do")
    other.add_argument("--compare", nargs=2, type=Path, metavar=("FIRST", "SECOND"), help="two output folders")
    other.add_argument("--check-gold", action="store_true", help="grade the reference answers, right and shuffled")
    _add_settings(parser)
    machine = parser.add_argument_group("where it runs")
    machine.add_argument("--backend", choices=("auto", "builtin", "transformers"), default="auto", help="the sampler")
    machine.add_argument("--dtype", default="auto", help="float32, bfloat16, … (auto: bfloat16 on a GPU)")
    machine.add_argument("--device", help="cuda, cuda:1, cpu (default: a GPU where there is one)")
    machine.add_argument("--batch-size", type=int, help="completions that are sampled together")
    machine.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    machine.add_argument(
        "--allow-unconfined", nargs="+", default=(), metavar="NAME", help="protections the sandbox may do without"
    )
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for each field of `Settings`."""
    from gruppo.evaluation.run import Settings

    default = Settings()
    asked = parser.add_argument_group("how it is asked")

    def number(name: str, kind: type, help: str) -> None:
        field = name.lstrip("-").replace("-", "_")
        asked.add_argument(name, type=kind, default=getattr(default, field), help=f"{help} (default: %(default)s)")

    asked.add_argument("--mode", choices=("cot", "tir"), default=default.mode, help="chain of thought, or programs")
    asked.add_argument(
        "--rendering",
        choices=("auto", "chat", "plain"),
        default=default.rendering,
        help="the chat template, or User:/Assistant: (auto: the template where there is one)",
    )
    number("--shots", int, "exemplars before each problem")
    number("--samples", int, "sampled attempts at each problem, beside the greedy one")
    asked.add_argument("--no-greedy", dest="greedy", action="store_false", help="only the sampled attempts")
    number("--temperature", float, "of samples")
    number("--top-p", float, "of samples")
    number("--seed", int, "of samples")
    number("--max-new-tokens", int, "of a completion; tir: of each round")
    number("--rounds", int, "tir: times the model may speak, 2 in the paper")
    number("--max-total-tokens", int, "tir: new tokens of all rounds")
    counted = parser.add_argument_group("how it is counted")
    counted.add_argument("--ks", type=int, nargs="+", default=(), help="for pass@k and maj@k, besides 1, 2, 4, 8, …")
    counted.add_argument("--paper", action="store_true", help="also grade as the DeepSeekMath paper's code does")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well."""
    arguments = parser()
    options = arguments.parse_args(argv)
    if options.compare:
        return _compare(*options.compare)
    if options.check_gold:
        return _check_gold(options.benchmarks, options.data_dir)
    if options.model is None:
        arguments.error("name a model, or use --compare or --check-gold")
    return _evaluate(options)


def _evaluate(options: argparse.Namespace) -> int:
    from dataclasses import fields

    from gruppo.evaluation.run import Settings, evaluate

    values = vars(options)
    settings = {each.name: values[each.name] for each in fields(Settings)}
    output = options.output_dir or Path("evaluations") / f"{Path(options.model).name}-{options.mode}"
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
            **settings | {"ks": tuple(options.ks)},
        )
    except KeyboardInterrupt:
        print(f"Interrupted. The same command goes on from {output}.", file=sys.stderr)
        return 130
    print(results.markdown(references=False))
    for benchmark, summary in results.summary["benchmarks"].items():
        print(f"{benchmark}: {'; '.join(_sentences(summary))}")
    print(f"Everything is in {output}: results.json, results.md, results.tex, completions/")
    return 0


def _sentences(summary: Mapping[str, Any]) -> list[str]:
    """The numbers of a benchmark in a line."""
    said = []
    if (greedy := summary.get("greedy")) is not None:
        low, high = greedy["interval"]
        said.append(
            f"top-1 {greedy['accuracy']:.1%} ({low:.1%} to {high:.1%}) of {greedy['problems']} problems, "
            f"boxed {greedy['boxed_rate']:.1%}, cut off {greedy['truncation_rate']:.1%}, "
            f"{greedy['mean_tokens']:.0f} tokens each, {summary['greedy']['seconds']:.1f} s"
        )
    if (sampled := summary.get("sampled")) is not None:
        most = max(sampled["pass"], key=int)
        votes = f", maj@{most} {sampled['maj'][most]:.1%}" if most in sampled["maj"] else ""
        said.append(f"avg@{most} {sampled['accuracy']:.1%}, pass@{most} {sampled['pass'][most]:.1%}{votes}")
    return said


def _compare(first: Path, second: Path) -> int:
    """Print how two evaluations differ, problem by problem."""
    from gruppo.errors import ConfigError
    from gruppo.evaluation.compare import compare
    from gruppo.evaluation.store import EvaluationFolder

    folders = EvaluationFolder(first), EvaluationFolder(second)
    shared = [each for each in folders[0].passes() if each in set(folders[1].passes())]
    if not shared:
        raise ConfigError(f"{first} and {second} have no benchmark and pass in common.")
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    for benchmark, decoding in shared:
        for metric, scores in _metrics(folders, benchmark, decoding):
            print(f"{benchmark}, {metric}")
            print(compare(*scores, names=names).describe(), end="\n\n")
    return 0


def _metrics(folders: Sequence[Any], benchmark: str, decoding: str) -> Iterator[tuple[str, list[Any]]]:
    """What can be compared of one pass, and the scores of both by problem."""
    from gruppo.evaluation.summary import problem_scores

    scored = [folder.attempts(benchmark, decoding) for folder in folders]
    samples = min(1 + max(each.attempt.sample for each in rows) for rows in scored)
    metrics = {"accuracy": "top-1" if decoding == "greedy" else f"avg@{samples}"}
    if samples > 1:
        metrics |= {f"{kind}@{samples}": f"{kind}@{samples}" for kind in ("pass", "maj")}
    for metric, title in metrics.items():
        yield title, [problem_scores(rows, metric) for rows in scored]


def _check_gold(names: Sequence[str] | None, data_dir: Path | None) -> int:
    """Grade the reference answers; without names, those of every set that the folder has."""
    from gruppo.errors import ConfigError
    from gruppo.evaluation.benchmarks import BENCHMARKS, find_benchmark
    from gruppo.evaluation.data import file_in, load_problems
    from gruppo.evaluation.gold import check_gold

    if names is None and data_dir is None:
        raise ConfigError("--check-gold needs --data-dir, or --benchmarks to take from the hub.")
    chosen = names or [each.name for each in BENCHMARKS.values() if data_dir and file_in(each, data_dir)]
    if not chosen:
        raise ConfigError(f"{data_dir} has none of the files of {', '.join(BENCHMARKS)}.")
    reports = []
    for name in chosen:
        benchmark, limit = find_benchmark(name)
        reports.append(check_gold(benchmark, load_problems(benchmark, data_dir, limit)))
        print(reports[-1].describe())
    return 0 if all(report.ok for report in reports) else 1
