"""Long programs that try what users, machines and disks do to rankbench. `make campaigns` runs them all."""

from campaigns import (
    concurrency,
    cut,
    divergence,
    environments,
    foreign,
    full_disk,
    fuzz,
    hostile,
    kill,
    observer,
    soak,
)
from campaigns.campaign import Campaign

# in the order of their page
_MODULES = (kill, cut, full_disk, fuzz, hostile, foreign, environments, observer, concurrency, divergence, soak)
CAMPAIGNS: dict[str, Campaign] = {module.__name__.partition(".")[2]: module.CAMPAIGN for module in _MODULES}
