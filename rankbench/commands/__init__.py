"""Everything that depends on Hydra: the command line, its help, the callback that checks configs, and messages."""
