"""The trainer.

`core.PolicyTrainer` is a `transformers.Trainer` in layers, each of which knows those before it. A layer holds the
methods that transformers calls, and the hooks that subclasses of TRL's trainers override: those must be methods of the
trainer itself.

    reporting       logs, tables of completions, the model card
    feeding         which prompts a run sees, and when
    logprobs        log-probs under the policy and the reference; the parity check
    sampling        prompts → rollouts
    collecting      rollouts → rewards → advantages: the first half of a training step
    updating        log-probs and advantages → gradients: the second half
    watching        audits of every update, its record, and updates that must not happen
    checkpointing   what is saved, and when
    running         `train`: a run from its first call to its end, and where it goes on
    evaluating      completions of other prompts, and benchmarks
    stepping        where both halves of a step enter Trainer's loop
    names           settings and state as TRL calls them
    core            what a trainer is made of; then grpo, rloo
    (no layers)     callbacks for users; hooks: which methods a subclass may override, and what that costs; utils

What need not be a method of the trainer is an object or a function in a folder: `construct/` for what is checked and
made before a run, `collect/` and `update/` for the two halves of a step, `processes/` where there are several,
`books/` for metrics and ledgers, `resume/` for what a checkpoint remembers, `display/` for what people look at.
"""
