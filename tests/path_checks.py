"""Checks of a network's path sums: against every path, and against those of the same network written in another way."""

from every_path import NO_PATH, ROUNDING, by_length, every_path

from rankbench.tape import record

TWO, THREE = [1, 4, 4], [1, 6, 12, 8]  # numbers of paths by length through layers of two heads
# Float64, a few hundred additions in two orders: eps = 2.2e-16, so 1e-12 of the largest part leaves a margin of ten.
SAME = 1e-12


def assert_every_path(module, inputs, num_paths, p="softmax", maps=(), written=None):
    """The tape of a module with these numbers of paths, whose sums are those of every path. p, maps: as of `Held`.
    written: the same network as `Held` can read it."""
    wanted_KBND, counts = by_length(every_path(written or module, inputs, p, maps))
    tape = record(module, **inputs)
    sums = tape.sums()
    assert counts == num_paths == tape.paths().by_length
    for got_BND, wanted_BND in zip(sums.by_length_KBND, wanted_KBND, strict=True):
        assert (got_BND - wanted_BND).norm() <= ROUNDING * wanted_BND.norm()
    assert sums.remainder < NO_PATH
    return tape


def assert_same_paths(one, other, x, num_paths=None):
    """The tapes of two networks, which have equal sums and numbers of paths: these, if they are given."""
    tape, same = record(one, x), record(other, x)
    counts = same.paths().by_length
    assert tape.paths().by_length == counts == (counts if num_paths is None else num_paths)
    sums, wanted = tape.sums(), same.sums()
    assert sums.by_length_KBND.shape == wanted.by_length_KBND.shape
    assert (sums.by_length_KBND - wanted.by_length_KBND).abs().max() <= SAME * wanted.by_length_KBND.abs().max()
    assert max(sums.remainder, wanted.remainder) < NO_PATH
    return tape, same
