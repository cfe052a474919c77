"""Layers that are built from ops, with routers, load balancing and shared experts around them."""

from .moe import MoE, MoEOutput
from .route import Groups, Routes
from .router import Router

__all__ = ["Groups", "MoE", "MoEOutput", "Router", "Routes"]
