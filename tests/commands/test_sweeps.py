"""rankbench.commands.sweeps: which jobs the words of a sweep make."""

import pytest
from command_line import refused


@pytest.mark.parametrize("words", [[], ["--cfg", "job"]])
def test_a_word_without_values_is_one_line_and_makes_no_folder(words, tmp_path):
    line = refused("train", "-m", "model.layers=range(1,0)", "seed=0,1", *words, at=tmp_path)
    assert line == "rankbench train: model.layers=range(1,0): no values; give one or more"
    assert list(tmp_path.iterdir()) == []
