"""Post-train a model with RLOO against a reward model and a length preference, with evaluation and early stopping.

python rloo_helpful.py MODEL REWARD_MODEL OUTPUT_DIR
"""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from gruppo import RLOOConfig, RLOOTrainer

model_id, reward_model_id, output_dir = sys.argv[1:4]


def brevity(completion_ids, **kwargs):
    return [-len(ids) / 10 for ids in completion_ids]


class StopAfterEvaluations(TrainerCallback):
    """Stops training after a number of evaluations, and keeps their rewards."""

    def __init__(self, count):
        self.count = count
        self.rewards = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.rewards.append(metrics["eval_reward"])
        if len(self.rewards) == self.count:
            control.should_training_stop = True


tokenizer = AutoTokenizer.from_pretrained(model_id, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(model_id)
reward_model = AutoModelForSequenceClassification.from_pretrained(reward_model_id, num_labels=1)

dataset = Dataset.from_dict({"prompt": [f"Question {i}:" for i in range(12)]}).train_test_split(test_size=4, seed=0)

training_args = RLOOConfig(
    output_dir=output_dir,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    num_generations=2,
    max_completion_length=5,
    num_train_epochs=3,
    learning_rate=1e-3,
    beta=0.02,
    num_iterations=2,
    normalize_advantages=True,
    reward_weights=[1.0, 0.5],
    eval_strategy="steps",
    eval_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)

stop = StopAfterEvaluations(2)
trainer = RLOOTrainer(
    model=model,
    reward_funcs=[reward_model, brevity],
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    processing_class=tokenizer,
    reward_processing_classes=[AutoTokenizer.from_pretrained(reward_model_id), None],
    callbacks=[stop],
)
trainer.train()
metrics = trainer.evaluate()

print(f"stopped at update {trainer.state.global_step} after {len(stop.rewards) - 1} evaluations")
print(f"rewards: {', '.join(trainer.reward_func_names)}")
print(f"kl logged: {all('kl' in log for log in trainer.state.log_history if 'reward' in log)}")
print(f"final eval reward is a number: {metrics['eval_reward'] == metrics['eval_reward']}")
