"""The parts of `gruppo check`. Each is a function of the parts loaded so far and of the report."""

import statistics
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from gruppo.cli import loading
from gruppo.cli.findings import Findings
from gruppo.cli.launching import check_launch
from gruppo.cli.packages import needs
from gruppo.cli.recipe import RunFile

REWARD_ROWS, LENGTH_ROWS, PARITY_ROWS = 3, 1000, 2
PARITY_TOKENS = 32  # of a completion
PARITY_COPIES = 4.5  # of the model in float32: weights, gradient, and 2.5 for the copy in a wider type
SLOW_ON_CPU = 2e9  # weights


@dataclass
class Parts:
    """The parts loaded so far; those that could not be loaded stay None or empty.

    Example:
        parts = Parts(RunFile.read(["recipes/grpo.yaml"]))
        rewards(parts, findings)
        parts.rewards == {"accuracy_reward": <function …>}
    """

    run: RunFile
    built: bool = True  # whether run.config is a config
    template: str | None = None  # the form in which the rewards want the answer
    rewards: dict[str, Any] = field(default_factory=dict)
    toolset: Any = None
    train: Any = None
    rows: list[Any] = field(default_factory=list)  # the first few training rows
    model: Any = None  # without weights
    processing: Any = None
    encoder: Any = None
    longest: int | None = None  # prompt, in tokens

    @property
    def brings_more(self) -> bool:
        """Whether rewards get more than the columns of the dataset."""
        return self.run.script.rollout_func is not None or self.run.script.environment_factory is not None


# ---- settings


def fields(run: RunFile, findings: Findings) -> None:
    """Check that the settings are consistent."""
    from gruppo.trainer.construct import checks, optimization

    config = run.config
    check_launch(run)
    checks.warn_combinations(config)
    with findings.about("fields"):
        optimization.try_optimizer(config)
        optimization.try_schedule(config)
    prompts = config.prompts_per_generation
    where = "" if run.processes == 1 else f" on {run.processes} processes"
    said = f"{type(config).__name__}: {prompts} prompts × {config.num_generations} completions per generation{where}"
    findings.ok("fields", f"{said}, up to {config.max_completion_length} tokens each")
    for need in needs(run):
        if not need.is_met:
            findings.warning("fields", str(need))


def rewards(parts: Parts, findings: Findings) -> None:
    """Check that each reward can be loaded."""
    from gruppo.rewards.resolve import function_name, unique_names

    found = []
    for entry in parts.run.rewards:
        with findings.about("reward"):
            found.append(loading.load_reward(entry, parts.run.folder))
    names = unique_names([reward if isinstance(reward, str) else function_name(reward) for reward in found])
    parts.rewards = dict(zip(names, found, strict=True))
    if parts.built:
        weights = parts.run.config.reward_weights
        if weights is not None and len(weights) != len(parts.run.rewards):
            findings.error(
                "reward",
                f"reward_weights has {len(weights)} entries for {len(parts.run.rewards)} rewards; set one per reward.",
            )


def tools(parts: Parts, findings: Findings) -> None:
    """Check that tools and environments can be created, and described to a model."""
    from gruppo.trainer.construct import tooling

    with findings.about("tools"):
        found = loading.load_tools(parts.run)
        if not parts.built:
            return
        asked = (found.get("tools"), found.get("environment_factory"))
        parts.toolset = tooling.make_toolset(*asked, parts.run.config)
        if parts.toolset is not None:
            names = [getattr(function, "__name__", str(function)) for function in parts.toolset.functions]
            findings.ok("tools", f"the model can call {', '.join(names) or 'no tool'}")


# ---- data


def dataset(parts: Parts, findings: Findings) -> None:
    """Check that the datasets can be loaded and hold prompts."""
    from gruppo.trainer.construct import checks, tooling
    from gruppo.trainer.construct.benchmarks import load_benchmarks

    run = parts.run
    with findings.about("dataset", TypeError):
        parts.train, evaluation = loading.load_datasets(run)
        if not parts.built:
            parts.rows = [] if parts.train is None else list(islice(iter(parts.train), REWARD_ROWS))
            return
        if parts.train is None:
            parts.train = tooling.rows_of_environment(parts.toolset, run.config)
        checks.check_train_dataset(parts.train, run.config, None, images=True)
        checks.check_eval_dataset(evaluation, run.config, None, images=True)
        for part in (parts.train, evaluation):
            tooling.check_tool_rows(parts.toolset, part)
        load_benchmarks(run.config, evaluation)
        parts.rows = list(islice(iter(parts.train), REWARD_ROWS))
        findings.ok("dataset", _described(parts.train, parts.rows) + _also_evaluated(evaluation))


