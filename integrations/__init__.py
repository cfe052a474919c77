"""Other people's models and files, run and read by this library. Each module imports its framework itself.

The ones for Hugging Face transformers and PEFT are imported as soon as transformers' models and PEFT's LoRA are, and
what containers learn of the layouts of others as soon as there are ops.
"""

from .on_import import after_import

__all__: list[str] = []

after_import(f"{__package__.removesuffix('integrations')}ops", f"{__name__}.loading")
after_import("transformers.modeling_utils", f"{__name__}.transformers")
after_import("peft.tuners.lora", f"{__name__}.peft")
