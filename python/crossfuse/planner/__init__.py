"""The planner: what a chain moves, how long that takes, and which plan is best."""
