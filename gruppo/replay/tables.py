"""A replay as tables for a terminal. Text written by models is shown without control characters."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gruppo.replay.run import Replay

__all__ = ["tables"]

SHOWN = 60  # characters shown of a prompt or a completion


def tables(found: Replay) -> Group:
    """All tables and notes of a replay."""
    return Group(*_parts(found))


def _parts(found: Replay) -> Iterator[RenderableType]:
    if found.rescored is not None:
        yield _rescored(found.rescored)
        if found.rescored["most_changed"]:
            yield _most_changed(found.rescored["most_changed"])
    yield Text(f"first: {found.first}" if found.second is None else f"first: {found.first}\nsecond: {found.second}")
    yield _updates(found)
    if found.second is not None:
        yield _lengths(found)
    if found.weights:
        yield _weights(found)
    for note in found.notes:
        yield Text(f"Note: {note}")


def _rescored(said: dict[str, Any]) -> Table:
    table = Table("rewards, before and now", "")
    tau = said["rank_correlation"]
    rows = [
        ("mean reward", f"{said['mean_before']:.4f} → {said['mean_after']:.4f}"),
        ("completions with the same reward", f"{said['agreement']:.1%} of {said['rows']:,}"),
        ("completions that have a number in only one of them", f"{said['rows_without_a_number']:,}"),
        ("groups that gain spread", f"{said['spread_appears']:,} of {said['groups']:,}"),
        ("groups that lose spread", f"{said['spread_disappears']:,} of {said['groups']:,}"),
        (f"rank correlation within groups (τ-b, {said['groups_correlated']:,} groups)", _number(tau, ".3f")),
        ("mean change of the advantage", f"{said['mean_advantage_change']:.4f}"),
        ("advantages that change sign", f"{said['advantage_sign_flips']:,}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _most_changed(entries: list[dict[str, Any]]) -> Table:
    table = Table("generation, row")
    for name in ("before", "now"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("prompt", "completion"):
        table.add_column(name)
    for entry in entries:
        numbers = (f"{entry['generation']}, {entry['row']}", f"{entry['before']:.3g}", f"{entry['after']:.3g}")
        table.add_row(*numbers, _safe(entry["prompt"]), _safe(entry["completion"]))
    return table


def _updates(found: Replay) -> Table:
    compared = found.second is not None
    rows = []
    for update in found.updates:
        cells = [str(update["update"]), str(update["rows"])]
        if compared:
            cells += [_number(update["loss"]), _number(update["second_loss"]), _number(update["cosine"], ".4f")]
            cells += [_number(update["norm_ratio"], ".4f"), f"{update['sign_disagreement']:.1%}"]
        else:
            clipped = update["metrics"].get("clip_ratio/region_mean")
            cells += [_number(update["recorded_loss"]), _number(update["loss"])]
            cells += [_number(update["loss_difference"], ".1e"), _number(clipped, ".2%")]
        rows.append(cells)
    alone, two = ("recorded loss", "replayed loss", "difference", "clipped"), ("cosine", "norm ratio", "signs differ")
    return _of_numbers(["update", "rows", *(("first loss", "second loss", *two) if compared else alone)], rows)


def _lengths(found: Replay) -> Table:
    """The share of the gradient by completion length, averaged over updates."""
    table = Table("share of the gradient", "shortest quarter", "second", "third", "longest quarter")
    for name, key in (("first", "length_shares"), ("second", "second_length_shares")):
        columns = zip(*(update[key] for update in found.updates), strict=True)
        table.add_row(name, *(f"{sum(column) / len(column):.1%}" for column in columns))
    return table


def _weights(found: Replay) -> Table:
    rows = [
        [
            f"{entry['update']}, {entry['group']} of generation {entry['generation']}",
            _number(entry["gradient_norm"]),
            _number(entry.get("cosine"), ".4f"),
            _number(entry.get("norm_ratio"), ".4f"),
            _number(entry["logp_difference"], ".1e"),
        ]
        for entry in found.weights
    ]
    names = ["gradients of weights: update, group", "norm", "cosine", "norm ratio", "log-probs differ by"]
    return _of_numbers(names, rows)


def _of_numbers(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose cells are not wrapped on a narrow terminal; only its headers are."""
    table = Table()
    for name, cells in zip(names, zip(*rows, strict=True), strict=True):
        table.add_column(name, justify="right", min_width=max(map(len, cells)))
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None, form: str = ".4g") -> str:
    return "–" if value is None or value != value else format(value, form)


def _safe(text: str) -> Text:
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 2]} …"
    return Text("".join(letter if letter.isprintable() else "·" for letter in shown))
