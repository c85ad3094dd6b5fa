"""A model of blocks with residual connections, an embedding and a head, and how it trains."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, BLOCKS = 32, 16, 4


class Block(nn.Module):
    """Two linear layers, dropout, and a residual connection."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(self.up(self.norm(x)).relu()))


class Model(nn.Module):
    """Predicts a token from the one before. ``reentrant`` is a kind of checkpointing, or None."""

    def __init__(self, dropout: float = 0.0, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.reentrant: bool | None = None

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.layers:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def build(dropout: float = 0.0, blocks: int = BLOCKS) -> Model:
    """Return the model with the same initial parameters each time."""
    torch.manual_seed(0)
    return Model(dropout, blocks)


def batch(number: int) -> torch.Tensor:
    """Return the tokens (4, 33) of a batch: a sequence with noise, whose loss can fall."""
    generator = torch.Generator().manual_seed(number)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    noise = (torch.rand(4, 33, generator=generator) < 0.1).long()
    return (start + 3 * torch.arange(33) + noise) % VOCABULARY


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
