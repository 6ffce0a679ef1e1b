"""What a run shows, writes and uploads: logs, tables of completions, the model card, pushes to the hub."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from gruppo.data.probing import inner_tokenizer
from gruppo.policy.loading import hub_name
from gruppo.policy.sharding import shape_of
from gruppo.runs.lines import write_file
from gruppo.trainer.books.profiling import profiling_context
from gruppo.trainer.display import hub
from gruppo.trainer.display.card import model_card
from gruppo.trainer.display.completions import (
    log_to_trackers,
    print_prompt_completions_sample,
    write_parquet,
)
from gruppo.trainer.display.progress import LiveProgressCallback, take_over
from gruppo.trainer.state import TrainerState


class Reporting(TrainerState):
    """The part of the trainer that reports."""

    def timer(self, name: str) -> AbstractContextManager[None]:
        return profiling_context(self, name)

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer: the processing class itself, or the one inside a processor."""
        return inner_tokenizer(self.processing_class)

    @property
    def _tracks_images(self) -> bool:
        """Whether images of prompts are sent to a tracker; files contain only their digests."""
        args = self.args
        return args.log_completions and args.log_multimodal and bool({"wandb", "trackio"} & set(args.report_to))

    def add_callback(self, callback: Any) -> None:
        """Trainer's method; if gruppo's progress display is among the callbacks, it replaces that of transformers."""
        super().add_callback(callback)
        take_over(self)

    def close_displays(self) -> None:
        """Close progress displays, also after an error, so that the terminal is left as it was."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, LiveProgressCallback):
                callback.close()

    @property
    def _records_rows(self) -> bool:
        """Whether the record of the run holds every completion."""
        return self.recorder is not None and bool(self.args.record == "all")

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Time work on the record."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._record_seconds += time.perf_counter() - start

    def record_event(self, kind: str, **fields: Any) -> None:
        """Write an event to the record of the run."""
        if self.recorder is not None:
            self.recorder.event(kind, update=self.state.global_step, **fields)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the metrics collected since the last log, then show the completions."""
        if self.mode == "train":
            logs.update(self.metrics.take("train"))
        super().log(logs, start_time)
        if self.recorder is not None:
            with self._recording():
                self.recorder.metrics(self.state.global_step, logs, kind=self._kind_of(logs))
        if self.args.log_completions and self.accelerator.is_main_process:
            self._show_completions()

    def _kind_of(self, logs: Mapping[str, Any]) -> str:
        """The kind of logs: of training, of an evaluation (its prefix), or of the end of a run."""
        if self.mode != "train":
            return self._eval_prefix
        # Not by `train_runtime`, which every log has with include_num_input_tokens_seen.
        return "end" if "train_loss" in logs else "train"

    @property
    def completions_folder(self) -> Path:
        return Path(self.args.output_dir) / "completions"

    def _show_completions(self) -> None:
        """Send completions to the console, a parquet file and the trackers; evaluation has separate files."""
        log = self.completion_logs[self.mode]
        if not log.has_news:
            return
        log.has_news = False
        columns, step = log.columns, self.state.global_step
        print_prompt_completions_sample(
            columns["prompt"],
            columns["completion"],
            columns["rewards"],
            columns["advantages"],
            step,
            self.args.num_completions_to_print,
            extra=columns["extra"],
        )
        table = log.table(step)
        suffix = "" if self.mode == "train" else f"_{self._eval_prefix}"
        write_parquet(table, self.completions_folder / f"completions{suffix}_{step:05d}.parquet")
        if self._start_uploads is not None:  # not before, when the tables of an earlier run may be in the folder
            self._hub_uploads, self._start_uploads = self._start_uploads(), None
        log_to_trackers(self.args.report_to, table, self.args.log_unique_prompts, list(columns["images"]))

    def floating_point_ops(self, inputs: Any) -> int:
        """Six operations per weight and token, forward and backward."""
        rows = inputs["update"].batch.to_dict() if "update" in inputs else inputs
        if "completion_mask" not in rows:
            return 0
        tokens = int(rows["prompt_mask"].sum() + rows["completion_mask"].sum())
        return 6 * tokens * self._num_weights

    @cached_property
    def _num_weights(self) -> int:
        return sum(shape_of(parameter).numel() for parameter in self.model.parameters())

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Do nothing: prompts and completions are counted when they are sampled."""

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write README.md into the output folder."""
        if not self.is_world_process_zero():
            return
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        name = model_name or Path(self.args.output_dir).name
        card = model_card(
            algorithm=self.algorithm,
            name=name,
            model_id=self.hub_model_id or name,
            base_model=hub_name(self.model),
            dataset=dataset_name,
            tags=["gruppo", self.algorithm, *tags],
            args=self.args,
        )
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "README.md", card.encode(), durable=False)

    # ---- the hub

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Trainer's method; a repository that exists and is public does not pass for a private one."""
        given = {"token": token, "private": private}
        super().init_hf_repo(**{name: value for name, value in given.items() if value is not None})
        if self.is_world_process_zero() and (self.args.hub_private_repo if private is None else private):
            hub.require_private(self.hub_model_id, "model", token or self.args.hub_token, "hub_model_id")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Trainer's method, but without the record of the run unless `hub_record` asks for it."""
        args, token = self.args, token or self.args.hub_token
        self.callback_handler.on_push_begin(args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        tags = kwargs.pop("tags", None) or []
        kwargs["tags"] = [*([tags] if isinstance(tags, str) else tags), *(self.model.model_tags or [])]
        kwargs.setdefault("model_name", (args.hub_model_id or str(Path(args.output_dir).absolute())).split("/")[-1])
        self.create_model_card(**kwargs)
        self._finish_current_push()
        revision = revision or args.hub_revision
        return hub.push_folder(
            args, self.hub_model_id, message=commit_message, token=token, revision=revision, wait=blocking
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Trainer's method, with the same difference."""
        args, folder = self.args, Path(checkpoint_folder)
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        under_way = None if self.push_in_progress is None or self.push_in_progress.is_done() else self.push_in_progress
        if under_way is not None and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        jobs = hub.push_checkpoint(args, self.hub_model_id, folder, self.processing_class, message)
        if under_way is None:
            self.push_in_progress = PushInProgress(jobs)
        else:
            under_way.jobs.extend(jobs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Trainer's method, which would store `hub_token` and other secrets beside the weights."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            hub.write_settings(self.args, Path(output_dir or self.args.output_dir))
