"""Benchmark evaluation of models, with results that can be trusted. docs/evaluation.md is the user guide.

    evaluate ─► problems ─► prompts ─► attempts ─► grades ─► numbers ─► files

types.py        the data types                       grading.py        grades and votes
settings.py     how a model is asked and graded      graders.py        workers for symbolic answers (worker.py)
benchmarks/     one file per data set                paper_grader.py   the looser grading of the DeepSeekMath paper
data.py         problems from files or the hub       gold.py           whether the grader accepts the reference answers
tasks.py        benchmarks and selected problems     statistics.py     intervals, pass@k, votes, paired tests
prompts.py      how a problem is asked               summary.py        the numbers of one pass
models.py       the model and its sampler            compare.py        two models, problem by problem
weights.py      resolves a name to its weights       tables.py         Markdown, LaTeX
sampling.py     one pass over a benchmark            unlike.py         notes where passes in a table row differ
tir.py          rounds of text and programs          paper_results.py  published results of the DeepSeekMath paper
programs.py     the programs in the sandbox          store.py          the folder of an evaluation
run.py          `evaluate` itself                    progress.py       a progress bar
training.py     benchmarks during training           exemplars/        the examples of few-shot prompts
"""
