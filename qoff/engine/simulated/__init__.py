"""A plan run in virtual time: the engine's own schedule, rings and prefetchers, nothing real."""

from .run import Driver, SimulatedRound, Simulation, simulated

__all__ = ["Driver", "SimulatedRound", "Simulation", "simulated"]
