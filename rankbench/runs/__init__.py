"""Files on disk: runs, sweeps, tables, and the record of the machine that made them."""
