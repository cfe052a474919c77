"""Functions of one element, written by users and read as programs."""

from .op import Pointwise
from .program import Program

__all__ = ["Pointwise", "Program"]
