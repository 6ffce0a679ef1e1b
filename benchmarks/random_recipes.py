"""Random recipes on tiny random models: does the trainer make the update that the formulas define?

    python benchmarks/random_recipes.py --runs 300 --models gemma2 gemma3 --out benchmarks/results/random_recipes.json

Each run draws a model, a recipe and a batch from its seed, and trains on a CPU for a few updates. Then the same rows
are trained on again in float64, row by row without padding: log-probs from transformers' own forward pass, losses and
their gradients by hand (tests/reference.py), clipping, SGD. Reports how far the final weights are apart, relative to
how far they have moved.
"""

import argparse
import copy
import json
import os
import random
import sys
import tempfile
import warnings
from collections import deque
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.common import provenance
from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.algo.loss import LossInputs
from gruppo.algo.masks import SLACK
from gruppo.algo.reduce import UpdateSize
from tests import reference
from tests.helpers import CHARACTERS, SPECIAL, base_args, length_reward, tiny_tokenizer
from tests.policy.twins import altered, exact

MODELS = ("llama", "qwen3", "gemma2", "gemma3")
LIMIT = {"float32": 2e-3, "float64": 1e-5}  # of the movement; norms of a float64 model round to float32
Row = tuple[list[int], list[int]]  # a prompt and a completion


def code_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [(sum(map(ord, text)) % 3) / 2 for text in completions]


# ---- what is drawn


def draw_model(name: str, seed: int, rng: random.Random) -> Any:
    changes: dict[str, Any] = {"vocab_size": len(SPECIAL) + len(CHARACTERS), "bos_token_id": None}
    if name.startswith("gemma"):
        changes["sliding_window"] = rng.randint(2, 12)
        changes["layer_types"] = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(3)]
    if name == "gemma2":
        changes["final_logit_softcapping"] = rng.choice([4.0, 30.0])
    model = altered(name, seed, **changes)
    if name in ("llama", "qwen3") and rng.random() < 0.3:
        model.set_attn_implementation("eager")
    # One token in eight ends a completion, so that their lengths differ.
    model.generation_config.eos_token_id = [1, *rng.sample(range(len(SPECIAL), changes["vocab_size"]), 12)]
    return model


