"""What things cost: hardware as data files, and plain functions for time, traffic and memory.

    hardware      Device, Link, Cluster; presets and measured machines as TOML
    mixed         clusters of unequal machines
    views         several devices or clusters priced as one, by the fastest or the slowest
    operators     what a cost model has to know of an operator: name, arguments, element sizes, aliases
    compute       floating-point operations and time of an operator, forward and backward
    collectives   time of a collective over a group of ranks
    memory        what autograd keeps for backward; weights, gradients and optimizer state of a device
    measured      tables of times measured at the shapes of a model, and prices by them
    calibration   the constants of a machine from times measured on it

Imports neither torch, nor a solver, nor planner.
"""
