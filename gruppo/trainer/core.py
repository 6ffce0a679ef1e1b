"""One trainer for every recipe: how it is built.

`train` (running.py) prepares a run and enters transformers' loop, whose updates are in stepping.py.
"""

from collections import deque
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import Tensor

from gruppo.data.probing import inner_tokenizer
from gruppo.errors import ConfigError
from gruppo.policy import loading
from gruppo.policy.modes import autocast_dtype, looks_for_unused_weights
from gruppo.policy.routing import router_coefficient
from gruppo.policy.unwrap import bare_model
from gruppo.rewards.resolve import resolve_rewards
from gruppo.rollout.custom import CustomRollout
from gruppo.rollout.select import choose_backend
from gruppo.rollout.settings import generation_config
from gruppo.trainer import hooks
from gruppo.trainer.books.audits import Audits
from gruppo.trainer.books.ledger import make_ledger
from gruppo.trainer.books.metrics import MetricStore
from gruppo.trainer.books.profiling import Stopwatch, Timings
from gruppo.trainer.collect.ahead import RolloutsAhead
from gruppo.trainer.collect.rewarding import Rewards
from gruppo.trainer.collect.tool_turns import make_tool_loop
from gruppo.trainer.collect.under_way import RolloutUnderWay
from gruppo.trainer.construct import arguments, checks, packing, preparing, tooling
from gruppo.trainer.construct.benchmarks import load_benchmarks
from gruppo.trainer.construct.folder import own_folder
from gruppo.trainer.construct.frozen import make_reference
from gruppo.trainer.construct.unused import Parts, check_unused
from gruppo.trainer.display.completions import CompletionLog
from gruppo.trainer.display.hub import table_uploads
from gruppo.trainer.names import KnownNames
from gruppo.trainer.processes import sharded
from gruppo.trainer.processes.presence import presence_of
from gruppo.trainer.processes.stopping import Stopper
from gruppo.trainer.processes.threads import BusyMachine, threads_spin
from gruppo.trainer.update.buffer import UpdateBuffer
from gruppo.trainer.update.entropy import EntropyControl
from gruppo.trainer.update.guard import ParityGuard
from gruppo.trainer.update.padding import PaddingGuard
from gruppo.trainer.update.planning import UpdatePlanner
from gruppo.trainer.update.under_way import UpdateUnderWay
from gruppo.trainer.update.written import WeightsWritten


def _identity(rows: list[Any]) -> list[Any]:
    return rows


