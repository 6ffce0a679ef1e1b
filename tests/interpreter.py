"""Triton's interpreter, which runs kernels on a CPU: same code, tiny shapes, no bfloat16 matrix products."""

import os
from typing import Any


def make_ready() -> None:
    """To be called before the first kernel of a test module. With a GPU it does nothing: kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patched_for_index"):
        return
    # Triton 3.6 converts a loop bound with int(array of one element), which numpy 2.4 no longer accepts.
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index
    interpreter._patched_for_index = True
