"""Other people's models and files, run and read by this library. Each module imports its framework itself.

``import fusible.integrations.transformers`` is what a user of Hugging Face models writes.
"""

from . import loading

__all__ = ["loading"]
