"""Checks for those who write ops and fusions."""

from .fuser.testing import check_fusion, check_op

__all__ = ["check_fusion", "check_op"]
