import io
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from torch import nn
from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState

from gruppo.errors import ConfigError, DataError
from gruppo.trainer.callbacks import (
    BEMACallback,
    LogCompletionsCallback,
    RichProgressCallback,
    SyncRefModelCallback,
    WeaveCallback,
)
from gruppo.trainer.display import completion_callbacks
from tests.helpers import chats, prompts, tiny_model, tiny_tokenizer

CONTROL = TrainerControl()


def state(step=0, max_steps=10, main=True, eval_steps=500):
    return TrainerState(global_step=step, max_steps=max_steps, is_world_process_zero=main, eval_steps=eval_steps)


def filled(value, *shapes):
    """A module whose parameters all hold one value."""
    module = nn.Module()
    for i, shape in enumerate(shapes or [(2, 2), (3,)]):
        module.register_parameter(f"p{i}", nn.Parameter(torch.full(shape, float(value))))
    return module


def unwrapped(model, keep_torch_compile=True):
    """accelerate's `unwrap_model`, of a model that nothing wraps."""
    return model


def values(module):
    return [p.detach().flatten()[0].item() for p in module.parameters()]


@pytest.mark.parametrize(
    "callback", [BEMACallback, LogCompletionsCallback, RichProgressCallback, SyncRefModelCallback, WeaveCallback]
)
def test_all_are_callbacks(callback):
    assert issubclass(callback, TrainerCallback)


class TestSyncRefModel:
    args = SimpleNamespace(ref_model_sync_steps=3, ref_model_mixup_alpha=0.25)

    @pytest.mark.parametrize("accelerator", [None, SimpleNamespace(unwrap_model=unwrapped)])
    def test_blends_every_few_steps(self, accelerator):
        policy, reference = filled(4), filled(0)
        callback = SyncRefModelCallback(reference, accelerator)
        seen = []
        for step in range(1, 7):
            callback.on_step_end(self.args, state(step), CONTROL, model=policy)
            seen.append(values(reference)[0])
        assert seen == [0, 0, 1, 1, 1, 1.75]
        assert values(reference) == [1.75, 1.75]
        assert values(policy) == [4, 4]

    def test_keeps_the_precision_of_the_reference(self):
        reference = filled(0).to(torch.bfloat16)
        SyncRefModelCallback.sync_target_model(filled(4), reference, 0.5)
        assert values(reference) == [2, 2]
        assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}

    @pytest.mark.parametrize(
        ("reference", "message"),
        [
            (filled(0, (2, 2)), "policy has 2 parameters and the reference 1"),
            (filled(0, (2, 2), (4,)), r"p1 has the shape \(3,\) in the policy and \(4,\)"),
        ],
    )
    def test_another_architecture_is_refused_untouched(self, reference, message):
        with pytest.raises(ConfigError, match=message):
            SyncRefModelCallback.sync_target_model(filled(4), reference, 0.5)
        assert set(values(reference)) == {0}


