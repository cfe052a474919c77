"""Integrations: models and checkpoints of other libraries, run and read by this one.

Each module imports its framework itself.

The integrations for Hugging Face transformers and PEFT are imported when a program imports transformers' models or
PEFT's LoRA. The readers of foreign checkpoints are imported with the ops.
"""

from .on_import import after_import

__all__: list[str] = []

after_import(f"{__package__.removesuffix('integrations')}ops", f"{__name__}.state_dicts.loading")
after_import("transformers.modeling_utils", f"{__name__}.transformers")
after_import("peft.tuners.lora", f"{__name__}.peft")
