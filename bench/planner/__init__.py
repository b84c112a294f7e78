"""Whether the planner is right: its predictions beside runs, its choices beside others."""
