"""A training step as a CUDA graph: recorded once for each shape of batch, then launched as a whole.

Otherwise the host launches some two thousand kernels a step, which takes longer than the kernels of a small network.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from rankbench.config.schema import TrainConfig
from rankbench.runs.machine import Machine, refused_allocation
from rankbench.tasks import Batch

log = logging.getLogger(__name__)

RULES = ("adam", "adamw", "sgd")  # update rules that read the learning rate on the device


def ungraphed(cfg: TrainConfig, machine: Machine) -> str | None:
    """The key and value because of which a training's steps are not recorded; None if they are."""
    if machine.device.type != "cuda":
        return f"device={machine.device.type}"
    if cfg.optimizer.name not in RULES:
        return f"optimizer.name={cfg.optimizer.name}"
    if cfg.optimizer.cap is not None:
        return f"optimizer.cap={cfg.optimizer.cap}, whose singular values the host waits for"
    return None


class Graphs:
    """The graphs of `work`, one for each shape of batch.

    work (batch, streams of the dropout masks, learning rate): changes tensors on the device in place, and nothing else.
    Its first call of a shape runs as it is, so that kernels are chosen and their memory taken; the second is recorded.
    A graph reads and writes where the recorded call did, so the arguments are copied there; the learning rate has the
    digits of float32. The graphs share the memory of what they compute in between. If CUDA cannot record `work`, as
    with a plug-in's attention that waits for the device, it runs as it is and the log says so.
    """

    def __init__(self, work: Callable[[Batch, Tensor | None, float | Tensor], None]) -> None:
        self.work, self.refused = work, False
        self.forget()

    def forget(self) -> None:
        """Drop the graphs, because `work` is about to change other tensors."""
        self._batches: dict[torch.Size, Batch] = {}
        self._graphs: dict[torch.Size, torch.cuda.CUDAGraph] = {}
        self._streams: Tensor | None = None
        self._rate = torch.zeros((), device="cuda")
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, batch: Batch, streams_S2: Tensor | None, rate: float) -> None:
        """Do the work: take one step."""
        shape = batch.inputs.shape
        if self.refused:
            self.work(batch, streams_S2, rate)
            return
        is_first = shape not in self._batches
        kept = self._kept(batch, streams_S2, rate)
        if is_first:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # the one that records
                self.work(kept, self._streams, self._rate)
            torch.cuda.current_stream().wait_stream(self._stream)
        elif shape in self._graphs or self._record(kept):
            self._graphs[shape].replay()
        else:
            self.work(kept, self._streams, self._rate)

    def _kept(self, batch: Batch, streams_S2: Tensor | None, rate: float) -> Batch:
        """Copy the arguments to where the graphs read them; returns the batch there."""
        if (kept := self._batches.get(batch.inputs.shape)) is None:
            kept = self._batches[batch.inputs.shape] = Batch(batch.inputs.clone(), batch.targets.clone())
        else:
            kept.inputs.copy_(batch.inputs)
            kept.targets.copy_(batch.targets)
        if self._streams is not None and streams_S2 is not None:
            self._streams.copy_(streams_S2)
        elif streams_S2 is not None:
            self._streams = streams_S2.clone()
        self._rate.fill_(rate)
        return kept

    def _record(self, kept: Batch) -> bool:
        """Record the work on this batch, without doing it; whether CUDA can."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self.work(kept, self._streams, self._rate)
        except RuntimeError as error:
            if refused_allocation(error) is not None:
                raise
            reason = str(error).partition("\n")[0]
            log.info(
                "this training's steps are launched kernel by kernel, as CUDA cannot record them: %s", reason[:200]
            )
            self.refused = True
            return False
        self._graphs[kept.inputs.shape] = graph
        return True