def _described(rows: Any, first: list[Any]) -> str:
    count = f"{len(rows):,} rows" if hasattr(rows, "__len__") else "a stream"
    kind = "plain text" if isinstance(first[0].get("prompt"), str) else "conversations"
    return f"{count} with {', '.join(first[0])}; prompts are {kind}"


def _also_evaluated(evaluation: Any) -> str:
    return "" if evaluation is None or not hasattr(evaluation, "__len__") else f"; {len(evaluation):,} to evaluate on"


def reward_calls(parts: Parts, findings: Findings) -> None:
    """Check that the dataset has the columns that each reward names."""
    from gruppo.rewards.calling import check_arguments
    from gruppo.rewards.runner import OWN_COLUMNS

    if not parts.rows or parts.brings_more:
        return
    dropped = parts.built and parts.run.config.remove_unused_columns
    columns = [name for name in parts.rows[0] if name not in OWN_COLUMNS and not dropped]
    given = dict.fromkeys([*columns, "prompts", "completions", "completion_ids", "trainer_state"])
    for name, reward in list(parts.rewards.items()):
        with findings.about("reward"):
            if callable(reward):
                check_arguments(reward, name, given)
            continue
        del parts.rewards[name]  # it failed, so `reward_scores` does not try it


def reward_scores(parts: Parts, findings: Findings) -> None:
    """Try each reward on right, wrong, odd and hostile completions of real rows."""
    from gruppo.rewards.check import check_reward
    from gruppo.rewards.marks import names_environments
    from gruppo.rewards.resolve import is_reward_model

    config = parts.run.config
    if parts.rewards and not parts.rows:
        findings.warning("reward", f"{', '.join(parts.rewards)}: loaded, but not tried: there are no rows.")
        return
    for name, reward in parts.rewards.items():
        if isinstance(reward, str) or is_reward_model(reward):
            findings.ok("reward", f"{name}: a reward model, which is not tried here")
            continue
        if names_environments(reward):
            findings.ok("reward", f"{name}: not tried: it reads environments, and there are none here")
            continue
        with findings.about("reward"):
            timeout = getattr(config, "reward_timeout", None) or 10.0
            asked = {"timeout": timeout, "worker_env": config.worker_env, "template": parts.template}
            tried = check_reward(reward, parts.rows, show=False, **asked)
            _judge(name, tried, findings)


def _judge(name: str, tried: Any, findings: Findings) -> None:
    from gruppo.rewards.check import NO_SCORE

    scores = sorted({trial.score for trial in tried.trials if trial.score is not None})
    if not scores:
        reasons = [warning for warning in tried.warnings if warning != NO_SCORE] or ["returns None each time"]
        others = f" (and {len(reasons) - 1} more like it)" if len(reasons) > 1 else ""
        findings.error("reward", f"{name}: {NO_SCORE}: {reasons[0]}{others}")
        return
    span = f"{scores[0]:g}" if len(scores) == 1 else f"{scores[0]:g} to {scores[-1]:g}"
    rows = len({trial.row for trial in tried.trials})
    findings.ok("reward", f"{name}: scores {span} on {len(tried.trials)} made-up completions of {rows} rows")
    for warning in tried.warnings:
        findings.warning("reward", f"{name}: {warning.replace('template=', '--answer_template ')}")


# ---- the model