def _never_called(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("compute_loss is overridden, so no compute_loss_func is ever called")


class PolicyTrainer(KnownNames):
    """Samples groups, scores them and updates the policy; GRPOTrainer and RLOOTrainer fill in the recipe."""

    loss_is_scaled_for_ga = True  # as in TRL: `compute_loss` returns a share of the update's loss; False in RLOO

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
        own_folder(args)
        arguments.check_early(self, args, reward_funcs, train_dataset, eval_dataset, rollout_func, optimizers)
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
            tooling.check_tool_rows(self.toolset, dataset)
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
            # transformers before 5.19 has no loss_is_scaled_for_ga: it divides the loss if these two are not set.
            compute_loss_func=_never_called if self.loss_is_scaled_for_ga else None,
        )
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga
        self._make_parts(rewards, rollout_func)

    # ---- construction

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Trainer's method, with another default for `ddp_find_unused_parameters`."""
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        for handler in built["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.find_unused_parameters = looks_for_unused_weights(self.model, self.args)
        return built

    def _make_parts(self, rewards: tuple[list[Any], list[Any], Tensor], rollout_func: Any) -> None:
        """Make everything that needs the accelerator, which exists once Trainer is initialised."""
        args = self.args
        self.sharding = sharded.find_sharding(self)
        preparing.recompute_by_default(self)
        self.model.add_model_tags(["gruppo", self.algorithm])
        self._overrides: dict[str, float] = {}
        self.recipe = self.make_recipe()
        self.loss_settings = self.make_loss_settings()
        self.mode = "train"
        self.timings = Timings()
        self._stopwatch = Stopwatch(self.accelerator.device)
        self.metrics = MetricStore(self.accelerator)
        self.entropy_control = EntropyControl.from_args(args)
        self.completion_logs = {mode: CompletionLog(args.generation_batch_size) for mode in ("train", "eval")}
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
        self.callback_handler.callbacks.insert(0, WeightsWritten())
        self.add_callback(self.rewards.breaker)
        if self.accelerator.device.type == "cpu" and threads_spin():
            self.add_callback(BusyMachine())
        runner = self.rewards.runner
        check_unused(args, Parts(self.toolset is not None, runner.has_workers, runner.has_async))
        self.router_aux_loss_coef = router_coefficient(self.model, args.router_aux_loss_coef)
        checks.check_router_loss(self)
        self.packed = packing.packed_policy(self)
        self.ref_model = make_reference(self)
        self._make_sampler(rollout_func)
        if self.benchmarks is not None:
            self.benchmarks.bind(self.backend, self._tokenizer)
        self._make_update_parts()
        self._queue: deque[dict[str, Any]] = deque()
        self.ledger = make_ledger(self.accelerator, self.model, autocast_dtype(self.accelerator.mixed_precision))
        if self.accelerator.is_main_process and args.log_completions_hub_repo:
            self._start_uploads = table_uploads(args, self.completions_folder, loading.hub_name(self.model))
        set_seed(args.seed, device_specific=True)  # processes sample different completions

    def _make_update_parts(self) -> None:
        """Make the objects that plan an update, check its fast path, and hold its results."""
        self.planner = UpdatePlanner(
            self.args,
            lambda: bare_model(self.accelerator, self.model),
            self.packed,
            lambda: self.backend.release(),
            agree=(lambda plan: sharded.least_plan(self.accelerator, plan)) if self.sharding.is_sharded else None,
            autocast_dtype=autocast_dtype(self.accelerator.mixed_precision),  # a launcher may have set it
        )
        self.parity = ParityGuard(
            self.args,
            self.accelerator,
            self.packed,
            planner=self.planner,
            presence=self.presence,
            sharding=self.sharding,
            whole=lambda: self.backend.whole,
        )
        self.padding = PaddingGuard(
            self.accelerator,
            self.model,
            active=self.packed is None and self.args.parity_interval is not None,
            sharded=self.sharding.is_sharded,
            autocast_dtype=autocast_dtype(self.accelerator.mixed_precision),
        )
        self._update_buffer, self._this_update = UpdateBuffer(), UpdateUnderWay()

    def _make_sampler(self, rollout_func: Any) -> None:
        args, self._under_way, self._ahead = self.args, RolloutUnderWay(), RolloutsAhead(self.args)
        samples_itself = rollout_func is None or self.toolset is not None
        if rollout_func is None:
            self.custom_rollout = None
        else:
            vocabulary_size = loading.vocabulary_size(self.model)
            self.custom_rollout = CustomRollout(rollout_func, self, vocabulary_size)
        self.backend = choose_backend(
            args,
            lambda: bare_model(self.accelerator, self.model_wrapped),
            generation_config(
                args,
                pad_token_id=self._tokenizer.pad_token_id,
                bos_token_id=self._tokenizer.bos_token_id,
                stop_ids=self.eos_token_ids,
                never=self.prompt_encoder.placeholders,
            ),
            stop_ids=self.eos_token_ids,
            tokenizer=self._tokenizer,
            mixed_precision=self.accelerator.mixed_precision,  # the launcher, not the config, may have set it
            needed=samples_itself,
            entropies=args.skip_zero_advantage,  # for rows that the update skips
            sharded=sharded.make_sharded_sampling(self, needed=samples_itself),
            images=self.prompt_encoder.takes_images,
        )
        if samples_itself:
            checks.warn_biased_sampling(self)
        self.backend.pause = self.stopper.check
        self.backend.clock = lambda: self.state.global_step
        self.backend.working = self.presence.during
        self.tool_loop = make_tool_loop(self, lambda count: self._summed([count])[0])
        sharded.reject_together(self)

    def _note_finding(self, finding: Any) -> None:
        self.record_event("audit", check=finding.check, message=finding.message, values=finding.values)
