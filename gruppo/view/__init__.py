"""`gruppo view`: a local page over run folders and evaluations. docs/view.md shows it.

run folder ──► index ──► queries ──► server ──► page     folders.py      find the run and evaluation folders
                            │                            index.py        the numbers of all completions, as arrays
                            └──────► export              groups.py       groups of completions: filters and order
                                                         prompts.py      one prompt over the course of training
                                                         tokens.py       one completion, token by token
                                                         curves.py       metrics, followed while the run continues
                                                         evaluations.py  results; comparison of two checkpoints
                                                         source.py       one run: combines all of the above
                                                         queries.py      the page's queries and their answers
                                                         server.py       serves the answers over HTTP, loopback only
                                                         export.py       writes the answers into one HTML file
                                                         static/         the page: plain ES modules, no build step
"""
