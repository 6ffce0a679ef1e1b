"""Tool use in the trainer's rollouts: the loop of turns, its counts, and environments whose reset fails."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.data.probing import inner_tokenizer
from gruppo.data.responses import parse_response, without_end
from gruppo.errors import RewardError
from gruppo.tools.calls import reason, without_tokens
from gruppo.tools.loop import LONGEST_TOKEN, Episode, ToolLoop
from gruppo.tools.suffix import SuffixTokens
from gruppo.trainer.construct.tooling import reject_shared_engines
from gruppo.trainer.processes.collectives import gather_rows
from gruppo.types import Message, Rollout, StopReason


def make_tool_loop(trainer: Any, total: Callable[[int], int]) -> ToolLoop | None:
    """The loop that calls tools between turns, or None if there are no tools; `total` sums over processes."""
    toolset, encoder = trainer.toolset, trainer.prompt_encoder
    if toolset is None or not toolset.functions:
        return None
    reject_shared_engines(trainer.args)
    tokenizer, end_ids = inner_tokenizer(trainer.processing_class), trainer.eos_token_ids
    room = [length for length in (encoder.context_length, trainer.backend.context_length) if length is not None]
    suffix = SuffixTokens(trainer.processing_class, encoder.chat_template, encoder.chat_template_kwargs)
    images = tokenizer.convert_ids_to_tokens(sorted(encoder.placeholders))
    return ToolLoop(
        lambda episode: read_turn(episode, tokenizer, end_ids),
        lambda names, messages, ended: suffix.suffix(names, without_tokens(messages, images), ended),
        toolset.executor,
        budget=trainer.args.max_completion_length,
        context_length=min(room, default=None),
        max_rounds=trainer.args.max_tool_calling_iterations,
        total=total,
        longest_token=max(LONGEST_TOKEN, suffix.longest_token),
    )


def read_turn(episode: Episode, tokenizer: Any, end_ids: Sequence[int]) -> Message:
    """The message of an episode's last turn."""
    ids, turn = episode.ids, episode.turns[-1]
    before = ids[: len(ids) - len(turn.ids)]
    schemas = [tool.schema for tool in episode.tools.values()]
    spoken = without_end(turn.ids, end_ids) if turn.stop is StopReason.EOS else list(turn.ids)
    message = parse_response(tokenizer, spoken, before, schemas)
    if not turn.stop.ended and any("error" in call for call in message.get("tool_calls") or []):
        # A tool call that was cut off is treated as text, so that it gets no tool response.
        return {"role": "assistant", "content": tokenizer.decode(turn.ids, skip_special_tokens=True)}
    return message


def count_tools(
    loop: ToolLoop, episodes: Sequence[Episode], accelerator: Any, summed: Callable[[Sequence[int]], list[int]]
) -> dict[str, float]:
    """Samples, calls, failures and turns summed over all processes, and the longest time of any process."""
    samples, calls, failures, turns = summed(
        [
            len(episodes),
            sum(episode.calls for episode in episodes),
            sum(episode.failures for episode in episodes),
            sum(len(episode.turns) for episode in episodes),
        ]
    )
    seconds = accelerator.gather(torch.tensor([loop.seconds], device=accelerator.device)).max().item()
    return {"samples": samples, "calls": calls, "failures": failures, "turns": turns, "seconds": seconds}


def tool_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Metrics from the counts of all samples of a generation, including replaced ones.

    Example:
        tool_metrics({"samples": 4, "calls": 2, "failures": 1, "turns": 6, "seconds": 0.5})
        -> {"tools/call_frequency": 0.5, "tools/failure_frequency": 0.5, "tools/turns": 1.5, "tools/seconds": 0.5}
    """
    metrics = {}
    if "samples" in counts:
        samples, calls = max(counts["samples"], 1), counts["calls"]
        metrics = {
            "tools/call_frequency": calls / samples,
            "tools/failure_frequency": counts["failures"] / max(calls, 1),
            "tools/turns": counts["turns"] / samples,
            "tools/seconds": counts["seconds"],
        }
    if "resets" in counts:
        metrics["tools/failed_resets"] = counts["failed_resets"] / max(counts["resets"], 1)
    return metrics


def failed_resets(trainer: Any, rollouts: Sequence[Rollout]) -> Tensor | None:
    """Bool (N, 1): rows of all processes whose environment failed to reset; None if there are no environments."""
    environments = None if trainer.toolset is None else trainer.toolset.environments
    if environments is None:
        return None
    failed = environments.unstarted
    flags = [id(rollout.extra["environments"]) in failed for rollout in rollouts]
    local = torch.tensor(flags, dtype=torch.bool, device=trainer.accelerator.device).view(-1, 1)
    failed_N = gather_rows(trainer.accelerator, local)
    if trainer.args.reward_on_error == "raise" and failed_N.any():
        error = environments.failed_reset
        said = "on another process." if error is None else f"with {type(error).__name__}: {reason(error)}"
        raise RewardError(
            f"The reset of {int(failed_N.sum())} of {len(failed_N)} environments failed, {said} With "
            "reward_on_error='abstain' their completions are left out instead."
        ) from error
    return failed_N
