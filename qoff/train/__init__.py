"""Training of models that do not fit into memory: units stream forward and then in reverse."""

from .attached import attach
from .offload import offload
from .optimizers import SGD, Adafactor, Adam, AdamW, Lion, Optimizer
from .schedules import Schedule
from .training import Training

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Lion",
    "Optimizer",
    "Schedule",
    "Training",
    "attach",
    "offload",
]
