"""Prefill/decode transfer: a slot filled on one machine continues on another."""

from .agent import Settled, TransferAgent
from .layout import LayoutMismatch, Placement, PoolLayout
from .offer import Offer
from .plan import explain_plan, plan, source_ranks
from .pull import Pull, TransferError

__all__ = [
    "LayoutMismatch",
    "Offer",
    "Placement",
    "PoolLayout",
    "Pull",
    "Settled",
    "TransferAgent",
    "TransferError",
    "explain_plan",
    "plan",
    "source_ranks",
]
