"""`gruppo view`: a local page over run folders and evaluations. docs/view.md shows it.

run folder ──► index ──► queries ──► server ──► page     folders.py      which runs and evaluations there are
                            │                            index.py        the numbers of all completions, as arrays
                            └──────► export              groups.py       groups of completions: filters and order
                                                         prompts.py      one prompt over the course of training
                                                         tokens.py       one completion, token by token
                                                         curves.py       metrics that grow while the run goes on
                                                         evaluations.py  results, and two checkpoints compared
                                                         source.py       one run, with all of the above
                                                         queries.py      questions of the page and their answers
                                                         server.py       the answers over HTTP, on loopback only
                                                         export.py       the answers in one file
                                                         static/         the page: plain ES modules, no build step
"""
