"""Train on a guessing game: a custom rollout function, rewards of several kinds, reshaped advantages.

python grpo_game.py MODEL OUTPUT_DIR
"""

import asyncio
import sys
from functools import partial

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from gruppo import GRPOConfig, GRPOTrainer

model_id, output_dir = sys.argv[1:3]


def play(prompts, trainer):
    """Each prompt gets a guess of the model and a reply of the game; the reply is excluded from training."""
    tokenizer = trainer.processing_class
    prompt_ids = tokenizer(prompts)["input_ids"]
    completion_ids, env_mask, replies = [], [], []
    model = trainer.accelerator.unwrap_model(trainer.model)
    for ids in prompt_ids:
        with torch.no_grad():
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=3,
                min_new_tokens=3,
                do_sample=True,
                pad_token_id=tokenizer.pad_token_id,
            )
        guess = output[0, len(ids) :].tolist()
        reply = tokenizer("!")["input_ids"]
        completion_ids.append(guess + reply + [tokenizer.eos_token_id])
        env_mask.append([1] * len(guess) + [0] * len(reply) + [1])
        replies.append(len(set(guess)))
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": None,
        "env_mask": env_mask,
        "distinct": replies,
    }


async def remote_judge(completions, distinct, log_metric, **kwargs):
    await asyncio.sleep(0.01)
    log_metric("game/distinct", sum(distinct) / len(distinct))
    return [float(count) for count in distinct]


def contains(completions, character, log_extra, **kwargs):
    found = [character in text for text in completions]
    log_extra("found", found)
    return [1.0 if hit else 0.0 for hit in found]


class DecayingTrainer(GRPOTrainer):
    """Later tokens count less."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        positions = torch.arange(batch["completion_ids"].size(1), device=batch["completion_ids"].device)
        batch["advantages"] = batch["advantages"].unsqueeze(1) * 0.9**positions
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["advantage/max"].append(batch["advantages"].max().item())
        return batch


trainer = DecayingTrainer(
    model=AutoModelForCausalLM.from_pretrained(model_id),
    reward_funcs=[remote_judge, partial(contains, character="e")],
    args=GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=5,
        max_steps=2,
        learning_rate=1e-3,
        loss_type="dr_grpo",
        scale_rewards=False,
        epsilon_high=0.28,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=2,
        save_strategy="steps",
        save_steps=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"prompt": [f"Round {i}:" for i in range(8)]}),
    processing_class=AutoTokenizer.from_pretrained(model_id),
    rollout_func=play,
)
result = trainer.train()

logged = [log for log in trainer.state.log_history if "reward" in log]
print(f"updates: {result.global_step}")
print(f"rewards: {', '.join(trainer.reward_func_names)}")
print(f"model tokens: {logged[0]['completions/mean_length']:.0f}")
print(f"own metrics: {all(log['game/distinct'] > 0 and log['advantage/max'] >= 0 for log in logged)}")
