"""Layers that are built from ops, with routers, load balancing and shared experts around them."""

from .balance import QuantileBias, SignBias
from .losses import GlobalLoss, SequenceLoss, SwitchLoss, ZLoss
from .moe import MoE, MoEOutput
from .record import Record
from .route import Groups, Routes
from .router import Router, record_routes, update_biases

__all__ = [
    "GlobalLoss",
    "Groups",
    "MoE",
    "MoEOutput",
    "QuantileBias",
    "Record",
    "Router",
    "Routes",
    "SequenceLoss",
    "SignBias",
    "SwitchLoss",
    "ZLoss",
    "record_routes",
    "update_biases",
]
