"""Numbers of half-quadratic splitting, which torch and compiled code share; see `reference.hqq`."""

NORM = 0.7  # the power of errors that is summed up
ITERATIONS = 12
BETA, KAPPA = 3.0, 1.2  # weight of the quadratic term in units of the scale; its growth
CLIP = 0.75  # steps by which the first range is narrower than the group's
TINY = 1e-30
# Compact scales are searched among so many spans, the one below a group's and the next ones, with
# so many zero points each: that of the middle, that of its codes.
SPANS, ZEROS = 3, 2
