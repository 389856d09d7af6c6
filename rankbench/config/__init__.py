"""The keys of configs, what they may be together, and what fills them: choices, plug-ins, presets."""
