"""The trainer.

`core.PolicyTrainer` is a `transformers.Trainer` built in layers: a chain of classes, each of which uses those before
it. A layer holds the methods that transformers calls and the hooks that subclasses of TRL's trainers override; both
must be methods of the trainer itself.

    reporting       logs, tables of completions, the model card
    feeding         which prompts a run sees, and when
    logprobs        log-probs under the policy and the reference; the parity check
    sampling        prompts → rollouts
    collecting      rollouts → rewards → advantages: the first half of a training step
    updating        log-probs and advantages → gradients: the second half
    auditing        audits of every update, its record, and updates that must not happen
    checkpointing   what is saved, and when
    running         `train`: a run from its start to its end, and where a resumed run continues
    evaluating      completions of evaluation prompts, and benchmarks
    stepping        where both halves of a step enter Trainer's loop
    names           settings and state under their names in TRL
    core            builds the trainer from its parts; then grpo, rloo
    (no layers)     callbacks for users; hooks: which methods a subclass may override, and what that costs; utils

Everything that need not be a method of the trainer is an object or a function in a folder: `construct/` for checks and
preparation before a run, `collect/` and `update/` for the two halves of a step, `processes/` for runs with several
processes, `books/` for metrics and ledgers, `resume/` for the state in a checkpoint, `display/` for output to users.
"""
