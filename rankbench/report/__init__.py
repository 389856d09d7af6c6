"""Reports on many runs: the report of a sweep, its page, and the scoreboard of presets."""
