"""Presets at one budget, one after the other: `make paper` and `make laptop` on this machine, `make card` on a GPU."""
