"""The contract between planner, simulator and passes: a plan, its schedule, their JSON."""
