"""Finding NIXL: its wheels install under one name per CUDA version, and are needed by nobody who does not transfer."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

#: Microseconds for which NIXL's progress thread sleeps at most, unless the transport wakes it.
PROGRESS_DELAY = 1000


def load_nixl() -> ModuleType:
    """NIXL's Python interface: of the installed wheels the one for this torch's CUDA, else whichever there is.

    Raises:
        ImportError: none is installed; the text says how to get one.
    """
    names = ["nixl_cu13", "nixl_cu12"]
    if (torch.version.cuda or "").startswith("12."):
        names.reverse()
    for name in names:
        if find_spec(name) is not None:
            return import_module(f"{name}._api")
    raise ImportError("transfer needs NIXL: pip install 'fused-kda[transfer]' (Linux; for CUDA 12 also nixl-cu12)")


def new_agent(nixl: ModuleType, name: str) -> Any:
    """NIXL's ``nixl_agent`` over UCX, with a progress thread that sleeps while nothing happens.

    NIXL's Python class sets the thread's delay to 0, which makes it poll without a pause: each agent then takes a whole
    core from whoever computes or copies. The class has no argument for it, hence the inner agent made here.
    """
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[]))
    config = nixl.nixlBind.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = PROGRESS_DELAY
    agent.agent = nixl.nixlBind.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


def nixl_errors(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """Everything NIXL raises. Its errors have no common base class."""
    bindings = nixl.nixlBind
    return tuple(getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