def prompts(parts: Parts, findings: Findings) -> None:
    """Check that the model and its tokenizer can be loaded, and that the template renders the prompts."""
    from gruppo.data.probing import inner_tokenizer
    from gruppo.policy.loading import load_processing_class
    from gruppo.trainer.construct import preparing

    with findings.about("model", OSError, ValueError):
        described = loading.check_model_is_there(parts.run)
        parts.model = _outline(parts.run, described)
        weights = sum(weight.numel() for weight in parts.model.parameters())
        findings.ok("model", f"{parts.run.model}: {type(parts.model).__name__}, {weights:,} weights")
    if parts.model is None:
        return
    with findings.about("template", OSError, ValueError):
        parts.processing = load_processing_class(None, parts.model, parts.run.config)
        parts.encoder = preparing.make_prompt_encoder(parts.toolset, parts.model, parts.processing, parts.run.config)
        if not parts.rows or parts.run.script.rollout_func is not None:
            return
        if isinstance(parts.rows[0]["prompt"], str):
            if inner_tokenizer(parts.processing).chat_template:
                findings.warning(
                    "template",
                    "the prompts are plain text, so the chat template is not used. If the model is to answer as in a "
                    'chat, write them as [{"role": "user", "content": …}], with dataset_map for instance.',
                )
            else:
                findings.ok("template", "none is needed: the prompts are plain text")
            return
        shown = parts.encoder.rendered(parts.rows[:1])[0]
        findings.ok("template", f"the first prompt ends with {shown[-60:]!r}")


def _outline(run: RunFile, described: Any) -> Any:
    """The model on the meta device, without weights, so that it takes no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from gruppo.policy.loading import model_class

    given = {"trust_remote_code": run.config.trust_remote_code, **(run.config.model_init_kwargs or {})}
    kind = model_class(run.model, given)
    with torch.device("meta"):
        if kind is AutoModelForCausalLM:
            model = kind.from_config(described, trust_remote_code=run.config.trust_remote_code)
        else:
            model = kind(described)
    model.config._name_or_path = run.model
    return model


def lengths(parts: Parts, findings: Findings) -> None:
    """Check prompts against max_prompt_length, and prompt plus completion against the model's context length."""
    from datasets import Dataset

    from gruppo.data.lengths import check_every_prompt
    from gruppo.policy.loading import context_length

    if parts.encoder is None or not parts.rows or parts.run.script.rollout_func is not None:
        return
    config, rows = parts.run.config, _sample(parts)
    with findings.about("lengths"):
        free = copy(parts.encoder)
        free.max_prompt_length = free.context_length = None
        counts = sorted(len(prompt.ids) for prompt in free(rows))
        limit, context = config.max_prompt_length, context_length(parts.model)
        said = f"prompts of {counts[0]} to {counts[-1]} tokens (median {statistics.median(counts):.0f})"
        findings.ok(
            "lengths", f"{said}; completions of up to {config.max_completion_length}; the context is {context}"
        )
        cut = sum(count > limit for count in counts) if limit is not None else 0
        if cut:
            findings.warning(
                "lengths", f"max_prompt_length={limit} cuts {cut} of {len(counts)} prompts: their beginning is lost."
            )
        if isinstance(parts.train, Dataset) and not parts.encoder.takes_images:
            check_every_prompt(parts.train, parts.encoder)  # as the trainer does
        parts.encoder(rows)  # raises for prompts that leave no room
        parts.longest = longest = counts[-1] if limit is None else min(counts[-1], limit)
        if context is not None and longest + config.max_completion_length > context:
            findings.warning(
                "lengths",
                f"the longest prompt and a completion of {config.max_completion_length} tokens take "
                f"{longest + config.max_completion_length} tokens, more than the context of {context}: lower "
                "max_completion_length or set max_prompt_length.",
            )


def _sample(parts: Parts) -> list[Any]:
    """Rows whose prompts are measured: evenly spaced, or the first of a stream."""
    from gruppo.data.prompts import sample_rows

    wanted = min(LENGTH_ROWS, parts.encoder.sample_size) if parts.encoder.takes_images else LENGTH_ROWS
    if hasattr(parts.train, "__len__"):
        return sample_rows(parts.train, wanted)[:wanted]
    return list(islice(iter(parts.train), wanted))


