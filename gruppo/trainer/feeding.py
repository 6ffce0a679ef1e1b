"""Which prompts a run sees, and when."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainerState

from gruppo.data.course import Batches, Course, SavedCourse, Spot, most_taken
from gruppo.data.sampler import RepeatSampler, eval_loader, micro_step_loader, split_for_rank
from gruppo.data.streams import IterableStream, PromptCursor, SampledStream
from gruppo.errors import ConfigError
from gruppo.trainer.collect.ahead import next_generation
from gruppo.trainer.reporting import Reporting
from gruppo.trainer.resume.loaded import reading
from gruppo.trainer.resume.state import read_course, updates_of


class Feeding(Reporting):
    """The part of the trainer that supplies prompts: streams and loaders."""

    def rows_of(self, generation: int, *, anew: bool = False) -> Sequence[Mapping[str, Any]]:
        """This process's rows of a generation of the current epoch; `anew`: the run was resumed inside it."""
        stream, args = self._stream, self.args
        assert stream is not None
        assert self._course is not None
        first = self._course.first(self._epoch, generation)
        if self._cursor is None:
            if not anew:
                self.audits.took(stream.indices(self._epoch, first))
            return stream.rows(self._epoch, first)
        # The position is for a cursor without one: a checkpoint written without dynamic sampling does not store it.
        self._cursor.begin(self._epoch * stream.per_epoch + first, anew=anew)
        places = split_for_rank(range(args.generation_batch_size), args.process_index, args.world_size)
        return self.take_prompts(range(stream.prompts), places, anew=anew)

    def rows_ahead(self, epoch: int, generation: int) -> Sequence[Mapping[str, Any]]:
        """The rows that a later generation will have if nothing changes until then; they do not count as taken."""
        stream, args = self._stream, self.args
        assert stream is not None
        assert self._course is not None
        if self._cursor is None:
            return stream.rows(epoch, self._course.first(epoch, generation))
        places = split_for_rank(range(args.generation_batch_size), args.process_index, args.world_size)
        return self._cursor.peek(range(stream.prompts), places)

    def place_after(self, epoch: int, generation: int) -> tuple[int, int] | None:
        """Epoch and number of the generation after this one; None if the run ends before it."""
        if self._course is None:
            raise ConfigError(
                f"async_rollouts={self.args.async_rollouts} needs the trainer's own order of prompts, but "
                f"{type(self).__name__} has its own data loader. Set async_rollouts=0."
            )
        return next_generation(
            epoch,
            generation,
            begins=self._course.begins(epoch, generation),
            steps=self._course.steps(epoch),
            micro_steps=self.args.micro_steps_per_generation,
            accumulation=self.args.gradient_accumulation_steps,
            updates_left=self.state.max_steps - self.state.global_step,
        )

    def take_prompts(self, groups: Sequence[int], places: Sequence[int], *, anew: bool = False) -> Sequence[Any]:
        """The next prompts, one per group, as the rows at `places` in the batch of all processes."""
        cursor = self.prompt_cursor
        taken = cursor.upcoming(len(groups))
        rows = cursor.take(groups, places)
        if not anew:
            self.audits.took([cursor.stream.index(position) for position in taken])
        return rows

    @property
    def prompt_cursor(self) -> PromptCursor:
        """The source of replacement prompts."""
        if self._cursor is None:
            raise ConfigError(
                "dynamic_sampling=True replaces prompts with the next ones in the trainer's own order, but "
                f"{type(self).__name__} has its own data loader. Set dynamic_sampling=False, or override "
                "`_get_train_sampler` instead of `get_train_dataloader`."
            )
        return self._cursor

    @property
    def epochs_consumed(self) -> float | None:
        """Passes through the prompts so far, with replaced ones; None for an endless stream or without a cursor."""
        if self._stream is None or self._cursor is None or self._stream.generations is None:
            return None
        return self._cursor.consumed / self._stream.per_epoch

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if (consumed := self.epochs_consumed) is not None:
            self.state.epoch = consumed  # replaced prompts count, too
        super().log(logs, start_time)

    def _count_epoch(self, epoch_iterator: Any) -> None:
        """Count epochs by their iterators: Trainer does not pass the epoch, and an epoch may be stopped early."""
        if epoch_iterator is self._epoch_iterator:
            return
        if self._epoch_iterator is not None:
            self._epoch += 1
        else:  # the first of this run, which may have been resumed
            self._epoch = 0 if self._course is None else self._course.began.epoch
        if self._course is not None:
            self._course.enter(self._epoch)
        self._epoch_iterator = epoch_iterator

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        args = self.args
        return RepeatSampler(
            self.train_dataset if dataset is None else dataset,
            mini_repeat_count=args.num_generations,
            batch_size=args.prompts_per_generation,
            repeat_count=args.micro_steps_per_generation,
            shuffle=bool(args.shuffle_dataset),
            seed=args.seed if args.data_seed is None else args.data_seed,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return RepeatSampler(eval_dataset, mini_repeat_count=self.args.eval_group_size, seed=self.args.seed)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader of micro-step numbers; the prompts themselves come from a stream that knows epoch and position."""
        args = self.args
        dataset = self._keep_columns(self.train_dataset)
        place = {"group_size": args.num_generations, "rank": args.process_index, "world": args.world_size}
        if isinstance(dataset, IterableDataset):
            if args.shuffle_dataset:
                dataset = dataset.shuffle(seed=args.seed if args.data_seed is None else args.data_seed)
            prompts = args.prompts_per_generation
            self._stream = IterableStream(dataset, prompts=prompts, **place)
        else:
            sampler = self._get_train_sampler(dataset)
            self._stream = SampledStream(
                dataset,
                sampler,
                rows_per_generation=args.generation_batch_size,
                copies=args.micro_steps_per_generation,
                **place,
            )
            if type(sampler) is RepeatSampler:  # other samplers may repeat or skip prompts on purpose
                self.audits.keep_books(len(dataset), left_over=len(dataset) % self._stream.prompts)
        self._cursor = PromptCursor(self._stream, args.num_generations) if args.dynamic_sampling else None
        self._course = Course(
            Batches(
                prompts=self._stream.prompts,
                group_size=args.num_generations,
                slices=args.steps_per_generation,
                micro_steps=args.micro_steps_per_generation,
            ),
            self._stream.available,
        )
        return micro_step_loader(self._course.whole)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Trainer's method; a run resumed with other batches has as many updates as its remaining prompts need."""
        values = super().set_initial_training_values(args, dataloader)
        self._saved_course = None
        if self._course is None or self._random_state_due is None or args.ignore_data_skip:
            return values
        folder = Path(self._random_state_due)
        self._saved_course = saved = read_course(folder, self._most_taken(folder))
        if saved is None:
            return values
        if saved.cursor is not None and self._stream is not None and saved.available == self._stream.available:
            self._stream.per_epoch = saved.per_epoch  # in their order positions stay what they are
        if self._course.whole is None or not self._goes_otherwise(saved):
            return values
        self._resume_course(saved, 0)
        epochs, updates = self._course.length(
            saved.updates,
            accumulation=args.gradient_accumulation_steps,
            epochs=args.num_train_epochs,
            max_steps=args.max_steps,
        )
        return (epochs, *values[1:-1], updates)

    def _most_taken(self, folder: Path) -> int:
        """More prompts than the run of a checkpoint can have taken."""
        assert self._course is not None
        return most_taken(
            updates_of(folder),
            self._course.batches,
            accumulation=self.args.gradient_accumulation_steps,
            rounds=self.args.max_resample_rounds,
            per_epoch=self._course.available or 0,
        )

    def _goes_otherwise(self, saved: SavedCourse) -> bool:
        """Whether this run takes other prompts in an update than that of the checkpoint."""
        assert self._course is not None
        batches = (self._course.batches, self.args.gradient_accumulation_steps, self._cursor is None)
        return batches != (saved.batches, saved.accumulation, saved.cursor is None)

    def _resume_course(self, saved: SavedCourse, step: int) -> None:
        assert self._course is not None
        spot = saved.spot_for(self._course.batches, has_cursor=self._cursor is not None)
        self._course.resume(spot, step, self.args.gradient_accumulation_steps)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Trainer's method: the epoch, and how many of its micro-steps are skipped."""
        epoch, step = self._trainer_state(*args, **kwargs)
        course = self._course
        if course is None:
            return epoch, step
        if self._saved_course is None:
            generation, used = divmod(step, course.batches.micro_steps)
            course.resume(Spot(epoch, generation, generation * course.batches.prompts, used), step, 1)
            return epoch, step
        self._resume_course(self._saved_course, step)
        return (epoch if course.whole is None else course.began.epoch), course.resumed_at

    def _trainer_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        if self._random_state_due is None:
            return super()._init_training_state(max_steps, *args, **kwargs)
        with reading("state of the trainer", Path(self._random_state_due)):
            found: tuple[int, int] = super()._init_training_state(max_steps, *args, **kwargs)
        own = TrainerState()
        own.compute_steps(self.args, max_steps)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if not (getattr(self.state, name) or 0) > 0:  # nothing can be done every so many updates
                setattr(self.state, name, getattr(own, name))
        return found

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's method; an epoch in which other batches begin may be shorter by a part of an update."""
        steps = None if self._course is None else self._course.steps(kwargs["epoch"])
        if steps is not None and steps != kwargs["steps_in_epoch"]:
            updates = math.ceil(steps / self.args.gradient_accumulation_steps)
            kwargs |= {"steps_in_epoch": steps, "num_update_steps_per_epoch": updates}
        super()._run_epoch(*args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Batches of rows, this process's share, each prompt repeated once per completion."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("Evaluation needs an eval_dataset.")
        dataset = self._keep_columns(dataset)
        args, group = self.args, self.args.eval_group_size
        return eval_loader(
            dataset,
            None if isinstance(dataset, IterableDataset) else self._get_eval_sampler(dataset),
            group_size=group,
            rows_per_batch=max(args.per_device_eval_batch_size * args.world_size // group, 1) * group,
            rank=args.process_index,
            world=args.world_size,
        )

    def _keep_columns(self, dataset: Any) -> Any:
        if not self.args.remove_unused_columns:
            return dataset
        # A stream may not know its columns; then only `prompt`, which it must have, is kept.
        known = dataset.column_names or ["prompt"]
        return dataset.select_columns([column for column in ("prompt", "image", "images") if column in known])

    def num_examples(self, dataloader: Any) -> int:
        """The number of prompts, not of micro-steps."""
        return len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else super().num_examples(dataloader)
