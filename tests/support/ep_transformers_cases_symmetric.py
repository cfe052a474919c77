"""The cases of ``ep_transformers_cases`` for the transport ``symmetric``."""

from ep_transformers_cases import SYMMETRIC as CASES  # noqa: F401
