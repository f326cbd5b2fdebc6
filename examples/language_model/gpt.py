"""A language model: a small GPT that learns to write like Python's own help texts, byte by byte.

    torchrun --nproc_per_node=2 ddp_training.py --config examples/language_model/config.yaml

The text comes with Python itself: the topics of help(), about 450 KB. A sample of what the model
writes, after an export of its weights to exports/gpt:

    python ddp_training.py export runs/NAME --output exports/gpt
    python -m examples.language_model.gpt exports/gpt
"""

import sys
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

CONTEXT, NUM_BYTES = 64, 256


class Pieces(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """(bytes (CONTEXT,), the byte after each (CONTEXT,)) of consecutive pieces of a text."""

    uses_randomness = False

    def __init__(self, text: bytes) -> None:
        self.codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.codes[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return piece[:-1], piece[1:]


def pieces(train: bool) -> Pieces:
    """Return all topics but every tenth one, or those."""
    texts = [topics[name] for name in sorted(topics)]
    chosen = [text for number, text in enumerate(texts) if (number % 10 > 0) == train]
    return Pieces("\n\n".join(chosen).encode())


class GPT(nn.Module):
    """(N, T) bytes -> (N, T, 256) logits of the byte after each."""

    def __init__(self, width: int = 96, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(NUM_BYTES, width), nn.Embedding(CONTEXT, width)
        how = {"activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, **how)
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        length = codes.shape[1]
        x = self.embed(codes) + self.place(torch.arange(length, device=codes.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        logits: torch.Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return logits


@torch.no_grad()
def write(model: nn.Module, text: str, length: int = 300) -> str:
    """Let model go on with text, byte by byte."""
    codes = torch.tensor([list(text.encode())])
    for _ in range(length):
        chances = (model(codes[:, -CONTEXT:])[:, -1] / 0.7).softmax(dim=1)
        codes = torch.cat([codes, torch.multinomial(chances, 1)], dim=1)
    return bytes(codes[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    model = GPT().eval()
    model.load_state_dict(load_file(f"{sys.argv[1]}/model.safetensors"))
    torch.manual_seed(0)
    print(write(model, "The "))