def draw_recipe(rng: random.Random) -> tuple[bool, dict[str, Any]]:
    """Whether it is RLOO, and the settings."""
    group, rows, steps = rng.choice([2, 3, 4]), rng.choice([4, 6, 12]), rng.choice([1, 2, 3])
    while rows * steps % group:
        steps += 1
    settings: dict[str, Any] = dict(
        num_generations=group,
        per_device_train_batch_size=rows,
        steps_per_generation=steps,
        gradient_accumulation_steps=rng.choice([1, 2]),
        num_iterations=rng.choice([1, 1, 2]),
        max_steps=rng.choice([2, 4]),
        max_completion_length=rng.randint(3, 10),
        temperature=rng.choice([0.7, 1.0, 1.3]),
        beta=rng.choice([0.0, 0.0, 0.05, 0.5]),
        mask_truncated_completions=rng.random() < 0.2,
        packed_update=rng.random() < 0.5,
        rollout_backend=rng.choice(["builtin", "transformers"]),
        epsilon=rng.choice([0.05, 0.2]),
        reward_weights=[1.0, rng.choice([0.5, 2.0])],
    )
    if settings["packed_update"]:
        settings["max_tokens_per_micro_batch"] = rng.choice([None, 24, 60])
    if rng.random() < 0.15:
        clip = rng.choice([None, (0.2, 0.9)])
        return True, settings | dict(normalize_advantages=rng.random() < 0.5, reward_clip_range=clip)
    loss = rng.choice(["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
    return False, settings | dict(
        loss_type=loss,
        importance_sampling_level="token" if loss in ("vespo", "cispo") else rng.choice(["token", "sequence"]),
        scale_rewards=rng.choice(["group", "batch", "none"]),
        epsilon_high=5.0 if loss == "cispo" else rng.choice([None, 0.3]),
        delta=rng.choice([None, None, 1.5]) if loss in ("grpo", "dapo", "bnpo", "dr_grpo") else None,
        use_bias_correction_kl=rng.random() < 0.5,
        top_entropy_quantile=rng.choice([1.0, 1.0, 0.8, 0.5, 0.3, 0.2, 0.05, 0.0]),
        entropy_coef=rng.choice([0.0, 0.0, 0.02]),
        off_policy_mask_threshold=rng.choice([None, None, 0.02]),
        multi_objective_aggregation=rng.choice(["sum_then_normalize", "normalize_then_sum"]),
    )


def make_trainer(seed: int, models: list[str], folder: str) -> tuple[Any, dict[str, Any]]:
    """A trainer, and what was drawn for it."""
    rng = random.Random(seed)
    name, dtype = rng.choice(models), rng.choice(["float32", "float32", "float32", "float64"])
    model = draw_model(name, seed, rng).to(getattr(torch, dtype))
    rloo, drawn = draw_recipe(rng)
    # The gradient's norm is clipped, so that no recipe moves the weights too far.
    fixed = {
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": seed,
    }
    texts = [f"{i}" + "x" * (rng.choice([1, 2, 3, 5, 9, 14]) - 1) for i in range(10, 58)]
    trainer = (RLOOTrainer if rloo else GRPOTrainer)(
        model=model,
        reward_funcs=[length_reward, code_reward],
        args=(RLOOConfig if rloo else GRPOConfig)(**base_args(folder, **fixed, **drawn)),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tiny_tokenizer(),
    )
    return trainer, {"seed": seed, "model": name, "dtype": dtype, "rloo": rloo, **drawn}


# ---- the reference


def key(row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(row[0]), tuple(row[1])


class Reference:
    """The same updates in float64, row by row."""

    def __init__(self, trainer: Any):
        self.args, self.settings = trainer.args, trainer.loss_settings
        self.model, self.start = (exact(copy.deepcopy(trainer.model)) for _ in range(2))
        # By row: of the current generation, and of the last one, whose rows an update may still contain.
        self.old: dict[Any, Tensor] = {}
        self.ref: dict[Any, Tensor] = {}
        self.advantages: dict[Any, float] = {}

    def scores(self, model: Any, row: Row) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (T,) of a row's completion."""
        prompt, completion = row
        ids = torch.tensor([prompt + completion])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / self.args.temperature
        logps = logits.log_softmax(-1)
        return logps.gather(-1, ids[0, len(prompt) :, None])[:, 0], -(logps.exp() * logps).sum(-1)

    @torch.no_grad()
    def collect(self, rollouts: Any, rewards: list[list[float]]) -> None:
        """The advantages, and the log-probs under the weights that sampled and under the reference."""
        args, rows = self.args, [(list(each.prompt.ids), list(each.completion.ids)) for each in rollouts]
        self.old |= {key(row): self.scores(self.model, row)[0] for row in rows}
        self.ref |= {key(row): self.scores(self.start, row)[0] for row in rows if args.beta}
        weights, size, penalty = args.reward_weights, args.num_generations, None
        if isinstance(args, RLOOConfig):
            if args.beta:
                counts = [each.completion.stop.ended or not args.mask_truncated_completions for each in rollouts]
                kl = [float((self.old[key(row)] - self.ref[key(row)]).sum()) for row in rows]
                penalty = [args.beta * value * count for value, count in zip(kl, counts, strict=True)]
            options = (penalty, args.reward_clip_range, args.normalize_advantages)
            found = reference.leave_one_out(rewards, weights, size, *options)
        elif args.multi_objective_aggregation == "normalize_then_sum":
            found = reference.normalize_then_sum(rewards, weights, size)
        else:
            found = reference.sum_then_normalize(rewards, weights, size, args.scale_rewards)
        self.advantages |= dict(zip(map(key, rows), found, strict=True))

    def update(self, micro_batches: list[list[Row | None]]) -> None:
        tokens = sum(len(row[1]) for rows in micro_batches for row in rows if row)
        size = UpdateSize(sum(map(len, micro_batches)), max(tokens, 1), len(micro_batches))
        self.model.zero_grad()
        for rows in filter(any, micro_batches):
            self.backward(rows, size)
        weights = [weight for weight in self.model.parameters() if weight.grad is not None]
        torch.nn.utils.clip_grad_norm_(weights, self.args.max_grad_norm)
        with torch.no_grad():
            for weight in weights:
                weight -= self.args.learning_rate * weight.grad

    def backward(self, rows: list[Row | None], size: UpdateSize) -> None:
        """Add the gradient of one micro-batch; None stands for a row without loss tokens."""
        args, none = self.args, torch.zeros(0, dtype=torch.float64)

        def padded(values: list[Tensor]) -> Tensor:
            return pad_sequence(values, batch_first=True)

        def known(of: dict[Any, Tensor]) -> Tensor:
            return padded([none if row is None else of[key(row)] for row in rows])

        found = [(none, none) if row is None else self.scores(self.model, row) for row in rows]
        logps_BT, entropy_BT = (padded([each[i] for each in found]) for i in (0, 1))
        mask_BT, threshold = padded([torch.ones(len(each[0])) for each in found]), None
        if args.top_entropy_quantile < 1:
            threshold = entropy_BT.detach()[mask_BT.bool()].quantile(1 - args.top_entropy_quantile).item()
            threshold = threshold * (1 - SLACK[0]) - SLACK[1]
        inputs = LossInputs(
            logps_BT=logps_BT.detach(),
            mask_BT=mask_BT,
            advantages=torch.tensor([0.0 if row is None else self.advantages[key(row)] for row in rows]).double(),
            old_logps_BT=None if args.rollouts_stay_on_policy else known(self.old),
            ref_logps_BT=known(self.ref) if self.ref else None,
            entropy_BT=entropy_BT.detach(),
            entropy_threshold=threshold,
            entropy_coef=args.entropy_coef,
        )
        by = reference.loss(inputs, self.settings, size)
        by_logp, by_entropy = torch.tensor([by.grad_logps, by.grad_entropy]).double()
        (logps_BT * by_logp + entropy_BT * by_entropy).sum().backward()


# ---- one run


def watch(trainer: Any) -> list[Any]:
    """Lists the generations of a run: rollouts, their rewards, and the micro-batches that they are cut into."""
    seen: list[Any] = []
    reward, cut = trainer.reward, trainer._collect_slices

    def noting_rewards(rollouts: Any) -> Any:
        found = reward(rollouts)
        seen.append([rollouts, found.values_NR.tolist()])
        return found

    def noting_slices(rows: Any) -> Any:
        slices = cut(rows)
        seen[-1].append([rows_of(part) for part in slices])
        return slices

    trainer.reward, trainer._collect_slices = noting_rewards, noting_slices
    return seen


def rows_of(batch: dict[str, Tensor]) -> list[Row | None]:
    """The rows of a micro-batch without their padding; None for a row without loss tokens."""
    parts = [zip(batch[f"{part}_ids"], batch[f"{part}_mask"].bool(), strict=True) for part in ("prompt", "completion")]
    rows = [tuple(ids[mask].tolist() for ids, mask in row) for row in zip(*parts, strict=True)]
    return [(prompt, completion) if completion else None for prompt, completion in rows]


def repeat(twin: Reference, generations: list[Any]) -> None:
    """Make the updates of a run again."""
    queue: deque[list[Row | None]] = deque()
    coming = iter(generations)
    for _ in range(twin.args.max_steps):
        micro_batches = []
        for _ in range(twin.args.gradient_accumulation_steps):
            if not queue:
                *collected, slices = next(coming)
                twin.collect(*collected)
                queue.extend(slices * twin.args.num_iterations)
            micro_batches.append(queue.popleft())
        twin.update(micro_batches)


def weights(model: Any) -> Tensor:
    return torch.cat([weight.detach().double().flatten() for weight in model.parameters()])


def run(seed: int, models: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer, drawn = make_trainer(seed, models, folder)
        twin, generations, before = Reference(trainer), watch(trainer), weights(trainer.model)
        try:
            trainer.train()
        except RuntimeError as error:
            return {**drawn, "error": f"{type(error).__name__}: {error}"[:300]}
    repeat(twin, generations)
    after = weights(trainer.model)
    moved, apart = (after - before).norm().item(), (after - weights(twin.model)).norm().item()
    return {**drawn, "moved": moved, "apart": apart / max(moved, 1e-9)}  # less than that is rounding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    bad, largest = [], dict.fromkeys(LIMIT, 0.0)
    for seed in range(options.first, options.first + options.runs):
        found = run(seed, options.models)
        if found.get("apart", torch.inf) <= LIMIT[found["dtype"]]:
            largest[found["dtype"]] = max(largest[found["dtype"]], found["apart"])
        else:
            bad.append(found)
            print(json.dumps(found), flush=True)
    result = {"runs": options.runs, "limit": LIMIT, "largest_within": largest, "beyond_or_failed": bad}
    print(json.dumps({**result, "beyond_or_failed": len(bad)}))
    if options.out:
        options.out.write_text(json.dumps({**provenance("gruppo"), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
