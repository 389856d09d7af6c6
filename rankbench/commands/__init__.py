"""All that knows Hydra: the command line, its help, the callback that refuses wrong configs, and its messages."""
