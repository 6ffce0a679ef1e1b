"""Tables of completions: on the console, as parquet, in wandb and trackio."""

import json
import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gruppo.runs.lines import write_file
from gruppo.runs.links import no_link
from gruppo.trainer.display.console import printing


class CompletionLog:
    """The newest rows of one mode (train or eval): prompt, completion, rewards, advantage, extra columns."""

    def __init__(self, capacity: int):
        def column() -> deque[Any]:
            return deque(maxlen=capacity)

        self.columns: dict[str, Any] = {
            "prompt": column(),
            "completion": column(),
            "rewards": defaultdict(column),
            "advantages": column(),
            "extra": defaultdict(column),
            "images": column(),
        }
        self.has_news = False  # rows that were not shown yet

    def __len__(self) -> int:
        return len(self.columns["prompt"])

    def extend(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        rewards: Mapping[str, Sequence[float]],
        advantages: Sequence[float],
        extra: Mapping[str, Sequence[Any]],
        images: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        known = len(self)
        self.has_news = True
        self.columns["prompt"].extend(prompts)
        self.columns["completion"].extend(completions)
        self.columns["advantages"].extend(advantages)
        self.columns["images"].extend([[]] * len(prompts) if images is None else images)
        for name, values in rewards.items():
            self.columns["rewards"][name].extend(values)
        for name in sorted({*extra, *self.columns["extra"]}):
            if name not in self.columns["extra"]:
                self.columns["extra"][name].extend([None] * known)  # earlier rows did not have this column
            self.columns["extra"][name].extend(extra.get(name, [None] * len(prompts)))

    def table(self, step: int) -> dict[str, list[Any]]:
        """The rows as columns: step, prompt, completion, one per reward, extra ones, advantage."""
        return {
            "step": [step] * len(self),
            "prompt": list(self.columns["prompt"]),
            "completion": list(self.columns["completion"]),
            **{name: list(values) for name, values in self.columns["rewards"].items()},
            **{name: list(values) for name, values in self.columns["extra"].items()},
            "advantage": list(self.columns["advantages"]),
        }


def show_message(message: Any) -> str:
    """A message as a person reads it: role, content, tool calls as name(arg=value)."""
    if isinstance(message, str):
        return message
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join("[IMAGE]" if part.get("type") == "image" else part.get("text", "") for part in content)
    lines = [str(message["role"]).upper(), content]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        shown = arguments if isinstance(arguments, str) else ", ".join(f"{k}={v!r}" for k, v in arguments.items())
        lines.append(f"{function.get('name')}({shown})")
    return "\n".join(line for line in lines if line)


def _cell(value: Any) -> Text:
    if isinstance(value, list | tuple):
        return Text("\n\n".join(show_message(message) for message in value))
    if isinstance(value, float):
        return Text(f"{value:.2f}")
    # Text, not markup: a completion may contain square brackets.
    return Text(str(value))


def print_prompt_completions_sample(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rewards: Mapping[str, Sequence[float]],
    advantages: Sequence[float],
    step: int,
    num_samples: int | None = None,
    extra: Mapping[str, Sequence[Any]] | None = None,
    console: Console | None = None,
) -> None:
    """Print a table of prompts and completions; a random sample of `num_samples` of them if given."""
    chosen = list(range(len(prompts)))
    if num_samples is not None:
        if num_samples <= 0:
            return
        # A separate random generator: displaying a run must not change it.
        chosen = sorted(random.Random(step).sample(chosen, min(num_samples, len(chosen))))
    table = Table(show_header=True, header_style="bold", expand=True)
    given = {"Prompt": prompts, "Completion": completions, **rewards, "Advantage": advantages, **(extra or {})}
    columns = {name: list(values) for name, values in given.items()}
    for name in columns:
        table.add_column(Text(name), justify="left" if name in ("Prompt", "Completion") else "right")
    for i in chosen:
        table.add_row(*(_cell(values[i]) for values in columns.values()))
        table.add_section()
    printing(console or Console()).print(Panel(table, title=f"Step {step}", border_style="bold white"))


def write_parquet(table: Mapping[str, Sequence[Any]], path: Path) -> None:
    """Write columns to a parquet file; columns that it cannot hold (messages of unequal form) become JSON text."""
    no_link(path.parent).mkdir(parents=True, exist_ok=True)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: _column(list(values)) for name, values in table.items()}), sink)
    write_file(path, sink.getvalue(), durable=False)


def _column(values: list[Any]) -> pa.Array:
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return pa.array([None if value is None else _as_text(value) for value in values])
    if _has_empty_struct(column.type):
        return pa.array([None if value is None else _as_text(value) for value in values])
    return column


def _has_empty_struct(kind: pa.DataType) -> bool:
    """Whether a type contains a struct without fields (an empty dict), which parquet cannot hold."""
    children = [kind.field(i).type for i in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not children) or any(map(_has_empty_struct, children))


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates are not valid UTF-8


def log_to_trackers(
    trackers: Sequence[str],
    table: Mapping[str, Sequence[Any]],
    unique_prompts: bool,
    images: Sequence[Sequence[Any]] = (),
) -> None:
    """Send the table to wandb (if a run is active) and trackio, as `completions`; with a column `image` if needed."""
    if not {"wandb", "trackio"} & set(trackers):
        return
    import pandas as pd

    frame = pd.DataFrame(table)
    for name in ("prompt", "completion"):
        frame[name] = [v if isinstance(v, str) else "\n\n".join(map(show_message, v)) for v in frame[name]]
    pictures = list(images) if any(images) else []
    if unique_prompts:
        kept = ~frame.duplicated(subset=["prompt"])
        frame, pictures = frame[kept], [row for row, keep in zip(pictures, kept, strict=False) if keep]
    if "wandb" in trackers:
        import wandb

        if wandb.run is not None:
            wandb.log({"completions": wandb.Table(dataframe=_with_images(frame, pictures, wandb))})
    if "trackio" in trackers:
        import trackio

        trackio.log({"completions": trackio.Table(dataframe=_with_images(frame, pictures, trackio))})


def _with_images(frame: Any, images: Sequence[Sequence[Any]], tracker: Any) -> Any:
    """The frame with a column `image`: the tracker's image object, or a list of them for rows with several."""
    if not images:
        return frame
    shown = [[tracker.Image(image) for image in row] for row in images]
    return frame.assign(image=[row[0] if len(row) == 1 else row or None for row in shown])
