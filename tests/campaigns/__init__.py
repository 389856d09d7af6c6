"""Long programs that try what users, machines and disks do to rankbench. `make campaigns` runs them all."""

from importlib import import_module

from campaigns.campaign import Campaign

# in the order of their page
_NAMES = ("kill", "cut", "full_disk", "fuzz", "hostile", "foreign", "environments", "observer", "concurrency")
_NAMES += ("divergence", "soak")
CAMPAIGNS: dict[str, Campaign] = {name: import_module(f"campaigns.{name}").CAMPAIGN for name in _NAMES}
