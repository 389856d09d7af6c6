"""The Transformer: every part that the theory is about is a toggle of its config.

Shapes: B batch, N token, D width, H head, C classes or output dimensions, F hidden width of the MLP.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.config.model import ModelConfig
from rankbench.model.attention import Attention
from rankbench.model.linear import Linear
from rankbench.model.mlp import MLP
from rankbench.model.network import Network
from rankbench.model.norm import Norm
from rankbench.model.sublayers import AnySublayer, AttentionSublayer, MlpSublayer, Streams, Sublayer

ACTIVATION_LAYERS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}
SINKHORN_STEPS = 20  # as in Xie et al. 2025
DROPPED = ("weights", "output")  # of a sub-layer, by dropout; an MLP has only the latter
# Next to the tokens, a second stream is carried along unchanged: the embedding, or the first attention's input.
CARRIED = Streams(read=(1.0, 0.0), mix=((0.0, 0.0), (0.0, 1.0)), write=(1.0, 0.0))


class HyperConnection(nn.Module):
    """Learned streams around sub-layer `number` (from 0). Zhu et al. 2024, the static form.

    doubly_stochastic: the mixing matrix is exp(mix) after Sinkhorn's steps (Xie et al. 2025, mHC).
    """

    def __init__(self, cfg: ModelConfig, number: int) -> None:
        super().__init__()
        self.number, self.is_projected = number, cfg.hyper_connections == "doubly_stochastic"
        self.read = nn.Parameter(torch.zeros(cfg.streams))
        self.mix = nn.Parameter(torch.zeros(cfg.streams, cfg.streams))
        self.write = nn.Parameter(torch.ones(cfg.streams))

    def start(self, deviation: float, generator: torch.Generator) -> None:
        """Start as a plain skip (read one stream, write to all, keep each: they stay equal), then add noise."""
        self.read.zero_()[self.number % len(self.read)] = 1
        self.mix.copy_(torch.eye(len(self.read)))
        self.write.fill_(1)
        for matrix in (self.read, self.mix, self.write) if deviation else ():
            noise = torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype, device=matrix.device)
            matrix.add_(deviation * noise)

    def streams(self, skip: float) -> Streams:
        """The streams. skip: factor of the states that they carry."""
        mix_SS = doubly_stochastic(self.mix.exp()) if self.is_projected else self.mix
        return Streams(self.read, mix_SS if skip == 1 else skip * mix_SS, self.write)


def doubly_stochastic(matrix_SS: Tensor) -> Tensor:
    """Positive matrix with columns and rows divided by their sums in turn (Sinkhorn and Knopp); rows last."""
    for _ in range(SINKHORN_STEPS):
        matrix_SS = matrix_SS / matrix_SS.sum(-2, keepdim=True)
        matrix_SS = matrix_SS / matrix_SS.sum(-1, keepdim=True)
    return matrix_SS


class Block(nn.Module):
    """Parameters of one layer, by its number from 0: attention, then an MLP, each with its own norms and streams.

    With model.shared_layers they are those of every layer, and the number is 0.
    """

    def __init__(self, cfg: ModelConfig, number: int) -> None:
        super().__init__()
        self.attention = Attention(cfg, number + 1)
        self._surround("attention", cfg, (1 + cfg.mlp) * number)
        self.mlp = MLP(cfg) if cfg.mlp else None
        self._surround("mlp", cfg, (1 + cfg.mlp) * number + 1)

    def _surround(self, kind: str, cfg: ModelConfig, number: int) -> None:
        """Add the norms and streams around a sub-layer, by its number from 0; None for those that it does not have."""
        is_there = kind == "attention" or cfg.mlp
        layer = number // (1 + cfg.mlp) + 1
        factor = layer**-0.5 if cfg.norm_scale == "depth" else 1.0
        has_norm, has_branch_norm = is_there and cfg.norm != "none", is_there and cfg.norm in ("peri", "ngpt")
        setattr(self, f"{kind}_norm", Norm(cfg, cfg.norm_affine, factor) if has_norm else None)
        setattr(self, f"{kind}_branch_norm", Norm(cfg, cfg.norm_affine) if has_branch_norm else None)
        has_streams = is_there and cfg.hyper_connections != "none"
        setattr(self, f"{kind}_streams", HyperConnection(cfg, number) if has_streams else None)


def embedding(num: int, width: int) -> nn.Embedding:
    """nn.Embedding, but without a draw on the meta device, where drawing would only import torch's compiler."""
    weight = torch.empty(num, width)
    return nn.Embedding.from_pretrained(weight if weight.is_meta else nn.init.normal_(weight), freeze=False)


