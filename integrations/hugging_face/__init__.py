"""Experts and routers of Hugging Face models: what the integrations with transformers and PEFT share."""
