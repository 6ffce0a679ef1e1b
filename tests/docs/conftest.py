"""What the pages assume: a run of the demo in runs/demo."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/demo`, of two short updates."""
    from gruppo import GRPOConfig, GRPOTrainer
    from gruppo.demo import exact_match, load_task, model_path

    folder = tmp_path_factory.mktemp("pages")
    args = GRPOConfig(
        str(folder / "runs/demo"),
        max_steps=2,
        logging_steps=1,
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=16,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    train, _ = load_task()
    GRPOTrainer(model=model_path(), reward_funcs=exact_match, args=args, train_dataset=train).train()
    return folder
