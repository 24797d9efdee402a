"""The frozen data every other part speaks: mesh, layout, graph, plan, program. Imports neither torch nor a solver."""