class TestBEMA:
    @staticmethod
    def run(callback, model, tmp_path, steps, start=0):
        args = SimpleNamespace(output_dir=str(tmp_path))
        callback.on_train_begin(args, state(start), CONTROL, model=model)
        seen = []
        for step in steps:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            callback.on_step_end(args, state(step), CONTROL, model=model)
            seen.append(round(values(callback.running_model)[0], 5))
        return args, seen

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            # β = 12^-½, α = 12^-0.2 at step 2: 2β + 2α = 1.79408; and so on.
            ({"update_freq": 2}, [0, 1.79408, 1.79408, 3.85167, 3.85167, 6.06516]),
            # The origin is the weights at step 3; the schedule counts from the first step.
            ({"update_freq": 2, "update_after": 3}, [0, 0, 0, 0, 4.68002, 4.68002]),
            # No averaging: θ + α·θ.
            ({"update_freq": 1, "ema_power": 0.0}, [1.61904, 3.21673, 4.79611, 6.35958, 7.90905, 9.44609]),
            # β at its floor of ½, α = 1 / (1 + 2t).
            (
                {
                    "update_freq": 3,
                    "update_after": 1,
                    "min_ema_multiplier": 0.5,
                    "multiplier": 2.0,
                    "lag": 1,
                    "ema_power": 0.9,
                    "bias_power": 1.0,
                },
                [0, 0, 0, 2.83333, 2.83333, 2.83333],
            ),
        ],
    )
    def test_averages(self, tmp_path, settings, expected):
        model = filled(0)
        _, seen = self.run(BEMACallback(**settings), model, tmp_path, range(1, 7))
        assert seen == pytest.approx(expected, abs=1e-5)
        assert values(model) == [6, 6]

    def test_frozen_weights_are_left_out(self, tmp_path):
        model = filled(0)
        model.p1.requires_grad_(False)
        callback = BEMACallback(update_freq=1)
        self.run(callback, model, tmp_path, [1])
        assert values(callback.running_model)[0] > 0
        assert values(callback.running_model)[1] == 0

    def test_saves_the_average_after_training(self, tmp_path):
        model = tiny_model()
        callback = BEMACallback(update_freq=1)
        args, _ = self.run(callback, model, tmp_path, [1, 2])
        callback.on_train_end(args, state(2), CONTROL, model=model)
        loaded = type(model).from_pretrained(tmp_path / "bema")
        for (name, saved), running in zip(loaded.named_parameters(), callback.running_model.parameters(), strict=True):
            assert torch.equal(saved, running), name
        assert not torch.equal(loaded.lm_head.weight, model.lm_head.weight)

    def test_resumes_to_the_same_average(self, tmp_path):
        whole = self.run(BEMACallback(update_freq=2), filled(0), tmp_path / "whole", range(1, 7))[1]
        model, first = filled(0), BEMACallback(update_freq=2)
        args, seen = self.run(first, model, tmp_path, [1, 2, 3])
        (tmp_path / "checkpoint-3").mkdir()
        first.on_save(args, state(3), CONTROL, model=model)
        rest = self.run(BEMACallback(update_freq=2), model, tmp_path, [4, 5, 6], start=3)[1]
        assert seen + rest == whole

    def test_other_processes_keep_nothing(self, tmp_path):
        callback, args = BEMACallback(update_freq=1), SimpleNamespace(output_dir=str(tmp_path))
        for event in ("on_train_begin", "on_step_end", "on_save", "on_train_end"):
            getattr(callback, event)(args, state(1, main=False), CONTROL, model=filled(0))
        assert callback.running_model is None
        assert not list(tmp_path.iterdir())

    def test_sharded_weights_are_refused(self, tmp_path):
        model = filled(0)
        model.p0.ds_id = 0
        with pytest.raises(ConfigError, match="ZeRO-3"):
            self.run(BEMACallback(), model, tmp_path, [])

    def test_bad_settings(self):
        with pytest.raises(ConfigError, match="update_freq=0"):
            BEMACallback(update_freq=0)


class TestRichProgress:
    @staticmethod
    def quiet():
        callback = RichProgressCallback()
        callback.console = Console(file=io.StringIO(), width=100)
        return callback

    @staticmethod
    def screen(callback):
        console = Console(file=io.StringIO(), width=100)
        console.print(callback.render())
        return console.file.getvalue()

    def test_bars_and_metrics(self):
        callback = self.quiet()
        callback.on_train_begin(None, state(0, max_steps=4), CONTROL)
        callback.on_step_end(None, state(3, max_steps=4), CONTROL)
        logs = {"reward": 0.123456, "loss": 2.0, "epoch": 1, "total_flos": 7}
        callback.on_log(None, state(3, max_steps=4), CONTROL, logs=logs)
        for _ in range(2):
            callback.on_prediction_step(None, state(3, max_steps=4), CONTROL, eval_dataloader=[1, 2, 3, 4, 5])
        shown = self.screen(callback)
        assert "3/4" in shown
        assert "2/5" in shown
        assert "0.1235" in shown
        assert "total_flos" not in shown
        callback.on_evaluate(None, state(3, max_steps=4), CONTROL)
        assert "2/5" not in self.screen(callback)
        callback.on_train_end(None, state(4, max_steps=4), CONTROL)
        assert "0.1235" in callback.console.file.getvalue()

    def test_evaluation_alone_closes_its_display(self):
        callback = self.quiet()
        callback.on_prediction_step(None, state(), CONTROL, eval_dataloader=[1])
        assert callback._live is not None
        callback.on_predict(None, state(), CONTROL, metrics={})
        assert callback._live is None

    def test_only_the_main_process_shows_anything(self):
        callback = self.quiet()
        for event in ("on_train_begin", "on_step_end", "on_log", "on_prediction_step", "on_train_end"):
            getattr(callback, event)(None, state(main=False), CONTROL, logs={"a": 1.0}, eval_dataloader=[1])
        assert callback._live is None
        assert callback.console.file.getvalue() == ""


