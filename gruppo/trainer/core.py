"""One trainer for every recipe: where rollouts enter transformers.Trainer.

`train` (resuming.py) prepares the run and goes to transformers' loop. An update of that reads top to bottom:

    get_batch_samples   takes micro-batches from a queue, and collects a new generation when the queue is empty
                        (_next_micro_batch → _collect_slices → _generate_and_score_completions, a hook of TRL's)
    collect             prompts → rollouts → rewards → log-probs → advantages            (collecting.py, logprobs.py)
                        its rows are shuffled and cut into micro-batches, as TRL's are, for the queue
    training_step       called for each micro-batch; the last one runs the whole update
    run_update          packs of rows: forward, loss, backward                           (updating.py)
    _end_of_update      metrics of the update, controllers                               (updating.py)

With padded rows (`packed` is None) training_step runs its micro-batch, through `compute_loss` (updating.py).
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from gruppo.algo.loss import LossSettings, UpdateSize
from gruppo.algo.recipes import Recipe
from gruppo.config.recipe import loss_settings_of, recipe_of
from gruppo.data.collate import shuffle_sequence_dict, split_tensor_dict, trim
from gruppo.data.probing import inner_tokenizer
from gruppo.errors import ConfigError
from gruppo.policy import loading
from gruppo.policy.modes import autocast_dtype
from gruppo.policy.routing import router_coefficient
from gruppo.rewards.resolve import resolve_rewards
from gruppo.rollout.custom import CustomRollout
from gruppo.rollout.hf import generation_config
from gruppo.rollout.select import choose_backend
from gruppo.trainer import hooks
from gruppo.trainer.books.auditing import Audits
from gruppo.trainer.books.ledger import make_ledger
from gruppo.trainer.books.metrics import MetricStore
from gruppo.trainer.books.profiling import Stopwatch, Timings
from gruppo.trainer.construct import arguments, checks, packing, preparing, tooling
from gruppo.trainer.construct.benchmarks import load_benchmarks
from gruppo.trainer.construct.unused import Parts, check_unused
from gruppo.trainer.display.completions import CompletionLog, start_hub_uploads
from gruppo.trainer.evaluating import Evaluating
from gruppo.trainer.names import KnownNames
from gruppo.trainer.processes import spreading
from gruppo.trainer.processes.presence import presence_of
from gruppo.trainer.resume.stopping import Stopper
from gruppo.trainer.rollouts.overlapping import RolloutsAhead
from gruppo.trainer.rollouts.rewarding import Rewards
from gruppo.trainer.rollouts.tool_turns import make_tool_loop
from gruppo.trainer.sampling import RolloutUnderWay
from gruppo.trainer.update.entropy import EntropyControl
from gruppo.trainer.update.planning import UpdatePlanner
from gruppo.trainer.update.remembering import UpdateMemory
from gruppo.types import TrainBatch

logger = logging.getLogger(__name__)


def _identity(rows: list[Any]) -> list[Any]:
    return rows


def _never_called(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("compute_loss is overridden, so no compute_loss_func is ever called")


class PolicyTrainer(KnownNames, Evaluating):
    """Samples groups, scores them and updates the policy; GRPOTrainer and RLOOTrainer fill in the recipe."""

    loss_is_scaled_for_ga = True  # compute_loss divides by the size of the whole update
    algorithm = ""  # "grpo" or "rloo"
    config_class: type = object

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: Any,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        reward_processing_classes: Any,
        callbacks: Any,
        optimizers: Any,
        quantization_config: Any,
        peft_config: Any,
        rollout_func: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
    ):
        hooks.reject_unused_hooks(self)
        if args is None:
            name = model if isinstance(model, str) else loading.model_name(model)
            args = self.config_class(f"{name.rstrip('/').split('/')[-1] or 'model'}-{self.algorithm.upper()}")
        checks.check_config(args, self.config_class)
        checks.warn_combinations(args)
        self.benchmarks = load_benchmarks(args, eval_dataset)  # before the model, which takes longer
        self.toolset = tooling.make_toolset(tools, environment_factory, args)
        self.tools = [] if self.toolset is None else self.toolset.functions
        arguments.check_early(self, args, reward_funcs, train_dataset, eval_dataset, rollout_func)
        set_seed(args.seed)  # before the model is made: adapters are initialised at random
        policy = loading.load_policy(model, args, quantization_config)
        processing = loading.load_processing_class(processing_class, policy, args)
        tokenizer = inner_tokenizer(processing)
        self.eos_token_ids = loading.stop_token_ids(policy, tokenizer)
        policy = preparing.prepare_policy(policy, tokenizer, peft_config, args)
        rewards = resolve_rewards(
            *tooling.with_environment_rewards(
                self.toolset, reward_funcs, reward_processing_classes, args.reward_weights
            ),
            trust_remote_code=args.trust_remote_code,
        )
        self.prompt_encoder = preparing.make_prompt_encoder(self.toolset, policy, processing, args)
        if rollout_func is not None and args.max_prompt_length is not None:
            raise ConfigError("max_prompt_length has no effect with rollout_func, which renders the prompts itself.")
        train_dataset = tooling.rows_of_environment(self.toolset, args) if train_dataset is None else train_dataset
        for dataset in (train_dataset, eval_dataset):
            tooling.check_rows(self.toolset, dataset)
        checks.check_datasets(train_dataset, eval_dataset, args, self.prompt_encoder, rollout_func)
        super().__init__(
            model=policy,
            args=args,
            data_collator=_identity,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing,
            callbacks=callbacks,
            optimizers=optimizers,
            # transformers before 5.19 knows no loss_is_scaled_for_ga; this keeps it from dividing the loss again.
            compute_loss_func=_never_called,
        )
        self._make_run_state(rewards, rollout_func)

    # ---- construction

    def _make_run_state(self, rewards: tuple[list[Any], list[Any], Tensor], rollout_func: Any) -> None:
        """Everything that needs the accelerator, which exists once Trainer is initialised."""
        args = self.args
        self.sharding = spreading.find_sharding(self)
        preparing.recompute_by_default(self)
        self.model.add_model_tags(["gruppo", self.algorithm])
        self._changed: dict[str, float] = {}
        self.recipe = self.make_recipe()
        self.loss_settings = self.make_loss_settings()
        self.mode = "train"
        self.timings = Timings()
        self._stopwatch = Stopwatch(self.accelerator.device)
        self.metrics = MetricStore(self.accelerator)
        self.entropy_control = EntropyControl.from_args(args)
        self.completion_logs = {mode: CompletionLog(args.generation_batch_size) for mode in ("train", "eval")}
        self._queue: deque[dict[str, Any]] = deque()
        self._step = 0
        self._earlier_runs = 0  # calls of train() before this one
        self._update_seconds = 0.0

        self.stopper = Stopper(enabled=args.save_on_signal, alone=self.accelerator.num_processes == 1)
        self.presence = presence_of(args, lambda: self.state.global_step + 1, lambda: self.stopper.waited)
        self.audits = Audits(args.audit, args.max_bad_updates, self._note_finding)
        self.rewards = Rewards(
            *rewards,
            args=args,
            accelerator=self.accelerator,
            sharding=self.sharding,
            presence=self.presence,
            timer=self.timer,
        )
        self.add_callback(self.rewards.breaker)
        runner = self.rewards.runner
        check_unused(args, Parts(self.toolset is not None, runner.has_workers, runner.has_async))
        self.router_aux_loss_coef = router_coefficient(self.model, args.router_aux_loss_coef)
        checks.check_router_loss(self)
        self.packed = packing.packed_policy(self)
        self.ref_model = spreading.make_reference(self)
        self._make_sampler(rollout_func)
        if self.benchmarks is not None:
            self.benchmarks.bind(self.backend, self._tokenizer)
        self.planner = UpdatePlanner(
            args,
            lambda: self.accelerator.unwrap_model(self.model),
            self.packed,
            lambda: self.backend.release(),
            agree=(lambda plan: spreading.agreed(self.accelerator, plan)) if self.sharding.spread else None,
        )
        self._memory = UpdateMemory()
        self.ledger = make_ledger(self.accelerator, self.model, autocast_dtype(self.accelerator.mixed_precision))
        self._hub_uploads = None
        if self.accelerator.is_main_process and getattr(args, "log_completions_hub_repo", None):
            self._hub_uploads = start_hub_uploads(
                args.log_completions_hub_repo, self.completions_folder, loading.model_name(self.model)
            )
        set_seed(args.seed, device_specific=True)  # processes sample different completions

    def _make_sampler(self, rollout_func: Any) -> None:
        args, self._under_way, self._ahead = self.args, RolloutUnderWay(), RolloutsAhead(self.args)
        if rollout_func is None:
            self.custom_rollout = None
        else:
            vocabulary_size = loading.vocabulary_size(self.model)
            self.custom_rollout = CustomRollout(rollout_func, self, vocabulary_size)
        self.backend = choose_backend(
            args,
            lambda: self.accelerator.unwrap_model(self.model_wrapped),
            generation_config(
                args,
                pad_token_id=self._tokenizer.pad_token_id,
                bos_token_id=self._tokenizer.bos_token_id,
                stop_ids=self.eos_token_ids,
                never=self.prompt_encoder.placeholders,
            ),
            stop_ids=self.eos_token_ids,
            tokenizer=self._tokenizer,
            mixed_precision=self.accelerator.mixed_precision,  # a launcher may have set it, not the config
            needed=rollout_func is None or self.toolset is not None,
            entropies=args.skip_zero_advantage,  # of rows that the update leaves out
            spread=spreading.make_spread(self, needed=rollout_func is None or self.toolset is not None),
            images=self.prompt_encoder.takes_images,
        )
        if rollout_func is None or self.toolset is not None:
            checks.warn_biased_sampling(self)
        self.backend.pause = self.stopper.check
        self.backend.clock = lambda: self.state.global_step
        self.tool_loop = make_tool_loop(self, lambda count: self._summed([count])[0])
        spreading.reject_together(self)

    def _note_finding(self, finding: Any) -> None:
        self.record_event("audit", check=finding.check, message=finding.message, values=finding.values)

    def make_recipe(self) -> Recipe:
        """The choices that the config makes in the columns of the recipe table."""
        return recipe_of(self.args)

    def make_loss_settings(self) -> LossSettings:
        """The recipe with its numbers."""
        widths = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        return loss_settings_of(self.args, self.recipe, beta=self.beta, **widths)

    # ---- an update

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._queue.clear()  # of an earlier call of train(), as are the statistics
        self.metrics.discard()
        self.ledger.forget()
        self._parity_checked_at = None
        self._epoch_iterator = None
        self.rewards.breaker.reset()
        self.audits.reset()
        self._random_state_due = kwargs.get("resume_from_checkpoint")
        if self._random_state_due is not None:
            self._earlier_runs = 0  # it is the first run that goes on
        try:
            output = super()._inner_training_loop(*args, **kwargs)
        finally:
            self._earlier_runs += 1
            if self.toolset is not None:
                self.toolset.close()
        return output

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state once: Trainer does it only after the first rollouts of a resumed epoch."""
        if self._random_state_due is not None:
            self._random_state_due = None
            super()._load_rng_state(checkpoint)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], UpdateSize | None]:
        """The micro-batches of one update and their size, the one denominator of every reduction."""
        start = time.perf_counter()
        self._count_epoch(epoch_iterator)
        self._restore_loss()
        self.model.train()  # as in the update itself, whatever an evaluation left behind
        if callable(getattr(self.optimizer, "train", None)):  # some have other weights for evaluation
            self.optimizer.train()
        self._mark_boundary()
        steps = list(islice(epoch_iterator, num_batches))
        self._load_rng_state(self._random_state_due)  # a loader that skips may have drawn a number
        with self.stopper.abandonable():
            batches = [self._next_micro_batch(step, i) for i, step in enumerate(steps)]
        self._batches_at_hand, self._loss_at_hand = batches, 0.0
        self._memory.forget()
        size = None
        if batches:
            rows = [TrainBatch.from_dict(batch) for batch in batches]
            self._size = size = self.update_size(rows)
            self._balance_update(batches, size)
            batches = batches if self.packed is None else self.as_update(rows, size)
        self._update_seconds += time.perf_counter() - start
        return batches, size

    def _next_micro_batch(self, step: Any, position: int) -> dict[str, Any]:
        """Micro-step `step` of the epoch, the `position`-th of its update, from the queue.

        The step is a number, or rows if a subclass brings its own loader.
        """
        generation, phase = divmod(step if isinstance(step, int) else 0, self.args.micro_steps_per_generation)
        if isinstance(step, int) and phase == 0:
            self._queue.clear()  # of an epoch that was stopped early
        if not self._queue:
            self._sampling_anew = phase > 0
            with self.presence.during("reading prompts"):
                rows = self.rows_of(generation, anew=phase > 0) if isinstance(step, int) else step
            place = (self._epoch, generation) if isinstance(step, int) else (self.state.global_step, position)
            with self._at((self._earlier_runs, *place)):
                slices = self._collect_slices(rows)
            # A run that resumes inside a generation collects it anew and goes on with the slice it had reached.
            self._queue.extend((slices * self.args.num_iterations)[phase:])
        return self._queue.popleft()

    def _collect_slices(self, rows: Sequence[Any]) -> list[dict[str, Any]]:
        """Collect a generation, shuffle its rows and cut it into micro-batches, each no wider than it needs to be."""
        with self.timer("_prepare_inputs"):  # the name under which dashboards know this phase
            whole = self._generate_and_score_completions(list(rows))
            slices = split_tensor_dict(shuffle_sequence_dict(whole), self.args.steps_per_generation)
            slices = [trim(part, self.args.pad_to_multiple_of) for part in slices]
        self._count_slices(whole, slices)
        return slices

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        start = time.perf_counter()
        with self.stopper.abandonable():
            loss = self._run_micro_step(model, inputs, num_items_in_batch)
        self._loss_at_hand = self._loss_at_hand + loss
        self._step += 1
        seconds = time.perf_counter() - start
        self._update_seconds, self._pass_seconds = self._update_seconds + seconds, self._pass_seconds + seconds
        if self.accelerator.sync_gradients:
            self._end_of_update()
        return loss

    def _run_micro_step(self, model: nn.Module, inputs: Any, size: Any) -> Tensor:
        if self.packed is None:
            if "completion_mask" in inputs:
                self.planner.plan(TrainBatch.from_dict(inputs))  # may turn gradient checkpointing on
            loss: Tensor = super().training_step(model, inputs, size)
            return loss
        if "update" in inputs:
            return self.run_update(model, inputs["update"])
        return torch.zeros((), device=self.accelerator.device)  # the update's work is done in its last micro-step

    # ---- a hook of TRL's trainers: name and shapes are theirs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Hook: rows to the dict of tensors that the loss reads."""
        return self.collect(inputs).to_dict()
