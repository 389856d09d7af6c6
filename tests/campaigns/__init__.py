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

CAMPAIGNS: dict[str, Campaign] = {
    "kill": kill.CAMPAIGN,
    "cut": cut.CAMPAIGN,
    "full_disk": full_disk.CAMPAIGN,
    "fuzz": fuzz.CAMPAIGN,
    "hostile": hostile.CAMPAIGN,
    "foreign": foreign.CAMPAIGN,
    "environments": environments.CAMPAIGN,
    "observer": observer.CAMPAIGN,
    "concurrency": concurrency.CAMPAIGN,
    "divergence": divergence.CAMPAIGN,
    "soak": soak.CAMPAIGN,
}
