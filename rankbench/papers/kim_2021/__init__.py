"""Kim et al. 2021: the Lipschitz constant of self-attention."""

from rankbench.papers.kim_2021.attention import ATTENTION
from rankbench.papers.kim_2021.char_lm import CHAR_LM
from rankbench.papers.kim_2021.power_iteration import LAW as POWER_ITERATION
from rankbench.papers.kim_2021.score_biases import LAW as SCORE_BIASES

PAPERS = {"Kim et al. 2021": "The Lipschitz constant of self-attention"}
CLAIMS = ATTENTION | CHAR_LM
LAWS = {"power_iteration": POWER_ITERATION, "score_biases": SCORE_BIASES}
