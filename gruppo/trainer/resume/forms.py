"""What the JSON of a checkpoint may hold. It can come from a stranger: all of it is checked before it is used.

check(values, RUN_STATE, "run_state-00000.json")      CheckpointError: "…: loop.last_logged is '7', not a whole …"
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from typing import Any

from transformers import TrainerControl, TrainerState

from gruppo.audit.chance import Duplicates, Surprise
from gruppo.errors import CheckpointError

__all__ = ["CHANGEABLE", "COURSE", "ENTROPY", "GENERATION", "POSITION", "RUN_STATE", "TRAINER_STATE", "check"]

Form = Callable[[Any, str], None]  # raises _MisfitError for a value, given the place where it was found

LARGEST = 2**53  # of whole numbers, which must be exact as floats too
DEEPEST = 30
COLDEST = 1e-9
MOST_ROWS, MOST_TOKENS = 2**16, 2**40


class _MisfitError(Exception):
    pass


def check(value: Any, form: Form, what: str) -> None:
    """Raise CheckpointError if a value does not have the form."""
    try:
        form(value, "")
    except _MisfitError as misfit:
        raise CheckpointError(
            f"{what}{misfit}. It is damaged, or was not written by gruppo: resume from another one."
        ) from None


def _refuse(value: Any, place: str, wanted: str) -> None:
    shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:60]
    raise _MisfitError(f": {place.removeprefix('.') or 'its content'} is {shown}, not {wanted}")


def number(low: float = -math.inf, high: float = math.inf, *, finite: bool = True) -> Form:
    def form(value: Any, place: str) -> None:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or (isinstance(value, int) and abs(value) > 2**63):
            _refuse(value, place, "a number")
        if not (low <= value <= high or (math.isnan(value) and not finite)) or (finite and not math.isfinite(value)):
            _refuse(value, place, f"a number from {low} to {high}")

    return form


def whole(low: int = 0, high: int = LARGEST) -> Form:
    def form(value: Any, place: str) -> None:
        if type(value) is not int or not low <= value <= high:
            _refuse(value, place, f"a whole number from {low} to {high}")

    return form


def flag(value: Any, place: str) -> None:
    if not isinstance(value, bool):
        _refuse(value, place, "true or false")


def text(value: Any, place: str) -> None:
    if not isinstance(value, str):
        _refuse(value, place, "text")


def anything(value: Any, place: str, depth: int = DEEPEST) -> None:
    """Any value that is not nested without end."""
    if depth == 0:
        _refuse(value, place[:60], "nested so deep")
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        anything(item, f"{place}.{key}", depth - 1)


def maybe(inner: Form) -> Form:
    return lambda value, place: None if value is None else inner(value, place)


def either(first: Form, second: Form) -> Form:
    def form(value: Any, place: str) -> None:
        try:
            first(value, place)
        except _MisfitError:
            second(value, place)

    return form


def listed(inner: Form, *, length: int | None = None) -> Form:
    def form(value: Any, place: str) -> None:
        if not isinstance(value, list) or length not in (None, len(value)):
            _refuse(value, place, "a list" if length is None else f"a list of {length}")
        for i, item in enumerate(value):
            inner(item, f"{place}.{i}")

    return form


def mapped(inner: Form) -> Form:
    """Any names, all with values of one form."""

    def form(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, place, "a mapping")
        for name, item in value.items():
            inner(item, f"{place}.{name}")

    return form


def fields(needed: Mapping[str, Form], further: Mapping[str, Form] | None = None, *, closed: bool = False) -> Form:
    """These names, those of `further` only where they are given. Others are not looked at, or refused if `closed`."""
    optional = further or {}

    def form(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, place, "a mapping")
        if missing := [name for name in needed if name not in value]:
            raise _MisfitError(f": {f'{place}.{missing[0]}'.removeprefix('.')} is missing")
        for name, item in value.items():
            inner = needed.get(name) or optional.get(name)
            if inner is not None:
                inner(item, f"{place}.{name}")
            elif closed:
                _refuse(name, place, f"one of {', '.join([*needed, *optional])}")

    return form


def _failed_of(value: Any, place: str) -> None:
    """How many rewards failed, and of how many."""
    listed(whole(), length=2)(value, place)
    if value[0] > value[1]:
        _refuse(value[0], f"{place}.0", f"at most {value[1]}, the number of all")


def _request(value: Any, place: str) -> None:
    """How many completions, the key of their random numbers, and the number of the first."""
    listed(maybe(whole(0, 2**64)), length=3)(value, place)
    for i in (0, 2):
        whole(1 - i // 2, MOST_ROWS)(value[i], f"{place}.{i}")


# ---- the files

_COUNT = whole()
_SHARE = maybe(number(0, 1))

# What a callback may change during a run, as attributes of the trainer and of its generation_config.
CHANGEABLE: dict[str, Form] = {
    **dict.fromkeys(("beta", "epsilon_low", "epsilon_high"), number(0)),
    "temperature": number(COLDEST),
}
GENERATION: dict[str, Form] = {
    "temperature": maybe(number(COLDEST)),
    "repetition_penalty": maybe(number(1e-6, 1e6)),
    "max_new_tokens": maybe(whole(1, 2**20)),
    "min_new_tokens": maybe(whole(0, 2**20)),
    **dict.fromkeys(("top_k", "no_repeat_ngram_size"), maybe(whole(0, 2**31))),
    **dict.fromkeys(("top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), _SHARE),
    "do_sample": maybe(flag),
}

_ROLLOUT_PLAN = {"kv_tokens": whole(1, MOST_TOKENS), "rows": whole(1, MOST_ROWS), "prefill_tokens": whole(1, 2**20)}
_SUMS = listed(number(finite=False))
_AUDITS = fields(
    {
        "auditor": fields(dict.fromkeys(("counts", "logged"), mapped(_COUNT))),
        "run": fields(
            {
                "duplicates": listed(number(finite=False), length=len(Duplicates.BETS)),
                "surprise": fields(
                    dict.fromkeys(("colder", "hotter"), listed(number(finite=False), length=len(Surprise.BETS)))
                ),
                **dict.fromkeys(("no_end", "no_signal", "frozen"), _COUNT),
                **dict.fromkeys(("norms", "first_entropies", "first_lengths"), _SUMS),
            }
        ),
        "bad_updates": fields(dict.fromkeys(("total", "in_a_row"), _COUNT)),
        "books": fields(
            {
                **dict.fromkeys(("seen", "skipped", "repeated", "first_epoch", "closed"), _COUNT),
                **dict.fromkeys(("epochs", "ended_early"), listed(_COUNT)),
                "kept": flag,
            }
        ),
    }
)
ENTROPY = fields({"entropy_coef": number(), "last_world_entropy": number(finite=False)})
_PADDING = fields({"alone": flag, "longest": _COUNT, "padding": whole(-1)})  # what a guard against padding found
_PARTS: dict[str, Form] = {
    "rollout": fields({}, {"plan": maybe(fields(_ROLLOUT_PLAN, closed=True)), "may_grow": flag, "padding": _PADDING}),
    "padding": _PADDING,
    "update_plan": maybe(
        fields(
            {"plan": mapped(either(flag, whole(1, MOST_TOKENS)))},
            {"asked": listed(maybe(either(flag, _COUNT))), "longest": maybe(_COUNT)},
        )
    ),
    "entropy": ENTROPY,
    "metrics": mapped(_SUMS),
    "reward_counts": listed(text),
    "reward_breaker": fields({"updates": listed(_failed_of), "since": _failed_of}, {"stopped": flag}),
    "audits": _AUDITS,
    "prompts": fields(dict.fromkeys(("generation_began_at", "consumed"), _COUNT)),
}
RUN_STATE = fields(
    {
        "processes": whole(1),
        "parts": fields({}, {name: maybe(form) for name, form in _PARTS.items()}),
        "loop": fields(
            {
                **dict.fromkeys(("last_logged", "earlier_runs", "asked_elsewhere"), whole(0, 2**31)),
                "changed": fields({}, CHANGEABLE, closed=True),
                "generation": fields({}, GENERATION),
                "parity_checked_at": maybe(_COUNT),
                "reuses_engine_logps": flag,
            }
        ),
        "queue": maybe(listed(_COUNT)),
    },
    {
        "ahead": maybe(
            fields(
                {
                    "sampled_at": _COUNT,
                    "seconds": number(0),
                    "requests": listed(_request),
                    "stops": listed(text),
                    "without_logps": listed(_COUNT),
                }
            )
        )
    },
)

# Where a run was in its prompts: `gruppo.data.course.SavedCourse`.
COURSE = maybe(
    fields(
        {
            "spot": fields(dict.fromkeys(("epoch", "generation", "taken", "used"), _COUNT), closed=True),
            "batches": fields(
                dict.fromkeys(("prompts", "group_size", "slices", "micro_steps"), whole(1, MOST_ROWS)), closed=True
            ),
            "accumulation": whole(1, MOST_ROWS),
            "cursor": maybe(fields(dict.fromkeys(("generation_began_at", "consumed"), _COUNT), closed=True)),
            "available": maybe(_COUNT),
            **dict.fromkeys(("updates", "per_epoch"), _COUNT),
        },
        closed=True,
    )
)

POSITION = maybe(
    fields(
        {"run_id": maybe(text), "metrics_bytes": _COUNT, "rollouts": _COUNT},
        {"rollout_files": _COUNT, "updates": whole(1)},
    )
)

_TRAINER_NUMBERS = ("epoch", "max_steps", "logging_steps", "eval_steps", "save_steps", "num_train_epochs")
_FLAGS = fields({}, {field.name: flag for field in fields_of(TrainerControl)}, closed=True)
_CONTROL = fields({}, {"args": mapped(flag), "attributes": _FLAGS}, closed=True)
TRAINER_STATE = fields(
    {"global_step": _COUNT},
    {
        **{field.name: anything for field in fields_of(TrainerState)},
        **dict.fromkeys(_TRAINER_NUMBERS, maybe(number())),
        **dict.fromkeys(("num_input_tokens_seen", "total_flos"), number(0, finite=False)),
        "train_batch_size": maybe(whole(1, 2**31)),
        "log_history": maybe(listed(mapped(anything))),
        "best_metric": maybe(number(finite=False)),
        "best_global_step": maybe(_COUNT),
        "best_model_checkpoint": maybe(text),
        "stateful_callbacks": maybe(fields({}, {"TrainerControl": _CONTROL})),
        **dict.fromkeys(("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"), flag),
    },
    closed=True,
)
