"""Other people's models and files, run and read by this library. Each module imports its framework itself.

The one for Hugging Face transformers is imported as soon as transformers' models are, and what containers learn of the
layouts of others as soon as there are ops.
"""

from .on_import import after_import

__all__: list[str] = []

after_import(f"{__package__.removesuffix('integrations')}ops", f"{__name__}.loading")
after_import("transformers.modeling_utils", f"{__name__}.transformers")
