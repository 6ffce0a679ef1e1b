"""Post-train a chat model with LoRA on math problems, with rewards for correct answers and for the format.

python grpo_math.py --model_name_or_path MODEL --dataset_name FOLDER --output_dir OUT --use_peft …
"""

from datasets import load_dataset
from transformers import AutoTokenizer

from gruppo import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from gruppo.rewards import accuracy_reward, think_format_reward

SYSTEM_PROMPT = "Think first, between <think> and </think>. Then give the answer in \\boxed{}."


def to_conversation(example):
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": example["problem"]},
        ]
    }


def main(script_args, training_args, model_args):
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    training_args.model_init_kwargs = {"dtype": model_args.dtype, "attn_implementation": "sdpa"}

    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    dataset = dataset.map(to_conversation, remove_columns="problem")
    train_dataset = dataset[script_args.dataset_train_split]
    eval_dataset = dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[think_format_reward, accuracy_reward],
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)

    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in trainer.model.parameters())
    last = [log for log in trainer.state.log_history if "reward" in log][-1]
    print(f"updates: {trainer.state.global_step}")
    print(f"trained: {trainable} of {total} weights")
    print(
        f"format {last['rewards/think_format_reward/mean']:.2f}, accuracy {last['rewards/accuracy_reward/mean']:.2f}"
    )


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
