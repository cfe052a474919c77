"""Layers that are built from ops, with routers, load balancing and shared experts around them."""

from .moe import MoE, MoEOutput
from .router import Router, Routes

__all__ = ["MoE", "MoEOutput", "Router", "Routes"]
