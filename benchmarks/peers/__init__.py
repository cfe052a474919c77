"""Other libraries that compute experts, as contestants of ``bench mlp`` and ``bench hf`` where they are installed."""

from . import deepgemm, liger, quack, scattermoe, sonicmoe, transformer_engine
from .peer import Peer

_ALL = (sonicmoe.PEER, quack.PEER, deepgemm.PEER, scattermoe.PEER, liger.PEER, transformer_engine.PEER)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}
