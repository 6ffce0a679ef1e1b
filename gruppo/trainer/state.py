"""What the trainer consists of: its parts, and its state.

The parts are objects that `core.PolicyTrainer` makes. What only one layer uses is declared here as well, under the
name of that layer, so that this file lists every attribute.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer
from transformers.utils import PushInProgress

from gruppo.algo.loss import LossSettings
from gruppo.algo.recipes import Recipe
from gruppo.algo.reduce import UpdateSize
from gruppo.config.recipe import loss_settings_of, recipe_of
from gruppo.data.course import Course, SavedCourse
from gruppo.data.prompts import PromptEncoder
from gruppo.data.streams import PromptCursor, PromptStream
from gruppo.errors import ConfigError
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.sharding import Sharding
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.custom import CustomRollout
from gruppo.runs.record import RunRecorder
from gruppo.tools.loop import ToolLoop
from gruppo.tools.toolset import Toolset
from gruppo.trainer.books.audits import Audits
from gruppo.trainer.books.ledger import Ledger
from gruppo.trainer.books.metrics import MetricStore
from gruppo.trainer.books.profiling import Stopwatch, Timings
from gruppo.trainer.collect.ahead import RolloutsAhead
from gruppo.trainer.collect.rewarding import Rewards
from gruppo.trainer.collect.under_way import Place, RolloutUnderWay
from gruppo.trainer.display.completions import CompletionLog
from gruppo.trainer.processes.presence import Presence
from gruppo.trainer.processes.stopping import Stopper
from gruppo.trainer.resume.state import Boundary, RandomState, RunState
from gruppo.trainer.update.buffer import UpdateBuffer
from gruppo.trainer.update.entropy import EntropyControl
from gruppo.trainer.update.guard import ParityGuard
from gruppo.trainer.update.padding import PaddingGuard
from gruppo.trainer.update.planning import UpdatePlanner
from gruppo.trainer.update.under_way import UpdateUnderWay

if TYPE_CHECKING:
    from gruppo.evaluation.training import TrainingBenchmarks


class TrainerState(Trainer):
    """The attributes of the trainer, beside those of transformers.Trainer."""

    # Attributes of Trainer that have another type here.
    args: Any  # a GRPOConfig or RLOOConfig, which stays as the user wrote it, but that output_dir is absolute
    control: Any
    eval_dataset: Any
    push_in_progress: PushInProgress | None

    algorithm = ""  # "grpo" or "rloo"
    config_class: type = object
    mode: str  # "train" or "eval"

    # ---- parts

    # The algorithm
    recipe: Recipe
    loss_settings: LossSettings
    entropy_control: EntropyControl

    # Prompts, rollouts and rewards
    prompt_encoder: PromptEncoder
    backend: RolloutBackend
    custom_rollout: CustomRollout | None
    toolset: Toolset | None
    tool_loop: ToolLoop | None  # None if there is nothing to call
    eos_token_ids: list[int]
    rewards: Rewards
    benchmarks: "TrainingBenchmarks | None" = None

    # Passes of the model
    ref_model: nn.Module | None
    packed: PackedPolicy | None  # how packed rows are run; None: rows are padded, which is slower
    planner: UpdatePlanner
    parity: ParityGuard
    padding: PaddingGuard
    router_aux_loss_coef = 0.0  # weight of the load-balancing loss of a mixture of experts

    # Processes and signals
    sharding: Sharding
    presence: Presence
    stopper: Stopper

    # What is counted, logged and recorded
    metrics: MetricStore
    audits: Audits
    ledger: Ledger
    timings: Timings
    completion_logs: dict[str, CompletionLog]
    recorder: RunRecorder | None = None  # only during a run

    # ---- state

    # Reporting
    _eval_prefix = "eval"  # of the current evaluation dataset: eval, or eval_<name> when there are several
    _record_seconds = 0.0  # spent on the record since the last update
    _run_id = ""  # empty without a record
    _start_uploads: Callable[[], Any] | None = None  # until there is a table to upload
    _hub_uploads: Any  # the scheduler of uploads, which is kept for as long as the trainer

    # Feeding
    _stream: PromptStream | None = None  # None if a subclass provides its own loader
    _cursor: PromptCursor | None = None  # only with dynamic sampling
    _course: Course | None = None  # like the stream
    _saved_course: SavedCourse | None = None  # of the checkpoint; None if it has none
    _epoch = 0
    _epoch_iterator: Any = None

    # Sampling
    _environments: Sequence[Any] | None = None  # those of the latest rollouts
    _place: Place | tuple[int, ...] | None = None  # of the current rollouts; in evaluation: update, dataset and batch
    _asked_elsewhere = 0  # rollouts outside training and evaluation, such as a callback's
    _under_way: RolloutUnderWay
    _ahead: RolloutsAhead
    _sampling_anew = False  # the run was resumed inside this generation, which is counted already

    # Updating
    _queue: deque[dict[str, Any]]  # micro-batches of the generation that are not used yet
    _this_update: UpdateUnderWay
    _update_buffer: UpdateBuffer
    _size: UpdateSize  # of the current update, or of the rows being evaluated
    _stopwatch: Stopwatch  # times this process's work in an update, up to where it waits for the others
    _sending_gradients = False
    _step = 0  # micro-steps, for subclasses and callbacks; nothing here reads it

    # Checkpointing
    _earlier_runs = 0  # calls of train() before this one
    _overrides: dict[str, float]  # settings changed by callbacks
    _boundary: Boundary | None = None  # before the current update
    _random_at_boundary: RandomState | None = None  # None right after a resume: that state is saved already
    _abandoned: Boundary | None = None  # the boundary being saved, after its update was abandoned
    _saved_at: int | None = None  # the update after which the last checkpoint was written
    _retry_at: int | None = None  # the update after which to save again, when the disk was full
    _retry_after = 1  # updates until then; doubled each time
    _plan_recorded = False

    # Resuming
    _settings_now: dict[str, Any]  # at the start of the run; a callback may change some later
    _resumed_from: str | None = None
    _differing_settings: Sequence[str] = ()  # names of settings that differ from the checkpoint's
    _random_state_due: str | None = None  # the checkpoint whose random state is still to be restored
    _state_to_finish: RunState | None = None  # loaded state whose loss is not restored yet

    # Evaluating
    _benchmark_results: dict[str, float] | None = None  # of the current evaluation
    _results_prefix = ""
    _batches_evaluated = 0  # of the current dataset, like the next two
    _rows_evaluated = 0
    _loss_evaluated = 0.0

    # ---- settings that a callback may change during a run

    @property
    def beta(self) -> float:
        """The weight of the KL. Like the next three, a callback may change it during a run."""
        return float(self._overrides.get("beta", self.args.beta))

    @beta.setter
    def beta(self, value: float) -> None:
        if value and not self.args.beta:
            raise ConfigError("The run started with beta=0 and so has no reference model; start with a small beta.")
        self._change("beta", value)

    @property
    def temperature(self) -> float:
        return float(self._overrides.get("temperature", self.args.temperature))

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._change("temperature", value)
        self.backend.config.temperature = value

    @property
    def epsilon_low(self) -> float:
        return float(self._overrides.get("epsilon_low", self.args.epsilon))

    @epsilon_low.setter
    def epsilon_low(self, value: float) -> None:
        self._change("epsilon_low", value)

    @property
    def epsilon_high(self) -> float:
        return float(self._overrides.get("epsilon_high", self.args.upper_clip))

    @epsilon_high.setter
    def epsilon_high(self, value: float) -> None:
        self._change("epsilon_high", value)

    def _change(self, name: str, value: float) -> None:
        # The config stays as the user wrote it; changes during a run are kept separately.
        self._overrides[name] = value
        self.loss_settings = self.make_loss_settings()

    def make_recipe(self) -> Recipe:
        """The config's choice in each column of the recipe table."""
        return recipe_of(self.args)

    def make_loss_settings(self) -> LossSettings:
        """The recipe with its numbers."""
        widths = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        return loss_settings_of(self.args, self.recipe, beta=self.beta, **widths)
