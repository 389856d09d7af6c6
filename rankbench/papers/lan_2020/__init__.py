"""Claims of Lan et al. 2020: what one layer does that is applied again and again."""

from rankbench.judging.claim import Claim
from rankbench.judging.of_laws import agrees
from rankbench.papers.lan_2020.looped import COLLAPSE, END

PAPERS = {"Lan et al. 2020": "ALBERT: A lite BERT for self-supervised learning of language representations"}
LAWS = {"looped_collapse": COLLAPSE, "looped_end": END}

CLAIMS: dict[str, Claim] = {
    "law_looped_collapse": agrees(
        law="looped_collapse",
        # the line: twice the random error of a seed of 16 networks, which is largest at the last layers with a = 1
        line=0.3,
        statement="One random layer that is applied again and again makes tokens alike sooner than layers of their "
        "own: its residual falls with g = sum of C(l, k)^2 a^2k in place of (1 + a^2)^l",
        source="Lan et al. 2020, whose layers share their weights; closed form derived here",
        control="layers of their own",
        relative=True,
    ),
    "law_looped_end": agrees(
        law="looped_end",
        # the line: what is left of the slowest start after 300 layers, and of tokens that are not alike, is a few .001
        line=0.02,
        statement="With post-norm, a layer that is applied again and again ends at a fixed point if the leading "
        "eigenvalue of its values is real, and else turns for ever, by the angle of 1 + a lambda",
        source="Lan et al. 2020, whose states oscillate; closed form derived here",
        control="layers of their own",
    ),
}
