"""Experts that come to the slots of a cache by jobs."""