def parity(parts: Parts, findings: Findings) -> None:
    """Run the trainer's parity guard on two prompts, two rows each, with the initial weights."""
    config = parts.run.config
    if parts.encoder is None or not parts.rows or parts.run.script.rollout_func is not None:
        return
    if not config.packed_update or config.parity_interval is None or parts.encoder.takes_images:
        findings.ok("parity", "nothing to compare: the run uses padded rows, or parity_check is off")
        return
    if (reason := _too_large(parts)) is not None:
        findings.warning("parity", f"not tried: {reason}. The run makes this check before its first update.")
        return
    with findings.about("parity", OSError, ValueError):
        _compare(parts, findings)


def _too_large(parts: Parts) -> str | None:
    """Why the weights should not be loaded on this machine; None if they can be."""
    import torch

    from gruppo.plan import free_memory

    weights = sum(weight.numel() for weight in parts.model.parameters())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and (parts.run.model_args.load_in_4bit or parts.run.model_args.load_in_8bit):
        return "quantised weights need a GPU"
    needed, free = PARITY_COPIES * 4 * weights, free_memory(device)
    if needed > free:
        return f"it needs about {needed / 2**30:.0f} GiB of memory, but {free / 2**30:.0f} are free here"
    if device.type == "cpu" and weights > SLOW_ON_CPU:
        return "a model of this size is slow on a CPU"
    return None


def _compare(parts: Parts, findings: Findings) -> None:
    from gruppo.config.model import get_quantization_config
    from gruppo.data.probing import inner_tokenizer
    from gruppo.policy.loading import load_policy
    from gruppo.policy.modes import autocast_dtype
    from gruppo.policy.packed import PackedPolicy
    from gruppo.policy.support import batch_of, why_not_packed
    from gruppo.trainer.construct.preparing import prepare_policy
    from gruppo.trainer.update.entropy import EntropyControl
    from gruppo.trainer.update.parity import check_parity

    run, config = parts.run, parts.run.config
    policy = load_policy(run.model, config, get_quantization_config(run.model_args))
    policy = prepare_policy(policy, inner_tokenizer(parts.processing), loading.load_adapter(run), config)
    precision = autocast_dtype("bf16" if config.bf16 else "fp16" if config.fp16 else "no")
    packed = PackedPolicy(fused_head=config.fused_head, fused_layers=config.fused_layers, autocast_dtype=precision)
    if reasons := why_not_packed(policy, packed):
        findings.warning("parity", f"rows will be padded, which is slow: {'; '.join(reasons)}")
        return
    ids = [prompt.ids for prompt in parts.encoder(parts.rows[:PARITY_ROWS])]
    # Tokens of the prompts serve as completions: two rows per prompt, so that rows share their prompt.
    rows = [(own, other[-PARITY_TOKENS:]) for own in ids for other in reversed(ids)]
    batch = batch_of(rows, next(policy.parameters()).device)
    entropy = EntropyControl.from_args(config).enabled
    report = check_parity(policy, packed, batch, temperature=config.temperature, entropy_gradient=entropy)
    (findings.ok if report.ok else findings.error)("parity", str(report))


# ---- the run


def plan(parts: Parts, findings: Findings) -> None:
    """Report memory and time of the run on this machine's device, as `gruppo plan` does."""
    from gruppo.cli.plan import forecast_here

    if parts.model is None:
        return
    with findings.about("plan"):
        forecast = forecast_here(parts.run, parts.longest)
        if forecast is None:
            findings.ok("plan", "there is no GPU here; `gruppo plan` with --device estimates the run on one")
            return
        fits = forecast.memory.fits
        (findings.ok if fits else findings.error)("plan", "; ".join(forecast.lines()[1:]))


def folder(parts: Parts, findings: Findings) -> None:
    """Check the folder that the run will write to."""
    from gruppo.runs.identity import recorded_run

    config = parts.run.config
    output = Path(config.output_dir)
    in_the_way = next((each for each in (output, *output.parents) if each.exists() and not each.is_dir()), None)
    if in_the_way is not None:
        findings.error("folder", f"{in_the_way} is a file; name a folder with output_dir.")
        return
    if recorded_run(output) is None or parts.run.launching.resume or config.resume_from_checkpoint:
        findings.ok("folder", str(output))
        return
    findings.warning(
        "folder",
        f"{output} holds the record of a run, which would move to earlier/. To avoid that, set another output_dir or "
        "use --resume.",
    )
