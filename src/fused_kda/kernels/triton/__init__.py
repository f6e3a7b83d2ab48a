"""The whole decode step as one portable Triton launch: NVIDIA SM80 and later, AMD gfx942 and gfx950."""

from .compile import prebuild as prebuild
from .launch import prepare as prepare
from .launch import warm as warm