def one_process(rank=0, processes=1):
    return SimpleNamespace(
        unwrap_model=unwrapped, num_processes=processes, process_index=rank, device=torch.device("cpu")
    )


def trainer(dataset, report_to=(), accelerator=None, **settings):
    args = {"eval_steps": 2, "eval_batch_size": 2, "report_to": list(report_to), "max_completion_length": 3}
    return SimpleNamespace(
        args=SimpleNamespace(**{**args, **settings}),
        accelerator=accelerator or one_process(),
        model=tiny_model().train(),
        processing_class=tiny_tokenizer(),
        eval_dataset=dataset,
    )


def fake_tracker(monkeypatch, name, **attributes):
    """A module that keeps what is logged to it; a table is its data frame."""
    module, logged = types.ModuleType(name), []
    module.log = logged.append
    module.Table = lambda dataframe: dataframe
    for key, value in attributes.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return logged


class TestLogCompletions:
    @pytest.mark.parametrize(
        ("name", "attributes"), [("wandb", {"run": SimpleNamespace(project="p")}), ("trackio", {})]
    )
    def test_table_grows(self, monkeypatch, name, attributes):
        logged = fake_tracker(monkeypatch, name, **attributes)
        owner = trainer(chats(5), report_to=[name])
        callback = LogCompletionsCallback(owner, num_prompts=3)
        for step in range(1, 5):
            callback.on_step_end(owner.args, state(step, eval_steps=2), CONTROL)
        assert len(logged) == 2
        first, second = (entry["completions"] for entry in logged)
        assert list(first.columns) == ["step", "prompt", "completion"]
        assert list(first["step"]) == [2, 2, 2]
        assert list(second["step"]) == [2, 2, 2, 4, 4, 4]
        assert list(first["prompt"]) == [f"<user>p{i}<eos><assistant>" for i in range(3)]
        assert all(len(text) <= 3 for text in second["completion"])

    def test_completions_are_the_model_s(self, monkeypatch):
        logged = fake_tracker(monkeypatch, "wandb", run=object())
        owner = trainer(prompts(3), report_to=["wandb"])
        callback = LogCompletionsCallback(owner, GenerationConfig(max_new_tokens=4, do_sample=False), freq=1)
        callback.on_step_end(owner.args, state(1), CONTROL)
        tokenizer, got = owner.processing_class, logged[0]["completions"]["completion"]
        for prompt, completion in zip(prompts(3)["prompt"], got, strict=True):
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            out = owner.model.eval().generate(ids, max_new_tokens=4, do_sample=False)
            assert completion == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    def test_leaves_mode_and_random_numbers_alone(self, monkeypatch):
        fake_tracker(monkeypatch, "wandb", run=object())
        owner = trainer(prompts(2), report_to=["wandb"])
        callback = LogCompletionsCallback(owner, GenerationConfig(max_new_tokens=4, do_sample=True), freq=1)
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        callback.on_step_end(owner.args, state(1), CONTROL)
        assert torch.equal(torch.rand(3), expected)
        assert owner.model.training

    def test_prints_without_a_tracker(self, capsys):
        owner = trainer(prompts(2))
        LogCompletionsCallback(owner, freq=1).on_step_end(owner.args, state(7), CONTROL)
        shown = capsys.readouterr().out
        assert "step 7" in shown
        assert "p1:" in shown

    def test_processes_share_the_prompts_and_call_the_model_equally_often(self, monkeypatch):
        shares, calls = [], []
        monkeypatch.setattr(completion_callbacks, "gather_object", lambda found: shares.append(found) or found)
        for rank in range(2):
            owner = trainer(prompts(5), accelerator=one_process(rank, 2))
            generate, count = owner.model.generate, []
            owner.model.generate = lambda *a, generate=generate, count=count, **k: count.append(1) or generate(*a, **k)
            LogCompletionsCallback(owner, freq=1).on_step_end(owner.args, state(1, main=rank == 0), CONTROL)
            calls.append(len(count))
        assert [[row[0] for row in share] for share in shares] == [[0, 2, 4], [1, 3]]
        assert [row[1] for share in shares for row in share] == ["p0:", "p2:", "p4:", "p1:", "p3:"]
        assert calls == [2, 2]

    def test_of_several_sets_the_first(self):
        owner = trainer({"one": prompts(1), "two": prompts(2)})
        callback = LogCompletionsCallback(owner, freq=1)
        callback.on_step_end(owner.args, state(1), CONTROL)
        assert [row["prompt"] for row in callback.table] == ["p0:"]

    @pytest.mark.parametrize(
        ("dataset", "settings", "error", "message"),
        [
            (None, {}, ConfigError, "needs an `eval_dataset`"),
            (Dataset.from_dict({"text": ["a"]}), {}, DataError, r"it has \['text'\]"),
            (prompts(1), {"eval_steps": None}, ConfigError, "needs `freq`"),
        ],
    )
    def test_bad_trainers(self, dataset, settings, error, message):
        with pytest.raises(error, match=message):
            LogCompletionsCallback(trainer(dataset, **settings))


