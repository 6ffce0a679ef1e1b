"""The trainer.

`core.PolicyTrainer` is a `transformers.Trainer`. It is one class, written in several files: each adds a layer of
methods to those before it. They are methods because transformers calls them, because subclasses of TRL's trainers
override them, or because they read much of the trainer's state, all of which is declared in `state`.

    state           parts and state of the trainer: every attribute
    reporting       logs, tables of completions, the model card, pushes to the hub
    feeding         which prompts a run sees, and when
    logprobs        log-probs under the policy and the reference
    sampling        prompts → rollouts
    accounting      what is counted, logged, recorded and audited about a generation
    collecting      rollouts → rewards → advantages: the first half of a training step
    losses          log-probs and advantages → the loss of a micro-batch
    updating        packed rows → gradients: the second half of a training step
    auditing        audits of every update, its record, and updates that must not happen
    checkpointing   what is saved, and when
    resuming        which checkpoint a run continues from, and what is loaded from it
    running         `train`: a run from its start to its end
    evaluating      completions of evaluation prompts, and benchmarks
    stepping        where both halves of a step, and its end, enter Trainer's loop: begin to read here
    names           settings and state under their names in TRL
    core            makes the parts; then grpo, rloo
    (no layers)     callbacks for users; hooks: which methods a subclass may override, and what that costs; utils

What does not read much of the trainer's state is an object or a function in a folder: `construct/` for checks and
preparation before a run, `collect/` and `update/` for the two halves of a step, `processes/` for runs with several
processes, `books/` for metrics and ledgers, `resume/` for the state in a checkpoint, `display/` for output to users.
"""