class Transformer(Network, nn.Module):
    """Read-in, L blocks or one block L times, (pre-norm and peri-norm only) a last norm, read-out.

    num_inputs: the alphabet's size for tokens, the dimension for coordinates. num_outputs: classes per token, or
    dimensions for regression. length: the longest sequence (rows of a learned position table). padded: whether tokens
    can be absent (-1); no attention sees absent tokens, and their states are finite but meaningless.
    """

    vectorised: ClassVar[bool] = True  # vmap can run many seeds side by side
    blocks: Any  # of type Block, in a ModuleList

    def __init__(
        self, cfg: ModelConfig, *, input_kind: str, num_inputs: int, num_outputs: int, length: int, padded: bool = False
    ) -> None:
        super().__init__()
        self.cfg, self.input_kind, self.padded = cfg, input_kind, padded
        self.through: Callable[..., Tensor] = Sublayer.__call__  # a training compiles it
        self.name, self.width, self.norm_kind = cfg.name, cfg.width, cfg.norm_kind
        self.sizes = {"input_kind": input_kind, "num_inputs": num_inputs, "num_outputs": num_outputs}
        self.sizes |= {"length": length, "padded": padded}
        self._check_ends(num_inputs, num_outputs)
        self.read_in: Any = self._read_in(cfg, num_inputs)
        position_width = {"learned": cfg.width, "concatenated": cfg.width - num_inputs}.get(cfg.positions)
        self.position = None if position_width is None else embedding(length, position_width)
        self.embedding_norm = Norm(cfg, cfg.norm_affine) if cfg.embedding_norm else None
        self.blocks = nn.ModuleList(Block(cfg, number) for number in range(1 if cfg.shared_layers else cfg.layers))
        for block in self.blocks[1:] if cfg.value_residual else ():
            block.attention.first = self.blocks[0].attention, cfg.value_residual
        self.last_norm = Norm(cfg, cfg.norm_affine) if cfg.norm in ("pre", "peri") else None
        self.read_out: Linear | FirstCoordinates = (
            Linear(cfg.width, num_outputs) if cfg.read_out == "linear" else FirstCoordinates(self, num_outputs)
        )

    def _read_in(self, cfg: ModelConfig, num_inputs: int) -> nn.Module:
        if cfg.read_in == "identity":
            return nn.Identity()
        if self.input_kind == "tokens":
            return embedding(num_inputs, cfg.width)
        first = Linear(num_inputs, cfg.width)
        if cfg.read_in == "linear":
            return first
        return nn.Sequential(first, ACTIVATION_LAYERS[cfg.activation](), Linear(cfg.width, cfg.width))

    def _check_ends(self, num_inputs: int, num_outputs: int) -> None:
        """Raise ConfigError if model.read_in or model.read_out do not fit the task's inputs or outputs."""
        cfg = self.cfg
        if cfg.read_in != "linear" and self.input_kind == "tokens":
            raise ConfigError(
                f"model.read_in={cfg.read_in}: this task's inputs are tokens, not coordinates; use linear"
            )
        if cfg.positions == "concatenated" and cfg.read_in != "identity":
            raise ConfigError(
                "model.positions=concatenated: fills the width that the coordinates leave; "
                f"needs model.read_in=identity, got {cfg.read_in}"
            )
        if cfg.positions == "concatenated" and cfg.width <= num_inputs:
            raise ConfigError(
                f"model.width={cfg.width}: leaves no room for positions next to the task's {num_inputs} coordinates; "
                f"model.positions=concatenated needs at least {num_inputs + 1}"
            )
        if cfg.read_in == "identity" and cfg.positions != "concatenated" and cfg.width != num_inputs:
            raise ConfigError(
                f"model.width={cfg.width}: model.read_in=identity needs the task's {num_inputs} coordinates"
            )
        if cfg.read_out == "identity" and cfg.width < num_outputs:
            raise ConfigError(
                f"model.width={cfg.width}: model.read_out=identity needs the task's {num_outputs} outputs"
            )

    def embed(self, inputs: Tensor) -> Tensor:
        """Map tokens (B, N) or coordinates (B, N, C) to states (B, N, D): read in, add positions, apply the norm."""
        x_BND = self.read_in(inputs.clamp(min=0) if self.padded else inputs)
        if self.position is not None:
            positions_ND = self.position.weight[: x_BND.shape[-2]]
            if self.cfg.positions == "concatenated":
                x_BND = torch.cat([x_BND, positions_ND.expand(*x_BND.shape[:-1], -1)], dim=-1)
            else:
                x_BND = x_BND + positions_ND
        elif self.cfg.positions == "sinusoidal":
            x_BND = x_BND + sinusoidal_positions(x_BND.shape[-2], self.cfg.width, x_BND.device).to(x_BND)
        return x_BND if self.embedding_norm is None else self.embedding_norm(x_BND)

    def present(self, inputs: Tensor) -> Tensor | None:
        return inputs >= 0 if self.padded else None

    @property
    def sublayers(self) -> tuple[AnySublayer, ...]:  # type: ignore[override]  # made anew: learned streams change
        """Attention and, if there is one, the MLP of each layer. A layer without an MLP has no norm for it either."""
        sublayers: list[AnySublayer] = []
        for layer, block in enumerate(self.blocks_in_order, 1):
            around = self._around(block, "attention", self.cfg.skip)
            sublayers.append(AttentionSublayer(layer, block.attention, *around))
            if block.mlp is not None:
                sublayers.append(MlpSublayer(layer, block.mlp, *self._around(block, "mlp", self.cfg.mlp_skip)))
        return tuple(sublayers)

    def _around(self, block: Block, kind: str, has_skip: bool) -> tuple[Any, ...]:
        """Norm, place, skip, branch, branch norm and streams of a sub-layer."""
        cfg, skip, streams = self.cfg, self.cfg.skip_scale if has_skip else 0.0, None
        norm, branch_norm, learned = [getattr(block, f"{kind}_{name}") for name in ("norm", "branch_norm", "streams")]
        if learned is not None:  # they replace the skip
            skip, streams = 0.0, learned.streams(skip)
        elif kind == "attention" and cfg.embedding_skip:
            streams = CARRIED._replace(read=(1.0, cfg.embedding_skip))
        elif kind == "attention" and block.attention.first is not None:
            streams = CARRIED._replace(beside=True)
        elif len(self.shares) > 1:
            streams = CARRIED
        return norm, cfg.norm, skip, cfg.branch_scale, branch_norm, streams

    @property
    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks_in_order]

    @property
    def blocks_in_order(self) -> list[Block]:
        """The block of each layer; with model.shared_layers the only one, once for each layer."""
        return [*self.blocks] * (self.cfg.layers // len(self.blocks))

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the streams in the state that is read out: for hyper-connections their mean, else the tokens."""
        cfg = self.cfg
        if cfg.hyper_connections != "none":
            return (1 / cfg.streams,) * cfg.streams
        return (1.0, 0.0) if cfg.embedding_skip or (cfg.value_residual and cfg.layers > 1) else (1.0,)

    def forward(self, inputs: Tensor, dropout: dict[str, Tensor] | None = None, kernel: str = "fused") -> Tensor:
        """Outputs (B, N, C). dropout: masks by name, from model.dropout; None turns dropout off. kernel: as in
        Attention.forward."""
        x_BND, present_BN = self.embed(inputs), self.present(inputs)
        x_BND = self.enter(x_BND if dropout is None else x_BND * dropout["embedding"])
        for sublayer in self.sublayers:
            masks = () if dropout is None else [dropout.get(f"{sublayer.name}.{what}") for what in DROPPED]
            x_BND = self.through(sublayer, x_BND, present_BN, kernel, *masks)
        return self.read_out(self.finish(self.leave(x_BND)))

    def dropout_shapes(self, num_sequences: int, num_tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the masks that `forward` takes, by name."""
        state = (num_sequences, num_tokens, self.cfg.width)
        shapes: dict[str, tuple[int, ...]] = {"embedding": state}
        for index in range(self.cfg.layers):
            shapes[f"layers.{index}.attention.weights"] = (num_sequences, self.cfg.heads, num_tokens, num_tokens)
            shapes[f"layers.{index}.attention.output"] = state
            if self.cfg.mlp:
                shapes[f"layers.{index}.mlp.output"] = state
        return shapes


class FirstCoordinates(nn.Module):
    """Read-out of the state's first coordinates, with `weight` and `bias` like nn.Linear. Nothing is learned."""

    def __init__(self, network: Network, num_outputs: int) -> None:
        super().__init__()
        self.network, self.num_outputs = [network], num_outputs  # in a list, so that it is not a submodule

    @property
    def weight(self) -> Tensor:
        """(C, D), with ones on the diagonal."""
        out = self.network[0].attentions[0].out.weight
        return torch.eye(self.num_outputs, out.shape[0], dtype=out.dtype, device=out.device)

    @property
    def bias(self) -> Tensor:
        return self.weight.new_zeros(self.num_outputs)

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND[..., : self.num_outputs]


def sinusoidal_positions(num_tokens: int, width: int, device: torch.device | None = None) -> Tensor:
    """Sines and cosines of geometric wavelengths, (N, D). Vaswani et al. 2017, sec. 3.5."""
    position_N1 = torch.arange(num_tokens, dtype=torch.float64, device=device)[:, None]
    rate_D = 10000.0 ** (-2 * (torch.arange(width, dtype=torch.float64, device=device) // 2) / width)
    angle_ND = position_N1 * rate_D
    return torch.where(torch.arange(width, device=device) % 2 == 0, angle_ND.sin(), angle_ND.cos())
