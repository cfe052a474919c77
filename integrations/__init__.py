"""Other people's models and files, run and read by this library. Each module imports its framework itself.

The one for Hugging Face transformers is imported as soon as transformers' models are.
"""

from . import loading
from .on_import import after_import

__all__ = ["loading"]

after_import("transformers.modeling_utils", f"{__name__}.transformers")
