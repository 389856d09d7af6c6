"""python -m campaigns [name] [seed=0] [cases=100]: run a campaign and record how it ended.

Without a name: list the campaigns, and write the page of the record anew.
"""

import logging
import sys
import tempfile
from pathlib import Path

from campaigns import CAMPAIGNS
from campaigns.campaign import PAGE, page, record, run


def main(words: list[str]) -> int:
    """Returns the exit code: 1 if a case was wrong."""
    if not words:
        PAGE.write_text(page(CAMPAIGNS), encoding="utf-8")
        print("\n".join(CAMPAIGNS))
        return 0
    name, campaign = words[0], CAMPAIGNS[words[0]]
    options = {key: int(value) for key, _, value in (word.partition("=") for word in words[1:])}
    seed, size = options.get("seed", 0), options.get("cases", campaign.full_size)
    logging.disable(logging.WARNING)  # of what rankbench says about the things that are done to it
    with tempfile.TemporaryDirectory() as folder:
        row = run(name, campaign, seed, size, Path(folder), lambda line: print(line, flush=True))
    record(row, CAMPAIGNS)
    print(f"{name}: {row['wrong']} wrong of {row['cases']} cases in {row['seconds']} s. {row['remark']}")
    return int(row["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
