"""A plan run in virtual time: the engine's own schedule, rings and prefetchers, nothing real."""

from .run import SimulatedRound, Simulation, simulated

__all__ = ["SimulatedRound", "Simulation", "simulated"]
