"""Dong et al. 2021: pure attention loses rank; paths, and what skips, MLPs and norms do."""

from rankbench.papers.dong_2021.collapse import COLLAPSE, NORMS
from rankbench.papers.dong_2021.paths import PATHS
from rankbench.papers.dong_2021.remarks import REMARKS

PAPERS = {
    "Dong et al. 2021": "Attention is not all you need: pure attention loses rank doubly exponentially with depth"
}
CLAIMS = PATHS | COLLAPSE | NORMS | REMARKS
