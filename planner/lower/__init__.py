"""Plan + Graph -> Program: the readable source every stage runs, and the tensors it owns.

lower(graph, plan) -> Program
  planner.layouts    the plan's strategies, for every operator of the graph
  stages     which nodes, inputs, weights and counts belong to which stage
  source     nodes as Python text
"""

from planner.lower.stages import lower

__all__ = ["lower"]
