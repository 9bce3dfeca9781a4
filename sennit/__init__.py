# SPDX-License-Identifier: Apache-2.0
"""Sennit: a multi-path transport, and the `torch.distributed` backend and DLRM trainer on top of it.

Importing the package makes the backend name "sennit" known to `torch.distributed`; nothing native is
loaded before the first process group is made. Where torch is not imported yet, `import torch` does it
through the entry point below, so importing sennit stays cheap. Without torch the import succeeds, and
`sennit.transport` works on its own.
"""

import importlib.util
import os
import sys
import warnings

__version__ = "0.1.0"


def _autoload() -> None:
    """Registers the backend. Entry point of the group `torch.backends`: torch calls it at the end of `import torch`.

    A broken installation of sennit must not break `import torch` for programs that do not use it.
    """
    try:
        from sennit.runtime.backend.process_group import register

        register()
    except Exception as error:
        warnings.warn(
            f"the backend 'sennit' is not available: {type(error).__name__}: {error}; run 'sennit doctor'",
            RuntimeWarning,
            stacklevel=2,
        )


if "torch" in sys.modules:
    # A torch without `distributed` yet is still being imported, and will call the entry point itself.
    if hasattr(sys.modules["torch"], "distributed"):
        _autoload()
elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1" and importlib.util.find_spec("torch") is not None:
    _autoload()
