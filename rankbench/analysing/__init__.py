"""Carrying analyses out: on a network or any module, of a run or a config, seed by seed, into a folder."""
