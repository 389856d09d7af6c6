"""The recurrent baseline: layers of LSTM cells (Hochreiter & Schmidhuber 1997) between an embedding and a read-out.

Shapes: B batch, N token, D width, C class.
"""

import warnings
from typing import ClassVar

import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.config.model import ModelConfig
from rankbench.model.kinds import NO_KINDS, Kinds

WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")  # of nn.LSTM, in the order of torch.lstm


class Lstm(nn.Module):
    """Read-in, L layers of torch.nn.LSTM with D cells each, read-out; a token sees only earlier tokens.

    num_inputs, num_outputs: sizes of the alphabets. padded: whether tokens can be absent (-1); they come after all
    others, and their states are meaningless. vmap cannot run an LSTM, so seeds take turns.
    """

    vectorised: ClassVar[bool] = False
    kinds: Kinds = NO_KINDS

    def __init__(
        self, cfg: ModelConfig, *, input_kind: str, num_inputs: int, num_outputs: int, length: int, padded: bool = False
    ) -> None:
        super().__init__()
        if input_kind != "tokens":
            raise ConfigError(f"model.kind={cfg.kind}: reads tokens, and this task has {input_kind}; use a Transformer")
        self.cfg, self.name, self.padded = cfg, cfg.name, padded
        self.read_in = nn.Embedding(num_inputs, cfg.width)
        self.layers = nn.ModuleList(nn.LSTM(cfg.width, cfg.width, batch_first=True) for _ in range(cfg.layers))
        self.read_out = nn.Linear(cfg.width, num_outputs)

    def lengths(self, inputs: Tensor) -> Tensor | None:
        """Number of tokens of each sequence, (B,); None for a network without padding."""
        return (inputs >= 0).sum(-1) if self.padded else None

    def forward(self, inputs: Tensor, dropout: dict[str, Tensor] | None = None) -> Tensor:
        """Outputs (B, N, C). dropout: masks by name, from model.dropout; None turns dropout off."""
        x_BND = self.read_in(inputs.clamp(min=0) if self.padded else inputs)
        if dropout is not None:
            x_BND = x_BND * dropout["embedding"]
        zeros_1BD = x_BND.new_zeros(1, len(x_BND), self.cfg.width)
        for index, layer in enumerate(self.layers):
            weights = tuple(getattr(layer, name) for name in WEIGHTS)
            with warnings.catch_warnings():
                # cuDNN copies weights that are not contiguous, such as those of one of several stacked seeds
                warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
                # as nn.LSTM.forward, but without moving the weights into one block of CUDA memory: they are views
                start = (zeros_1BD, zeros_1BD)
                x_BND, *_ = torch.lstm(x_BND, start, weights, True, 1, 0.0, layer.training, False, True)
            if dropout is not None:
                x_BND = x_BND * dropout[f"layers.{index}.output"]
        return self.read_out(x_BND)

    def dropout_shapes(self, num_sequences: int, num_tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the masks that `forward` takes, by name."""
        names = ("embedding", *(f"layers.{index}.output" for index in range(self.cfg.layers)))
        return dict.fromkeys(names, (num_sequences, num_tokens, self.cfg.width))


def initialise_lstm(model: Lstm, generator: torch.Generator) -> None:
    """Draw every weight from `generator`, by the scheme in the model's config.

    pytorch: the defaults of torch.nn, U(+-1/sqrt(D)), embeddings N(0, 1). glorot: Xavier uniform, each gate's maps with
    their own fans, embeddings N(0, 1/D), biases 0 except 1 for the forget gates (Jozefowicz et al. 2015).
    """
    width, glorot = model.cfg.width, model.cfg.init == "glorot"
    with torch.no_grad():
        model.read_in.weight.normal_(0, width**-0.5 if glorot else 1.0, generator=generator)
        for module in (*model.layers, model.read_out):
            for name, parameter in module.named_parameters():
                if not glorot:
                    parameter.uniform_(-(width**-0.5), width**-0.5, generator=generator)
                elif name.startswith("weight"):
                    for weight in parameter.chunk(4 if module is not model.read_out else 1):  # of the four gates
                        nn.init.xavier_uniform_(weight, generator=generator)
                else:
                    parameter.zero_()
                    if name.startswith("bias_ih"):  # torch adds two biases; one of them suffices
                        parameter.chunk(4)[1].fill_(1)
