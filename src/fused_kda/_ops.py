"""The torch namespace that the op is registered in.

A build for the Hugging Face ``kernels`` library (``make kernel-hub``) has another file in this place, under the name
and with the functions that the convention gives it, so that its op never clashes with an installed package's.
"""

from __future__ import annotations

import torch

NAMESPACE = "fused_kda"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The op's qualified name: namespace::op."""
    return f"{NAMESPACE}::{op_name}"
