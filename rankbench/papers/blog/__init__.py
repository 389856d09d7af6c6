"""The attention-paths blog: weakly interdependent paths, and the causes of the collapse."""

from rankbench.papers.blog.causes import CAUSES_OF_COLLAPSE
from rankbench.papers.blog.claims import CLAIMS as CONDITIONS

PAPERS = {"Attention-paths blog": "Weak interdependence of attention paths"}
CLAIMS = CONDITIONS | CAUSES_OF_COLLAPSE
