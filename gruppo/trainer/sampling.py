"""From prompts to rollouts: what samples them, with which random numbers, and the tool calls in between."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from gruppo.algo.masks import is_truncated
from gruppo.data.prompts import Encoded, reject_images
from gruppo.data.responses import decode
from gruppo.errors import RolloutError
from gruppo.rollout.base import group_requests, stop_strings
from gruppo.tools.loop import Episode, ToolLoop, Turn
from gruppo.tools.toolset import Started
from gruppo.trainer.collect.resampling import runs
from gruppo.trainer.collect.tool_turns import count_tools
from gruppo.trainer.collect.under_way import Place, RolloutUnderWay
from gruppo.trainer.hooks import overridden
from gruppo.trainer.logprobs import LogProbs
from gruppo.trainer.processes.collectives import rows_in_batch
from gruppo.types import Completion, Prompt, Rollout, Row, SampleRequest, StopReason

OUTSIDE_RUNS = 2**63  # begins the place of rollouts outside training and evaluation; no run has this number


class Sampling(LogProbs):
    """The part of the trainer that samples."""

    @property
    def group_size(self) -> int:
        """G in the current mode."""
        return int(self.args.num_generations if self.mode == "train" else self.args.eval_group_size)

    def rollout(self, rows: Sequence[Row], places: Sequence[int] | None = None, attempt: int = 0) -> list[Rollout]:
        """One rollout per row: by the user's function if there is one, else by the backend; then the tools' turns.

        `places` are the rows' positions in the batch of all processes; None if `rows` are all rows of this process.
        """
        if not self.prompt_encoder.takes_images:
            for row in rows:
                reject_images(row)
        under_way = self._under_way = RolloutUnderWay(attempt=attempt)
        if self.custom_rollout is None or self.tool_loop is not None:
            under_way.own_rows = rows_in_batch(self.accelerator, len(rows)) if places is None else places
        self._asked_elsewhere += self._place is None
        start = time.perf_counter()
        started = Started(rows) if self.toolset is None else self.toolset.start(rows, self.mode)
        with nullcontext() if self.tool_loop is None else self.backend.turns():
            with self.presence.during("sampling"):
                prompts, completions, extras = self._first_turn(started.rows)
            if self.tool_loop is None:
                ids = [completion.ids for completion in completions]
                outputs = decode(self._tokenizer, prompts, ids, self.eos_token_ids)
            else:
                completions, outputs = self._use_tools(self.tool_loop, prompts, completions, started)
        if under_way.asked:
            self.metrics.add(self.mode, self.backend.metrics())
        self._note_sampling(prompts, completions, under_way.seconds_ahead or time.perf_counter() - start)
        self._environments = started.environments or None
        return [
            Rollout(prompt, completions[i], outputs[i], {**extras[i], **started.extra(i)})
            for i, prompt in enumerate(prompts)
        ]

    def _first_turn(self, rows: Sequence[Row]) -> tuple[list[Prompt], list[Completion], Sequence[Mapping[str, Any]]]:
        """Prompts, completions and the additional fields of a rollout function."""
        if not rows:
            if self.backend.needs_every_process and self.custom_rollout is None:
                self.backend.sample([])  # the other processes cannot sample without this one
            return [], [], []
        if self.custom_rollout is not None:
            encoded = self.prompt_encoder(rows) if self.prompt_encoder.takes_images else None
            texts = [row["prompt"] for row in rows] if encoded is None else [prompt.text for prompt in encoded]
            prompt_ids, completions, extras = self.custom_rollout(texts)
            stops = self._stop_reasons([completion.ids for completion in completions])
            completions = [replace(made, stop=stop) for made, stop in zip(completions, stops, strict=True)]
            prompts = encoded or [Prompt(r, text, ids) for r, text, ids in zip(rows, texts, prompt_ids, strict=True)]
            if any(list(prompt.ids) != list(ids) for prompt, ids in zip(prompts, prompt_ids, strict=True)):
                raise RolloutError(
                    "rollout_func returned prompt_ids that differ from those of the processor, so images would be in "
                    "the wrong places. Return those of processor.apply_chat_template(prompt, "
                    "add_generation_prompt=True, tokenize=True)."
                )
            self._under_way.prompts = prompts
            return prompts, completions, extras
        self._under_way.prompts = prompts = self.prompt_encoder(rows, tokenize=self._tokenize_prompts)
        return prompts, self._sample([list(prompt.ids) for prompt in prompts]), [{}] * len(rows)

    def _sample(self, prompt_ids: list[list[int]]) -> list[Completion]:
        """One completion per prompt, from the backend, or from the hook of a subclass that overrides it."""
        turn, prompts = self._under_way.turn, self._under_way.prompts
        prompts = prompts if turn is None else [prompts[row] for row in turn.rows]
        vision = [prompt.vision for prompt in prompts] if self.prompt_encoder.takes_images else None
        if not overridden(self, ["_generate_single_turn"]):
            return self._ask_backend(prompt_ids, vision)
        # In later turns the prompts no longer form groups.
        more: dict[str, Any] = {} if turn is None else {"num_generations": 1}
        if vision is not None:
            more |= {"images": [list(prompt.images) for prompt in prompts], "multimodal_fields": {"vision": vision}}
        ids, logps = self._generate_single_turn(prompt_ids, **more)
        if len(ids) != len(prompt_ids):
            raise RolloutError(f"{len(ids)} completions came back for {len(prompt_ids)} prompts.")
        stops = self._stop_reasons(ids)
        return [Completion(row, stops[i], None if logps is None else logps[i]) for i, row in enumerate(ids)]

    @contextmanager
    def _drawing_at(self, place: Place | tuple[int, ...]) -> Iterator[None]:
        """Inside this context, rollouts draw the random numbers of this place."""
        self._place = place
        try:
            yield
        finally:
            self._place = None

    def _ask_backend(self, prompt_ids: list[list[int]], vision: Sequence[Any] | None = None) -> list[Completion]:
        tokens = self.prompt_encoder.placeholders
        if tokens and vision is None and any(tokens & set(ids) for ids in prompt_ids):
            raise RolloutError(
                f"{type(self).__name__}._generate_single_turn requests completions of prompts with images, but does "
                "not pass their multimodal_fields on to super()."
            )
        requests = self._requests(prompt_ids, vision or [None] * len(prompt_ids))
        under_way = self._under_way
        under_way.requests_made, under_way.asked = under_way.requests_made + 1, True
        with self.timer(self.backend.timer):
            completions = self._draw(requests)
        work = self.backend.work([len(ids) for ids in prompt_ids], [len(c.ids) for c in completions])
        earlier = {name: value for name, value in under_way.work.items() if not isinstance(value, bool)}
        under_way.work = {name: value + earlier[name] if name in earlier else value for name, value in work.items()}
        if self.backend.has_own_weights:
            return self._from_copy(completions)
        # A backend that runs the policy itself returns log-probs as `plain_logps`, for the metrics and for reuse as
        # old log-probs. They are useless if it samples at a temperature other than the loss's.
        if self.backend.config.temperature != self.temperature:
            completions = [replace(completion, plain_logps=None, entropies=None) for completion in completions]
        return [replace(completion, logps=None) for completion in completions]

    def _draw(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """The completions requested ahead, if they match these requests; else new ones from the current weights."""
        flight, under_way = None, self._under_way
        if self.mode == "train" and self._place is not None and not under_way.attempt:
            flight = self._ahead.take(requests, self.state.global_step, self.backend.pause)
        if flight is None:
            return self.backend.sample(requests)
        under_way.seconds_ahead += flight.seconds
        return [replace(completion, sampled_at=flight.sampled_at) for completion in flight.take() or []]

    def _from_copy(self, completions: list[Completion]) -> list[Completion]:
        """Let log-probs from a copy of the policy be the sampler's log-probs in the loss.

        A recipe without a correction for the sampler (RLOO) only measures the difference to the policy, and only where
        it comes from arithmetic alone.
        """
        if self.args.vllm_importance_sampling_correction is not None:
            return completions
        known = [[x for x in c.logps or [] if x is not None] for c in completions]
        comparable = not self.backend.filters(self.temperature) and all(
            len(logps) == len(c.ids) for logps, c in zip(known, completions, strict=True)
        )
        return [
            replace(c, logps=None, plain_logps=logps if comparable else None)
            for c, logps in zip(completions, known, strict=True)
        ]

    def _requests(self, prompt_ids: list[list[int]], vision: Sequence[Any]) -> list[SampleRequest]:
        place, under_way = self._place or (OUTSIDE_RUNS, self._asked_elsewhere), self._under_way
        kind = (self.mode == "eval") + 2 * under_way.attempt  # a number of its own for each attempt in each mode
        key = self._noise_of(place, kind, under_way.requests_made)
        turn, size = under_way.turn, self.group_size
        rows = under_way.own_rows if turn is None else [under_way.own_rows[row] for row in turn.rows]
        limits: Sequence[int | None] = [None] * len(prompt_ids) if turn is None else turn.limits
        if len(prompt_ids) != len(rows):  # a hook requests rows of its own choice
            key, rows = [*key, self.accelerator.process_index], range(len(prompt_ids))
            limits = [None] * len(prompt_ids)
        if turn is None:
            return [
                request
                for run in runs(rows)
                for request in group_requests(
                    prompt_ids[run], group_size=size, first_row=rows[run.start], key=key, vision=vision[run]
                )
            ]
        # A sample keeps the key and number it began with; the turn number makes its random numbers different.
        return [
            replace(request, max_new_tokens=limit, turn=turn.number)
            for ids, seen, row, limit in zip(prompt_ids, vision, rows, limits, strict=True)
            for request in group_requests([ids], group_size=size, first_row=row, key=key, vision=[seen])
        ]

    def _noise_of(self, place: Sequence[int], kind: int = 0, request: int = 0) -> list[int]:
        """The key of a generation's random numbers; by default, of training and of the first request."""
        return [self.args.seed, kind, request, *place]

    def _stop_reasons(self, rows: Sequence[Sequence[int]]) -> list[StopReason]:
        """Why completions ended, where their source does not report it."""
        ended = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        strings = stop_strings(self.backend.config_in_effect())

        def reason(ids: Sequence[int], is_cut: bool) -> StopReason:
            if not is_cut:
                return StopReason.EOS
            text = self._tokenizer.decode(ids) if strings else ""
            return StopReason.STOP_STRING if any(string in text for string in strings) else StopReason.LENGTH

        return [reason(ids, is_cut) for ids, is_cut in zip(rows, is_truncated(rows, ended), strict=True)]

    @property
    def biased_sampling(self) -> list[str]:
        """The settings that shape what is sampled but not the training log-probs, with their values.

        Includes settings from the model's own generation config.
        """
        found = self.backend.filters(self.temperature)
        if set(found.get("suppress_tokens") or ()) <= self.prompt_encoder.placeholders:
            found.pop("suppress_tokens", None)  # set by gruppo: no model trained on images writes these tokens
        return [f"{name}={value}" for name, value in found.items()]

    # ---- a sampler with its own copy of the weights

    def _refresh_sampler(self) -> None:
        """Send the current weights to a sampler that has a copy; all processes call this before a generation."""
        if not self.backend.has_own_weights:
            return
        if self._ahead.flight is not None:
            start = time.perf_counter()
            with self.timer("wait_for_rollouts"), self.presence.during("waiting for rollouts"):
                self._ahead.wait(self.backend.pause)
            if self.mode == "train":
                self.metrics.add("train", {"rollout/wait_seconds": time.perf_counter() - start})
        with self.timer("sync_weights"):
            self.backend.refresh()

    def _ask_ahead(self) -> None:
        """Request the next generation from the current weights, once the current one is sampled."""
        ahead = self._ahead
        now = self._place
        if not ahead.enabled or not isinstance(now, Place) or ahead.flight is not None:
            return
        if (place := self.place_after(now.epoch, now.generation)) is None:
            return
        rows = self.rows_ahead(*place)
        prompts = self.prompt_encoder(rows, tokenize=self._tokenize_prompts)
        key = self._noise_of(Place(now.run, *place))
        own = rows_in_batch(self.accelerator, len(rows))
        ids = [list(prompt.ids) for prompt in prompts]
        ahead.flight = self.backend.begin(
            group_requests(ids, group_size=self.group_size, first_row=own.start, key=key)
        )
        self.metrics.add("train", self.backend.metrics())

    # ---- hooks of TRL's trainers: names and shapes are theirs

    def _tokenize_prompts(self, prompts: list[Any], tools: Any = None) -> Encoded:
        """Hook: token ids of prompts, images (None without a processor) and multimodal fields (empty without one).

        `tools` is passed only where the prompts of a batch show different ones.
        """
        return self.prompt_encoder.encode(prompts, **({} if tools is None else {"tools": tools}))

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any = None,
        multimodal_fields: Any = None,
        num_generations: int | None = None,
    ) -> tuple[list[list[int]], list[list[float | None]] | None]:
        """Hook: completion ids, and sampling log-probs or None, one per prompt.

        The off-policy mask uses these log-probs as the sampler's; with vLLM, so does the correction of the loss.
        """
        completions = self._ask_backend(prompt_ids, (multimodal_fields or {}).get("vision"))
        logps = [list(c.logps or [None] * len(c.ids)) for c in completions] if self.backend.has_own_weights else None
        return [list(completion.ids) for completion in completions], logps

    # ---- the ledger

    def _note_sampling(self, prompts: Sequence[Prompt], completions: Sequence[Completion], seconds: float) -> None:
        """Enter a rollout in the ledger."""
        if self.mode != "train":
            return
        prompt_tokens = [len(prompt.ids) for prompt in prompts]
        lengths = [completion.written for completion in completions]
        self.ledger.sampled(prompts=prompt_tokens, completions=lengths, seconds=seconds, **self._under_way.work)

    # ---- tools

    def _summed(self, numbers: Sequence[int]) -> list[int]:
        """Each number added up over all processes."""
        local = torch.tensor(list(numbers), device=self.accelerator.device)
        with self.presence.waiting():
            summed: list[int] = self.accelerator.reduce(local, reduction="sum").tolist()
        return summed

    def _use_tools(
        self, loop: ToolLoop, prompts: Sequence[Prompt], completions: Sequence[Completion], started: Started
    ) -> tuple[list[Completion], list[Any]]:
        """Completions of all turns, and their messages."""
        episodes = [
            Episode(prompt.ids, tools, [completion])
            for prompt, completion, tools in zip(prompts, completions, started.tools, strict=True)
        ]
        with self.presence.during("running tools"):
            loop.run(episodes, self._next_turn)
        self._under_way.turn = None
        self._under_way.tool_counts = count_tools(loop, episodes, self.accelerator, self._summed)
        return [episode.completion for episode in episodes], [episode.messages for episode in episodes]

    def _next_turn(self, turn: Turn) -> list[Completion]:
        self._under_way.turn, self._under_way.requests_made = turn, 0
        with self.presence.during("sampling"):
            return self._sample(turn.prompt_ids)
