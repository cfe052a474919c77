"""Functions of a door as operators of ``torch.library``."""
