"""The decode step as served engines fall back to it: three Triton launches, rounding to bf16 between them.

It is the honest baseline for parity and for speed, and what runs where a one-launch backend cannot.
"""

from .launch import prebuild as prebuild
from .launch import prepare as prepare
