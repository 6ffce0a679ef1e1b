"""A sandbox for model-written Python code, which protects the run from it.

host ──► jail ──► the code           sandbox.py       `Sandbox`, the public interface
                                     spec.py          limits, the result, and the message from host to jail
                                     host.py          starts a jail, reads its output, cleans up
                                     jail/            runs in the new process: namespaces, limits, filters
                                     capabilities.py  which protections work on this machine, tested by attacks.py
                                     places.py        which files the code may read
                                     variables.py     which environment variables other helper processes get
"""

from gruppo.sandbox.capabilities import Capabilities
from gruppo.sandbox.sandbox import Sandbox
from gruppo.sandbox.spec import Execution, Limits

__all__ = ["Capabilities", "Execution", "Limits", "Sandbox"]
