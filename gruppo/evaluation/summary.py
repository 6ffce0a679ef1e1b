"""The metrics of one pass over one benchmark.

    summarise        accuracy with its interval, pass@k and votes, lengths, tools, and accuracy by level or subject
    problem_scores   one metric for each problem, for the comparison of two models

Rates are from 0 to 1. A problem without attempts is left out, not counted as wrong: an unfinished pass has
`complete: false`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation import statistics
from gruppo.evaluation.types import Benchmark, Decoding, GradedAttempt, Mode, Problem, ToolUse
from gruppo.grading import Rule, Rung

__all__ = ["problem_scores", "summarise"]

Numbers = dict[str, Any]  # JSON
Groups = Mapping[str, Sequence[GradedAttempt]]  # problem id -> its attempts, in the order of samples

UNKNOWN = "unknown"  # the group of problems without a level or subject


def summarise(
    benchmark: Benchmark,
    problems: Sequence[Problem],
    scored: Sequence[GradedAttempt],
    decoding: Decoding,
    mode: Mode,
    ks: Sequence[int] = (),
    *,
    rows: int | None = None,
) -> Numbers:
    """The metrics of one pass, ready for JSON. `rows` is the size of the data; default: that of the published set.

    `interval` is that of `accuracy`. A greedy pass has the number of right answers (`correct`). A sampled pass has the
    mean over its samples (`accuracy`, and `avg` keyed by their number), and `pass` and `maj` at powers of two, at the
    number of samples and at `ks`. Values with no data to compute them from are None.
    pass@k and maj@k leave out problems with fewer than k attempts, and any k that no problem reaches.

    Example, two problems, one of them right:
        summarise(benchmark, problems, scored, Decoding(), "cot")["accuracy"] == 0.5
    """
    _check_ks(ks, decoding)
    groups = _grouped(problems, scored, decoding)
    rows = benchmark.rows if rows is None else rows
    usual = rows if benchmark.rows is None else benchmark.rows
    return {
        "problems": len(problems),
        "rows": rows,
        "usual_rows": usual,
        "attempted": len(groups),
        "attempts": len(scored),
        "complete": all(len(groups.get(problem.id, ())) == decoding.samples for problem in problems),
        "whole_set": None if rows is None else len(problems) == rows == usual,
        **_accuracy([[row.correct for row in rows] for rows in groups.values()], greedy=decoding.greedy),
        **({} if decoding.greedy else _several(groups, decoding, ks)),
        **_texts(scored),
        **_paper(groups, greedy=decoding.greedy),
        **(_tools(scored) if mode == "tir" else {}),
        "by": _by(benchmark, problems, groups, greedy=decoding.greedy),
        "statistics": _method(decoding),
    }


def problem_scores(scored: Sequence[GradedAttempt], metric: str = "accuracy") -> dict[str, list[float]]:
    """The scores of each problem under one metric, for `compare`.

    `accuracy`, `paper` and `program` give one score per attempt; `pass@8` and `maj@8` give one score per problem that
    has at least 8 attempts.

    Example:
        compare(problem_scores(before, "maj@8"), problem_scores(after, "maj@8"))
    """
    groups: dict[str, list[GradedAttempt]] = {}
    for row in sorted(scored, key=lambda row: row.attempt.sample):
        groups.setdefault(row.attempt.problem, []).append(row)
    name, at, number = metric.partition("@")
    if at and name in ("pass", "maj") and number.isdecimal() and int(number):
        k, score = int(number), _pass_at if name == "pass" else _majority_at
        found = {problem: [score(rows, k)] for problem, rows in groups.items() if len(rows) >= k}
        if not found:
            raise ConfigError(f"{metric!r} needs at least {k} attempts at a problem, and no problem has that many.")
        return found
    if metric == "accuracy":
        return {problem: [float(row.correct) for row in rows] for problem, rows in groups.items()}
    if metric == "program":
        return {problem: [float(row.program is True) for row in rows] for problem, rows in groups.items()}
    if metric != "paper":
        raise ConfigError(f"metric={metric!r} must be accuracy, paper, program, pass@k or maj@k (such as maj@8).")
    if any(row.paper is None for row in scored):
        raise ConfigError(
            "metric='paper': these attempts were not graded by the paper's rules; run again with paper=True (--paper)."
        )
    return {problem: [float(row.paper is True) for row in rows] for problem, rows in groups.items()}


# ---- checks


def _check_ks(ks: Sequence[int], decoding: Decoding) -> None:
    if ks and decoding.greedy:
        raise ConfigError(f"ks={list(ks)}: pass@k and maj@k need samples; this pass is greedy.")
    wrong = [k for k in ks if not 1 <= k <= decoding.samples]
    if wrong:
        raise ConfigError(f"ks={wrong} must be at least 1 and at most the {decoding.samples} samples of each problem.")


def _grouped(
    problems: Sequence[Problem], scored: Sequence[GradedAttempt], decoding: Decoding
) -> dict[str, list[GradedAttempt]]:
    """The attempts at each problem, in the order of problems; problems without attempts are left out."""
    if not problems:
        raise DataError("There are no problems to summarise.")
    found: dict[str, dict[int, GradedAttempt]] = {problem.id: {} for problem in problems}
    if len(found) < len(problems):
        repeated = Counter(problem.id for problem in problems).most_common(1)[0][0]
        raise DataError(f"Problem {repeated!r} occurs more than once; ids must be unique.")
    for row in scored:
        problem, sample = row.attempt.problem, row.attempt.sample
        if problem not in found:
            raise DataError(f"There is an attempt at {problem!r}, which is not one of the {len(problems)} problems.")
        if not 0 <= sample < decoding.samples:
            raise DataError(f"{problem!r} has a sample {sample}; this pass has {decoding.samples}, numbered from 0.")
        if sample in found[problem]:
            raise DataError(f"{problem!r} has sample {sample} twice.")
        found[problem][sample] = row
    return {problem: [rows[sample] for sample in sorted(rows)] for problem, rows in found.items() if rows}


# ---- right and wrong


def _accuracy(outcomes: Sequence[Sequence[bool]], *, greedy: bool) -> Numbers:
    """The mean over problems of the mean over their attempts, with its interval."""
    if not outcomes:
        return {"accuracy": None, "interval": None, **({"correct": 0} if greedy else {})}
    means = [sum(outcome) / len(outcome) for outcome in outcomes]
    found = {"accuracy": math.fsum(means) / len(means), "interval": list(statistics.mean_interval(means))}
    return found | ({"correct": sum(outcome[0] for outcome in outcomes)} if greedy else {})


def _paper(groups: Groups, *, greedy: bool) -> Numbers:
    asked = {row.paper is not None for rows in groups.values() for row in rows}
    if asked == {True, False}:
        raise DataError("Some attempts were graded by the paper's rules and some were not; grade all in the same way.")
    if True not in asked:
        return {}
    return {"paper": _accuracy([[row.paper is True for row in rows] for rows in groups.values()], greedy=greedy)}


def _several(groups: Groups, decoding: Decoding, ks: Sequence[int]) -> Numbers:
    """avg, pass and maj of a sampled pass."""
    n = decoding.samples
    powers = {2**power for power in range(n.bit_length()) if 2**power <= n}
    wanted = sorted(powers | {n} | set(ks))
    everything = [rows for rows in groups.values() if len(rows) == n]
    mean = math.fsum(sum(row.correct for row in rows) / n for rows in everything) / max(len(everything), 1)
    return {
        "avg": {str(n): mean} if everything else {},
        "pass": _averaged(groups, wanted, _pass_at),
        "maj": _averaged(groups, [k for k in wanted if k > 1], _majority_at),
    }


def _averaged(
    groups: Groups, ks: Sequence[int], score: Callable[[Sequence[GradedAttempt], int], float]
) -> dict[str, float]:
    result = {}
    for k in ks:
        scores = [score(rows, k) for rows in groups.values() if len(rows) >= k]
        if scores:
            result[str(k)] = math.fsum(scores) / len(scores)
    return result


def _pass_at(rows: Sequence[GradedAttempt], k: int) -> float:
    return statistics.pass_at_k(len(rows), sum(row.correct for row in rows), k)


def _majority_at(rows: Sequence[GradedAttempt], k: int) -> float:
    return statistics.majority_at_k([row.vote for row in rows], [row.correct for row in rows], k)


# ---- texts and tools


def _texts(scored: Sequence[GradedAttempt]) -> Numbers:
    rules = Counter(row.grade.rule for row in scored)
    rungs = Counter(row.grade.rung for row in scored)
    tokens = sum(row.attempt.tokens for row in scored)
    return {
        "boxed_rate": _share(rules[Rule.BOX], len(scored)),
        "answer_rate": _share(sum(row.grade.answer is not None for row in scored), len(scored)),
        "rules": {rule.value: rules[rule] for rule in Rule},
        "truncation_rate": _share(sum(row.attempt.truncated for row in scored), len(scored)),
        "mean_tokens": _share(tokens, len(scored)),
        "total_tokens": tokens,
        "grader": {
            "timeouts": rungs[Rung.TIMEOUT],
            "refused": rungs[Rung.REFUSED],
            "errors": rungs[Rung.ERROR],
            "no_gold": rungs[Rung.NO_GOLD],
        },
    }


def _tools(scored: Sequence[GradedAttempt]) -> Numbers:
    uses = [row.attempt.tools or ToolUse() for row in scored]
    executions, errors = sum(use.executions for use in uses), sum(use.errors for use in uses)
    return {
        "program_accuracy": _share(sum(row.program is True for row in scored), len(scored)),
        "tools": {
            "mean_rounds": _share(sum(use.rounds for use in uses), len(uses)),
            "executions": executions,
            "errors": errors,
            "timeouts": sum(use.timeouts for use in uses),
            "error_rate": errors / executions if executions else 0.0,
        },
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# ---- groups of problems


def _by(benchmark: Benchmark, problems: Sequence[Problem], groups: Groups, *, greedy: bool) -> Numbers:
    result: Numbers = {}
    for field in benchmark.group_by:
        members: dict[str, list[str]] = {}
        for problem in problems:
            value = problem.level if field == "level" else problem.subject
            members.setdefault(UNKNOWN if value is None else value, []).append(problem.id)
        result[benchmark.level_name if field == "level" else field] = {
            value: _group(members[value], groups, greedy=greedy) for value in sorted(members, key=_natural)
        }
    return result


def _group(members: Sequence[str], groups: Groups, *, greedy: bool) -> Numbers:
    outcomes = [[row.correct for row in groups[problem]] for problem in members if problem in groups]
    return {"problems": len(members), "attempted": len(outcomes), **_accuracy(outcomes, greedy=greedy)}


def _natural(text: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers by value: `Level 2` before `Level 10`."""
    parts = re.split(r"([0-9]+)", text)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _method(decoding: Decoding) -> Numbers:
    """How the intervals and votes were computed, so that they can be reproduced."""
    method = {"interval": "agresti-coull", "confidence": statistics.CONFIDENCE}
    return method if decoding.greedy else method | {"vote_subsets": statistics.SUBSETS, "seed": statistics.SEED}
