"""A place for model-written Python, from which it cannot harm the run.

host ──► jail ──► the code           sandbox.py       `Sandbox`, as its users see it
                                     spec.py          limits, the result, and what the host tells the jail
                                     host.py          starts a jail, reads its output, cleans up
                                     jail/            the other side of the fork: namespaces, limits, filters
                                     capabilities.py  which protections hold on this machine (attacks.py tries)
                                     places.py        which files the code may read
                                     variables.py     which environment variables other helper processes get
"""

from gruppo.sandbox.capabilities import Capabilities
from gruppo.sandbox.sandbox import Sandbox
from gruppo.sandbox.spec import Execution, Limits

__all__ = ["Capabilities", "Execution", "Limits", "Sandbox"]
