"""Which prompts a run sees, and when."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from gruppo.data.sampler import RepeatSampler, eval_loader, micro_step_loader, split_for_rank
from gruppo.data.streams import IterableStream, PromptCursor, SampledStream
from gruppo.errors import ConfigError
from gruppo.trainer.collect.ahead import next_generation
from gruppo.trainer.reporting import Reporting


class Feeding(Reporting):
    """The part of the trainer that supplies prompts: streams and loaders."""

    def rows_of(self, generation: int, *, anew: bool = False) -> Sequence[Mapping[str, Any]]:
        """This process's rows of a generation of the current epoch; `anew`: the run was resumed inside it."""
        stream, args = self._stream, self.args
        assert stream is not None
        if self._cursor is None:
            if not anew:
                self._enter(range(self._first_position(generation), self._first_position(generation + 1)))
            return stream.rows(self._epoch, generation)
        # The position is for a cursor without one: a checkpoint written without dynamic sampling does not store it.
        self._cursor.begin(self._first_position(generation), anew=anew)
        places = split_for_rank(range(args.generation_batch_size), args.process_index, args.world_size)
        return self.take_prompts(range(stream.prompts), places, anew=anew)

    def rows_ahead(self, epoch: int, generation: int) -> Sequence[Mapping[str, Any]]:
        """The rows that a later generation will have if nothing changes until then; they do not count as taken."""
        stream, args = self._stream, self.args
        assert stream is not None
        if self._cursor is None:
            return stream.rows(epoch, generation)
        places = split_for_rank(range(args.generation_batch_size), args.process_index, args.world_size)
        return self._cursor.peek(range(stream.prompts), places)

    def place_after(self, epoch: int, generation: int) -> tuple[int, int] | None:
        """Epoch and number of the generation after this one; None if the run ends before it."""
        if self._stream is None:
            raise ConfigError(
                f"async_rollouts={self.args.async_rollouts} needs the trainer's own order of prompts, but "
                f"{type(self).__name__} has its own data loader. Set async_rollouts=0."
            )
        return next_generation(
            epoch,
            generation,
            per_epoch=self._stream.generations,
            micro_steps=self.args.micro_steps_per_generation,
            accumulation=self.args.gradient_accumulation_steps,
            updates_left=self.state.max_steps - self.state.global_step,
        )

    def _first_position(self, generation: int) -> int:
        """Where a generation of the current epoch begins in the sequence of the prompts of all epochs."""
        stream = self._stream
        assert stream is not None
        return (self._epoch * (stream.generations or 0) + generation) * stream.prompts

    def take_prompts(self, groups: Sequence[int], places: Sequence[int], *, anew: bool = False) -> Sequence[Any]:
        """The next prompts, one per group, as the rows at `places` in the batch of all processes."""
        cursor = self.prompt_cursor
        taken = cursor.upcoming(len(groups))
        rows = cursor.take(groups, places)
        if not anew:
            self._enter(taken)
        return rows

    def _enter(self, positions: range) -> None:
        """Report prompts to the audits as taken; those of an endless stream have no index and are only counted."""
        assert self._stream is not None
        self.audits.took([self._stream.index(position) or (0, position) for position in positions])

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
        return self._cursor.consumed / (self._stream.generations * self._stream.prompts)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if (consumed := self.epochs_consumed) is not None:
            self.state.epoch = consumed  # replaced prompts count, too
        super().log(logs, start_time)

    def _count_epoch(self, epoch_iterator: Any) -> None:
        """Count epochs by their iterators: Trainer does not pass the epoch, and an epoch may be stopped early."""
        if epoch_iterator is self._epoch_iterator:
            return
        steps = self._micro_steps_per_epoch
        if self._epoch_iterator is not None:
            self._epoch += 1
        elif steps is None:
            self._epoch = 0
        else:  # the first of this run, which may have been resumed
            self._epoch = int(self.state.global_step) // math.ceil(steps / self.args.gradient_accumulation_steps)
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
        return micro_step_loader(self._micro_steps_per_epoch)

    @property
    def _micro_steps_per_epoch(self) -> int | None:
        generations = None if self._stream is None else self._stream.generations
        return None if generations is None else generations * self.args.micro_steps_per_generation

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
