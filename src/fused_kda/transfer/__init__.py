"""Prefill/decode transfer: a slot filled on one machine continues on another."""

from .layout import LayoutMismatch, Placement, PoolLayout
from .plan import explain_plan, plan, source_ranks

__all__ = ["LayoutMismatch", "Placement", "PoolLayout", "explain_plan", "plan", "source_ranks"]