class FakeWeave(types.ModuleType):
    def __init__(self):
        super().__init__("weave")
        self.client, self.events = None, []

    def get_client(self):
        return self.client

    def init(self, project):
        self.client = project

    def EvaluationLogger(self, **kwargs):
        self.events.append(("evaluation", kwargs))
        return SimpleNamespace(log_prediction=self.predict, log_summary=lambda s: self.events.append(("summary", s)))

    def predict(self, inputs, output):
        self.events.append(("prediction", inputs["prompt"], output))
        return SimpleNamespace(
            log_score=lambda scorer, score: self.events.append(("score", scorer, score)),
            finish=lambda: self.events.append(("finish",)),
        )


class TestWeave:
    def test_missing_package_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "weave", None)
        with pytest.raises(ImportError, match="pip install weave"):
            WeaveCallback(trainer(prompts(1)))

    def test_scores_and_summary(self, monkeypatch):
        weave = FakeWeave()
        monkeypatch.setitem(sys.modules, "weave", weave)
        scorers = {"last_digit": lambda prompt, completion: int(prompt[1])}
        callback = WeaveCallback(trainer(prompts(4)), "project", scorers, num_prompts=3, model_name="m")
        callback.on_train_begin(None, state(), CONTROL)
        assert weave.client == "project"
        callback.on_evaluate(None, state(5), CONTROL)
        assert weave.events[0] == (
            "evaluation",
            {"model": "m", "dataset": "eval_dataset", "eval_attributes": {"step": 5}},
        )
        assert [e[1] for e in weave.events if e[0] == "prediction"] == ["p0:", "p1:", "p2:"]
        assert [e[1:] for e in weave.events if e[0] == "score"] == [("last_digit", i) for i in range(3)]
        assert weave.events.count(("finish",)) == 3
        assert weave.events[-1] == ("summary", {"last_digit": 1.0})

    def test_without_scorers_only_completions(self, monkeypatch):
        weave = FakeWeave()
        weave.client = "open already"
        monkeypatch.setitem(sys.modules, "weave", weave)
        WeaveCallback(trainer(prompts(2))).on_evaluate(None, state(5), CONTROL)
        assert weave.client == "open already"
        assert [e[0] for e in weave.events] == ["evaluation", *["prediction", "finish"] * 2, "summary"]

    @pytest.mark.parametrize("run", [None, SimpleNamespace(project="from-wandb")])
    def test_project_of_the_wandb_run(self, monkeypatch, run):
        weave = FakeWeave()
        monkeypatch.setitem(sys.modules, "weave", weave)
        fake_tracker(monkeypatch, "wandb", run=run)
        callback = WeaveCallback(trainer(prompts(1)))
        if run is None:
            with pytest.raises(ConfigError, match="project_name"):
                callback.on_train_begin(None, state(), CONTROL)
        else:
            callback.on_train_begin(None, state(), CONTROL)
            assert weave.client == "from-wandb"
