"""A run folder with one of everything that the viewer shows, written by the recorder."""

import math
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gruppo.demo import model_path
from gruppo.runs import RolloutRow, RunRecorder, prompt_id
from gruppo.view.folders import find_folders
from gruppo.view.queries import Desk

UPDATES, GROUP = 4, 4
TOOL_CONVERSATION = [
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "name": "add", "content": "{'error': 'b is missing'}"},
    {"role": "assistant", "content": "I give up."},
]

SCRIPT = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'></script><b>bold</b>"
HUGE_LINE = "x" * 300_000
CONTROLS = "a\x00b\x1b[31mred\x07\x08\x7f\x9b\u2028end"
BIDI = "\u202egnp.exe\u202c and \u2066isolated\u2069"
RIGHT_TO_LEFT = "مرحبا بالعالم 123 שלום"
UNSEEN = "\u00ad\u034f\u115f\u180e\u200b\u200c\u200d\u2060\u2800\u3164\ufe0f\ufeff\uffa0\ufff9\U000e0041\U000e0100"
EMOJI = "👩\u200d💻 ❤\ufe0f 1\ufe0f\u20e3 👍🏽"  # joiners and selectors that are part of an emoji
HOSTILE = [SCRIPT, HUGE_LINE, CONTROLS, BIDI, RIGHT_TO_LEFT, "</textarea></style>{{7*7}}${7*7}", UNSEEN, EMOJI]
ODD_NAME = f"evil{BIDI}{UNSEEN}<b>מ"
LONG = 4600  # tokens: more than the page shows at once


def tokenizer_text() -> str:
    return (Path(model_path()) / "tokenizer.json").read_text(encoding="utf-8")


def encode(text: str) -> list[int]:
    return list(Tokenizer.from_str(tokenizer_text()).encode(text, add_special_tokens=False).ids)


def row(update: int, place: int, **changes: Any) -> RolloutRow:
    """Completion `place` of an update: group 0 is always right, group 1 never, group 2 more often with each update."""
    group, sample = divmod(place, GROUP)
    right = float((True, False, sample < update)[group])
    ids = encode(f"The answer is {update + sample}.")
    prompt = f"Question {group}: how many?"
    values: dict[str, Any] = dict(
        update=update,
        split="train",
        row=place,
        group=group,
        prompt_id=prompt_id(prompt),
        prompt=prompt,
        prompt_tokens=[1, 2],
        completion=f"The answer is {update + sample}.",
        completion_tokens=ids,
        logps=[-0.5 * i for i in range(len(ids))],
        entropies=[0.25] * len(ids),
        rewards={"right": right, "short": 1.0 - 0.1 * sample},
        reward_kinds={"right": "score", "short": "score"},
        reward=right,
        advantage=right - 0.5,
        stop="eos",
        truncated=False,
    )
    return RolloutRow(**{**values, **changes})


def rows_of(update: int) -> list[RolloutRow]:
    rows = [row(update, place) for place in range(3 * GROUP)]
    if update == 1:  # one completion that was cut, one with a tool, one whose reward failed; rewards that disagree
        ids = encode("call answer I give up.")
        rows[0] = row(1, 0, stop="length", truncated=True)
        mask = [1] * 2 + [0] * (len(ids) - 4) + [1] * 2
        tool: dict[str, Any] = dict(completion=TOOL_CONVERSATION, turns=2, model_mask=mask)
        rows[5] = row(1, 5, completion_tokens=ids, logps=[-1.0] * len(ids), entropies=None, **tool)
        rows[6] = row(1, 6, rewards={"right": None, "short": 1.0}, reward=None, advantage=0.0,
                      reward_kinds={"right": "timeout", "short": "score"})  # fmt: skip
        for sample in range(GROUP):
            rows[8 + sample] = row(1, 8 + sample, rewards={"right": float(sample < 1), "short": 0.1 * sample})
    return rows


def make_run(folder: Path) -> Path:
    """Four updates of three groups of four, an evaluation, and the texts of HOSTILE."""
    recorder = RunRecorder(folder)
    recorder.begin(config={"learning_rate": 1e-6, "num_generations": GROUP}, environment={})
    recorder.tokenizer(tokenizer_text())
    for update in range(UPDATES):
        replaced = [row(update, 4 + i, round=0, replaced=True, reward=None, advantage=None) for i in range(GROUP)]
        rows = rows_of(update)
        if update == 2:  # dynamic sampling replaced group 1
            rows = [*replaced, *rows[:4], *(row(2, 4 + i, round=1) for i in range(GROUP)), *rows[8:]]
        recorder.rollouts(rows)
        recorder.metrics(update + 1, {"reward": update / 4, "loss": math.nan if update == 2 else -update / 8})
        recorder.metrics(update + 1, {"eval_reward": update / 8}, kind="eval")
    recorder.rollouts([hostile(place, text) for place, text in enumerate(HOSTILE)])
    recorder.event("finished", update=UPDATES)
    recorder.close()
    return folder


def hostile(place: int, text: str) -> RolloutRow:
    changes: dict[str, Any] = dict(group=0, split="eval", prompt=f"{SCRIPT} {BIDI}", prompt_id="hostile")
    return row(UPDATES, place % 4, completion=text, **changes | {"row": place})


def make_odd_run(parent: Path) -> Path:
    """A run in which every name and text contains characters that hide or reorder text."""
    folder = parent / ODD_NAME
    recorder = RunRecorder(folder)
    recorder.begin(config={"model": ODD_NAME, ODD_NAME: [ODD_NAME]}, environment={})
    recorder.tokenizer(tokenizer_text())
    recorder.metrics(1, {"reward": 0.5, ODD_NAME: 0.25})
    recorder.event("audit", update=1, message=ODD_NAME, **{ODD_NAME: ODD_NAME})
    own: dict[str, Any] = dict(
        split=ODD_NAME, prompt_id=ODD_NAME, prompt=ODD_NAME, stop=ODD_NAME, truncated=True, completion=HOSTILE[2]
    )
    named: dict[str, Any] = dict(
        rewards={ODD_NAME: None}, reward_kinds={ODD_NAME: ODD_NAME}, extra={ODD_NAME: ODD_NAME}
    )
    ids = encode(f"{ODD_NAME} 7") * LONG
    long = dict(completion_tokens=ids[:LONG], logps=[-1.0] * LONG, entropies=None)
    recorder.rollouts([row(0, 0, **own, **named, **long), row(0, 1, **own, **named)])
    recorder.close()
    return folder


def desk(*folders: Path) -> Desk:
    made = Desk(find_folders(folders))
    made.refresh()
    return made
