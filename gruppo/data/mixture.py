"""Several datasets joined into one."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

    from gruppo.config.script import DatasetConfig, DatasetMixtureConfig

__all__ = ["get_dataset"]

# Selects the same rows in every process and run, independent of random numbers drawn before.
SPLIT_SEED = 42


def get_dataset(mixture_config: "DatasetMixtureConfig") -> "DatasetDict | IterableDatasetDict":
    """Load the datasets of a mixture and join them, in order, as split `train` (and `test` with `test_split_size`).

    With `fraction`, as many rows as possible are taken without repeating any: the fractions are normalised, and the
    first rows of each dataset are kept. Fractions 0.5 and 0.5 of 10 and 4 rows give 4 + 4.
    """
    from datasets import DatasetDict, IterableDatasetDict, concatenate_datasets

    _check(mixture_config)
    parts = [_load(entry, mixture_config.streaming) for entry in mixture_config.datasets]
    fractions = [entry.fraction for entry in mixture_config.datasets if entry.fraction is not None]
    if fractions:
        _check_rows(mixture_config.datasets, parts)
        counts = _rows_to_keep([len(part) for part in parts], fractions)
        parts = [part.select(range(count)) for part, count in zip(parts, counts, strict=True) if count]
    joined = concatenate_datasets([_plain_strings(part) for part in parts] if len(parts) > 1 else parts)
    if mixture_config.streaming:
        return IterableDatasetDict({"train": joined})
    if mixture_config.test_split_size is None:
        return DatasetDict({"train": joined})
    size = mixture_config.test_split_size
    # A number of rows from the command line is a float, which `datasets` would interpret as a share.
    return joined.train_test_split(test_size=int(size) if size >= 1 else size, seed=SPLIT_SEED)


def _check(config: "DatasetMixtureConfig") -> None:
    if not config.datasets:
        raise ConfigError("`datasets` is empty; list at least one dataset with its `path`.")
    with_fraction = [entry.fraction is not None for entry in config.datasets]
    if any(with_fraction) and not all(with_fraction):
        missing = [entry.path for entry in config.datasets if entry.fraction is None]
        raise ConfigError(f"`fraction` is set for some datasets but not for {missing}; set it for all or for none.")
    if any(with_fraction) and not any(entry.fraction for entry in config.datasets):
        raise ConfigError("every `fraction` is 0; give at least one dataset a positive share.")
    if config.streaming and any(with_fraction):
        raise ConfigError("`fraction` needs the number of rows, which is unknown for a stream; set streaming=False.")
    if config.streaming and config.test_split_size is not None:
        raise ConfigError(f"test_split_size={config.test_split_size} cannot split a stream; set streaming=False.")


def _check_rows(entries: "list[DatasetConfig]", parts: list[Any]) -> None:
    empty = [entry.path for entry, part in zip(entries, parts, strict=True) if entry.fraction and not len(part)]
    if empty:
        raise DataError(
            f"{empty} has no rows, so its `fraction` leaves no rows of the other datasets either. Remove it."
        )


def _load(entry: "DatasetConfig", streaming: bool) -> Any:
    from datasets import load_dataset

    if _is_saved(Path(entry.path)):
        dataset = _load_saved(entry, streaming)
    else:
        dataset = load_dataset(
            path=entry.path,
            name=entry.name,
            data_dir=entry.data_dir,
            data_files=entry.data_files,
            split=entry.split,
            streaming=streaming,
        )
    return dataset if entry.columns is None else dataset.select_columns(entry.columns)


def _plain_strings(part: Any) -> Any:
    """Cast large_string columns to string: CSV files use that type, and it cannot be joined with the usual one."""
    from datasets import Value

    large = [name for name, kind in (part.features or {}).items() if kind == Value("large_string")]
    for name in large:
        part = part.cast_column(name, Value("string"))
    return part


def _is_saved(folder: Path) -> bool:
    """Whether the folder was written by `save_to_disk` of a dataset or of a dict of splits."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _load_saved(entry: "DatasetConfig", streaming: bool) -> Any:
    from datasets import Dataset, load_from_disk

    found: Any = load_from_disk(entry.path)
    if not isinstance(found, Dataset):
        if entry.split not in found:
            raise DataError(f"{entry.path} has no split {entry.split!r}; it has {', '.join(found)}.")
        found = found[entry.split]
    return found.to_iterable_dataset() if streaming else found


def _rows_to_keep(sizes: list[int], fractions: list[float]) -> list[int]:
    """The largest number of rows per dataset whose proportions equal the fractions.

    Example:
        _rows_to_keep([10, 4], [0.75, 0.25]) == [10, 3]
    """
    total = min(size * sum(fractions) / fraction for size, fraction in zip(sizes, fractions, strict=True) if fraction)
    # The small term compensates for rounding: 4 / 0.3 · 0.3 may come out just below 4.
    return [int(total * fraction / sum(fractions) + 1e-9) for fraction in fractions]
