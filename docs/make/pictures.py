"""The pictures of docs/concepts.md: `python docs/make/pictures.py` redraws them into docs/pictures/.

Their numbers are computed with the functions that training uses.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from docs.make.drawing import Picture
from gruppo.algo.advantages import leave_one_out, sum_then_normalize
from gruppo.algo.objectives import Tokens, clip
from gruppo.algo.types import LossSettings

FOLDER = Path(__file__).parents[1] / "pictures"
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0)


def advantages(rewards: tuple[float, ...], scale: str) -> list[float]:
    rewards_BR = torch.tensor(rewards).unsqueeze(1)
    if scale == "leave_one_out":
        return leave_one_out(rewards_BR, torch.ones(1), len(rewards)).advantages_B.tolist()
    return sum_then_normalize(rewards_BR, torch.ones(1), len(rewards), scale).advantages_B.tolist()


def group() -> Picture:
    """One prompt, six completions, their rewards, and three ways to compare them with their group."""
    picture = Picture(760, 290)
    ways = {"group": "GRPO", "none": "Dr. GRPO", "leave_one_out": "RLOO"}
    picture.box(10, 130, 130, 40, "What is 17 + 25?")
    for title, x in (("completion", 250), ("reward", 352)):
        picture.text(x, 24, title, anchor="middle", color="soft")
    for number, reward in enumerate(REWARDS):
        y = 38 + 40 * number
        picture.arrow((140, 150), (165, 150), (165, y + 14), (190, y + 14))
        picture.box(190, y, 120, 28, "… it is 42" if reward else f"… it is {(32, 41, 0, 43, 312)[number - 1]}")
        picture.text(352, y + 19, f"{reward:g}", anchor="middle", color="good" if reward else "bad")
    for column, (scale, title) in enumerate(ways.items()):
        x = 460 + 112 * column
        picture.text(x + 30, 24, title, anchor="middle", color="soft")
        picture.line((x + 30, 34), (x + 30, 276), dashed=True)
        for number, value in enumerate(advantages(REWARDS, scale)):
            y, width = 38 + 40 * number, 22 * abs(value)
            color = "good" if value > 0 else "bad"
            picture.rect(x + 30 - (width if value < 0 else 0), y + 6, width, 16, fill=color)
            picture.text(x - 34, y + 18, f"{value:+.2f}", size=11, color="soft")
    return picture


def clipping() -> Picture:
    """The clipped objective over the ratio, for a good and for a bad completion."""
    picture = Picture(760, 250)
    settings = LossSettings("clip", "token", "tokens", epsilon_low=0.2, epsilon_high=0.28)
    for sign, left, title in (
        (1.0, 20, "better than its group (A = +1)"),
        (-1.0, 400, "worse than its group (A = −1)"),
    ):
        ratios = [0.02 * step for step in range(1, 101)]
        log_ratio = torch.tensor(ratios).log().unsqueeze(0)
        ones = torch.ones_like(log_ratio)
        tokens = Tokens(log_ratio, log_ratio, log_ratio, ones * sign, ones.bool())
        gains = (-clip(tokens, settings)[0]).tolist()
        base = 215 if sign > 0 else 35

        def place(ratio: float, gain: float, left: int = left, base: int = base) -> tuple[float, float]:
            return left + 165 * ratio, base - 85 * gain

        picture.text(left + 165, 20, title, anchor="middle")
        picture.line(place(0, 0), place(2, 0))
        for bound, label in ((0.8, "1 − ε"), (1.0, "1"), (1.28, "1 + ε high")):
            x = place(bound, 0)[0]
            picture.line((x, 38), (x, 212), dashed=True)
            picture.text(x, 234, label, anchor="middle" if bound != 1.28 else "start", size=11, color="soft")
        picture.line(*map(place, ratios, gains), color="good" if sign > 0 else "bad", width=3)
        held = [ratio for ratio in ratios if (ratio > 1.28 if sign > 0 else ratio < 0.8)]
        middle = place(sum(held) / len(held), gains[ratios.index(held[0])])
        picture.text(middle[0], middle[1] - 10, "no gradient", anchor="middle", color="mark")
    return picture


def packed() -> Picture:
    """Padded rows, and one pack in which completions of the same prompt share it."""
    picture = Picture(760, 318)
    lengths = (14, 6, 9, 17)
    cell, prompt = 11.5, 11
    picture.text(10, 20, "padded: each row has the prompt and is as long as the longest")
    for row, length in enumerate(lengths):
        y = 32 + 28 * row
        picture.rect(10, y, prompt * cell - 2, 20, fill="soft")
        picture.rect(10 + prompt * cell, y, length * cell - 2, 20, fill="good")
        rest = max(lengths) - length
        if rest:
            picture.rect(10 + (prompt + length) * cell, y, rest * cell - 2, 20, line="soft")
    tokens = len(lengths) * (prompt + max(lengths))
    picture.text(350, 100, f"{tokens} positions", color="bad", size=15)
    picture.text(10, 180, "packed: the prompt once, completions one after the other, nothing else")
    x = 10.0
    for length, fill in ((prompt, "soft"), *((length, "good") for length in lengths)):
        picture.rect(x, 192, length * cell - 2, 20, fill=fill)
        x += length * cell
    picture.text(x + 8, 207, f"{prompt + sum(lengths)}", color="good", size=15)
    picture.text(10, 310, "a completion sees the prompt and itself, not its siblings", size=12, color="soft")
    starts = [prompt + sum(lengths[:number]) for number in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        middle, y = 10 + (start + length / 2) * cell, 252 + 10 * starts.index(start)
        picture.arrow((middle, 214), (middle, y), (10 + (2 + 2 * starts.index(start)) * cell, y), color="mark")
    return picture


def step() -> Picture:
    """What happens in one step, and where each part is configured."""
    picture = Picture(760, 250)
    stages = (
        ("prompts", "generation_batch_size\n÷ num_generations"),
        ("sampling", "num_generations\ntemperature"),
        ("rewards", "reward_funcs\nreward_weights"),
        ("advantages", "scale_rewards\ndynamic_sampling"),
        ("update", "loss_type, epsilon\nlearning_rate"),
    )
    for number, (title, settings) in enumerate(stages):
        x = 10 + 150 * number
        picture.box(x, 30, 118, 44, title)
        if number:
            picture.arrow((x - 32, 52), (x, 52))
        for line, words in enumerate(settings.split("\n")):
            picture.text(x + 59, 98 + 16 * line, words, anchor="middle", size=11, color="soft")
    picture.arrow((669, 74), (669, 84), (755, 84), (755, 150), (219, 150), (219, 122), color="good")
    picture.text(480, 168, "the new weights sample the next completions", anchor="middle", color="good")
    picture.line((10, 190), (750, 190), dashed=True)
    told = (
        ("prompts/seen", 69),
        ("completions/*", 219),
        ("rewards/<name>/*", 369),
        ("frac_reward_zero_std", 519),
        ("clip_ratio/*, entropy", 669),
    )
    for words, x in told:
        picture.text(x, 212, words, anchor="middle", size=11, color="mark")
    picture.text(10, 238, "above the line: settings; below it: what is logged about each part", size=11, color="soft")
    return picture


def staleness() -> Picture:
    """Which weights sampled the completions that an update trains on."""
    picture = Picture(760, 330)
    rows = (
        ("steps_per_generation = accumulation", ("1",), "every update has completions of its own: ratio 1"),
        ("steps_per_generation = 2 × accumulation", ("1", "2"), "a generation serves two updates, half of it each"),
        ("num_iterations = 2", ("1", "1"), "all of it is used twice, the second time off-policy"),
    )
    for number, (title, halves, words) in enumerate(rows):
        y = 14 + 106 * number
        picture.text(10, y + 10, title)
        picture.text(750, y + 10, words, anchor="end", color="soft", size=12)
        x, weights = 10.0, 0
        for _ in range(4 // len(halves)):
            picture.box(x, y + 22, 78, 36, "sample\nW" + str(weights), line="mark")
            sampled = weights
            x += 86
            for half in halves:
                label = f"part {half}" if len(set(halves)) > 1 else "update"
                on_policy = weights == sampled
                picture.box(
                    x, y + 22, 92, 36, f"{label}\nW{weights} → W{weights + 1}", line="good" if on_policy else "bad"
                )
                weights += 1
                x += 100
    picture.text(
        10,
        322,
        "green: the weights are those that sampled. red: they are newer, the ratio leaves 1, clipping acts.",
        size=12,
        color="soft",
    )
    return picture


def zero_spread() -> Picture:
    """Groups whose completions all have the same reward, and how training treats them."""
    picture = Picture(760, 240)
    groups = (("too hard", (0.0,) * 6), ("learnable", (1.0, 0.0, 0.0, 1.0, 0.0, 1.0)), ("solved", (1.0,) * 6))
    for number, (title, rewards) in enumerate(groups):
        y = 20 + 70 * number
        picture.text(10, y + 22, title)
        values = advantages(rewards, "group")
        for place, (reward, value) in enumerate(zip(rewards, values, strict=True)):
            x = 110 + 46 * place
            picture.box(x, y, 38, 26, f"{reward:g}", line="good" if reward else "bad")
            picture.text(x + 19, y + 43, f"{value:+.1f}" if value else "0", anchor="middle", size=11, color="soft")
        spread = any(values)
        words = ("trained on", "good") if spread else ("no spread: advantages 0, gradient 0", "mark")
        picture.text(410, y + 18, words[0], color=words[1])
    picture.text(410, 54, "not run in the update (skip_zero_advantage)", size=12, color="soft")
    picture.text(410, 194, "dynamic_sampling=True takes the next prompt instead", size=12, color="soft")
    picture.text(10, 232, "boxes: rewards; below them: advantages", size=12, color="soft")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "group": group,
    "clipping": clipping,
    "packed": packed,
    "step": step,
    "staleness": staleness,
    "zero-spread": zero_spread,
}


def draw() -> dict[str, str]:
    """The SVG of each picture, keyed by file name."""
    return {f"{name}.svg": make().svg() for name, make in PICTURES.items()}


if __name__ == "__main__":
    for name, svg in draw().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
