"""The tape: exact path sums and attention of any torch module, without an adapter.

    tape = record(module, *args, **kwargs)      one ordinary forward pass
    sums = tape.sums()                          all paths by length, with the remainder
    tape.sums(upto="encoder.layer.3")           of the part up to a submodule
    tape.sums_of_each(["layer.0", "layer.1"])   of several such parts, one at a time, in one replay
    for part in tape.through_heads(): ...       all paths through each head, one attention call at a time
    tap(module, watch, *args, **kwargs)         P, q, k and v of each attention call, without a tape

Memory is that of one batch: for many texts, record them batch by batch.
"""

from rankbench.tape.replay import Call, Frozen
from rankbench.tape.rules import COVERED
from rankbench.tape.sums import Sums, Tape, ThroughHeads, record, tap
from rankbench.tape.tags import AttentionCall

__all__ = ["COVERED", "AttentionCall", "Call", "Frozen", "Sums", "Tape", "ThroughHeads", "record", "tap"]
