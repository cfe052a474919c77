"""The parameters of grouped ops: stacked or one per expert, their gradients, ``main_grad``."""
