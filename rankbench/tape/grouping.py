"""Sums for each token by itself, as those of gates and experts, told from sums over the tokens of a group, as the words
of a sentence are: there an input of three axes has two axes of tokens."""

from rankbench.config.keys import ConfigError
from rankbench.tape.probe import Touched


def check_groups(touched: Touched) -> None:
    """ConfigError for a weighted sum that looks like one for each token by itself, if the touched key moves with the
    touch while the leading index stays."""
    sums = touched.of_one_token
    if not sums or all(len(mark.shape) != 3 for mark in touched.marks.values()):
        return
    for way in (touched.way._replace(last=True), touched.way._replace(beside=-1)):  # along the last axis, the second
        other = touched.another(way, touched.own_rows)
        found = {} if other is None else other.of_one_token
        for key in filter(found.__contains__, sums):
            (call, keys, leads), (_, other_keys, other_leads) = sums[key], found[key]
            if keys != other_keys and leads.equal(other_leads):
                raise ConfigError(
                    f"{call}: sums over one of two axes of tokens by weights without queries of theirs, as where the "
                    "words of each sentence are pooled, so that nothing shows its heads; give inputs with one axis of "
                    "tokens, which the module splits itself, or with features in a fourth axis"
                )
