"""The cases of ``ep_transformers_cases`` that need four ranks."""

from ep_transformers_cases import ON_FOUR as CASES  # noqa: F401
