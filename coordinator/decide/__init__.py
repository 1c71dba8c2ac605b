"""What the coordinator decides: from a view to actions. No I/O, no clock, no chance.

The live coordinator and the simulator call the same functions with views of the same types.
"""
