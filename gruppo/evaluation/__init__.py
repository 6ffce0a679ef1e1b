"""Benchmarks: how good a model is, told so that it can be trusted. docs/evaluation.md is the user's side.

    evaluate ─► problems ─► prompts ─► attempts ─► grades ─► numbers ─► files

types.py        the nouns                          scoring.py       grades and votes
benchmarks/     one file per data set              graders.py       workers for symbolic answers (worker.py)
data.py         problems from files or the hub     paper_grader.py  the looser grading of the DeepSeekMath paper
prompts.py      how a problem is asked             gold.py          whether the grader accepts the reference answers
models.py       the model and its sampler          statistics.py    intervals, pass@k, votes, paired tests
sampling.py     one pass over a benchmark          summary.py       the numbers of one pass
tir.py          rounds of text and programs        compare.py       two models, problem by problem
programs.py     the programs in the sandbox        tables.py        Markdown, LaTeX; paper_results.py: its rows
run.py          `evaluate` itself                  store.py         the folder of an evaluation
progress.py     a bar                              callback.py      benchmarks during training
"""
