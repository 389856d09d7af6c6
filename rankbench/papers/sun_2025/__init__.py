"""Claim of Sun et al. 2025: the variance of deep pre-norm networks."""

from rankbench.judging.claim import Claim
from rankbench.judging.of_laws import agrees
from rankbench.papers.sun_2025.depth_curse import LAW

PAPERS = {"Sun et al. 2025": "The curse of depth in large language models"}
LAWS = {"depth_curse": LAW}

CLAIMS: dict[str, Claim] = {
    # the line: twice the random error of one network, whose early layers err by sqrt(2/128) of themselves
    "law_depth_curse": agrees(
        law="depth_curse",
        line=0.25,
        statement="The variance of a fresh pre-norm network grows as 1 + 2 sum of s_l^2: linearly, and with LayerNorm "
        "scaling, s_l = 1/sqrt(l), logarithmically",
        source="Sun et al. 2025, The curse of depth in large language models; closed form derived here",
        control="norms behind the branches in place of before them",
        relative=True,
    ),
}
