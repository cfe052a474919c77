"""Exchanges between ranks, for layers of other frameworks."""
