"""rankbench: what do heads, depth, skips, MLPs and norms do to the rank and the smoothness of a transformer?"""

__version__ = "0.1.0"
