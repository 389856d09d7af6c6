"""What a forward pass leaves behind for those who ask: its intermediates, by name."""

from collections.abc import Callable

from torch import Tensor


class Trace(dict[str, Tensor]):
    """Name -> intermediate. Trace() keeps all of them, Trace("weights", "gate") only names with these endings."""

    def __init__(self, *endings: str) -> None:
        super().__init__()
        self.endings = endings


def record(trace: dict[str, Tensor] | None, name: str, make: Callable[[], Tensor]) -> None:
    """Keep make() under this name if anyone wants it; what nobody wants is not computed."""
    if trace is not None and name.endswith(getattr(trace, "endings", ()) or ("",)):
        trace[name] = make()
